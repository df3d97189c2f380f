"""What ranks are asked to do in tests of what they keep."""

from __future__ import annotations

from torch import Tensor

from phalanx.launch.seat import Seat
from phalanx.params.gather_full import gather_full
from phalanx.state.layout import StateShard
from tests.captured import Case

Kept = tuple[str, list[StateShard], list[StateShard], dict[str, Tensor]]


def keep(seat: Seat, case: Case, plan: str, frozen: tuple[str, ...], options: dict[str, object]) -> Kept:
    """After one step: the facts about the model's state, what this rank saves and exports, and the export itself."""
    rank = case.rank(plan, seat=seat, frozen=frozen, **options)
    samples = next(iter(case.batch.values())).shape[0]
    first, count = rank.part(0, samples)
    step = rank.step.begin({name: rows[first : first + count] for name, rows in case.batch.items()}, first, lr=0.01)
    rank.step.engine.run(rank.step.program, step)
    state = [shard for shard, _ in rank.state_shards()]
    values = list(rank.values())
    full = {name: tensor.clone() for name, tensor in gather_full(
        rank.formation.state.all_parameters(), values, seat, rank.device
    )}  # fmt: skip
    rank.close()
    return rank.formation.facts.to_json(), state, [shard for shard, _ in values], full

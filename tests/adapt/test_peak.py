"""What a rank holds while state moves: never two states at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from phalanx.adapt import portions
from phalanx.adapt.portions import BYTES, Migration
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.session import change as change_module
from phalanx.session.change import change
from phalanx.state.layout import StateShard
from tests.adapt import jobs
from tests.adapt.living import Living
from tests.captured import GPT2, named

PLANS = ("pp=2,mb=2", "tp=2", "dp=2", "dp=2,zero=3", "tp=2", "pp=2,mb=2", "dp=2,zero=1")


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank while state moves. state: the larger of the two. portion: of what it holds of one, under either
    plan, the most."""

    plan: str
    most: int
    state: int
    portion: int


def bytes_of(shards: Sequence[StateShard]) -> int:
    return sum(shard.numel * BYTES[shard.dtype] for shard in shards)


def peaks(context: RankContext, plans: Sequence[str]) -> list[Peak]:
    """Every bucket is a portion, and a model has many."""
    of = named(GPT2, samples=8, tokens=8, n_layer=12, n_embd=64, n_head=4)
    found: list[Peak] = []
    whole = change_module.migrate

    def measured(migration: Migration, old: dict[str, Tensor], new: dict[str, Tensor], **options: Any) -> None:
        with Living(old.values()) as living:
            whole(migration, old, new, **options)
        layouts = [layout.get(context.rank, ()) for layout in (migration.old, migration.new)]
        parts = [[shard for shard in layout if shard.name in set(portion.names)]
                 for portion in migration.portions for layout in layouts]  # fmt: skip
        state, portion = max(map(bytes_of, layouts)), max(map(bytes_of, parts))
        found.append(Peak(member.plan.shown, living.most, state, portion))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions, "PORTION_BYTES", 0)
        patch.setattr(change_module, "migrate", measured)
        member = jobs.opened(context, of, plans[0])
        for number, plan in enumerate(plans[1:]):
            jobs.step(member, of, number)
            member, _ = change(member, jobs.planned(of, plan, context))
    member.close()
    return found


@pytest.mark.parametrize("plans", [PLANS[:2], pytest.param(PLANS, marks=pytest.mark.long)])
def test_a_rank_holds_its_larger_state_a_portion_and_the_messages_of_one(
    plans: Sequence[str], pool: WorkerPool
) -> None:
    """A portion's room beside what it is made of, and what comes and goes for it."""
    for own in pool.run(peaks, plans, world=2):
        assert len(own) == len(plans) - 1
        for peak in own:
            assert peak.most >= peak.state, "something was not counted"
            assert peak.state > 5 * peak.portion, "a portion is about a layer, or the limit says little"
            assert peak.most <= peak.state + 3 * peak.portion, peak

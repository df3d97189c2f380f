"""What ranks are asked to do in tests of what they keep."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx.launch.context import RankContext
from phalanx.params.gather_full import gather_full
from phalanx.state.layout import StateShard
from tests.captured import Case

Kept = tuple[str, list[StateShard], list[StateShard], dict[str, Tensor]]


class Tabled(nn.Module):
    """Has a table of integers and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([2, 0, 1, 3]), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x[:, self.table])
        for layer in self.layers:
            x = layer(x).tanh()
        return nn.functional.mse_loss(self.head(x).squeeze(-1), y)


def keep(context: RankContext, case: Case, plan: str, frozen: tuple[str, ...], options: dict[str, object]) -> Kept:
    """After one step: the facts about the model's state, what this rank saves and exports, and the export itself."""
    session = case.session(plan, context=context, frozen=frozen, **options)
    samples = next(iter(case.batch.values())).shape[0]
    first, count = session.part(0, samples)
    step = session.step.begin({name: rows[first : first + count] for name, rows in case.batch.items()}, first, lr=0.01)
    session.step.engine.run(session.step.program, step)
    state = [shard for shard, _ in session.state.shards()]
    values = list(session.state.values())
    full = {name: tensor.clone() for name, tensor in gather_full(
        session.compiled.formation.state.all_parameters(), values, context, session.compiled.device
    )}  # fmt: skip
    session.close()
    return session.compiled.formation.facts.to_json(), state, [shard for shard, _ in values], full

"""What ranks are asked to do in tests of the runtime."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Op
from phalanx.session.session import Session
from tests.captured import Case


@dataclass(frozen=True)
class Rows:
    """A batch as data of which the first samples are evaluated."""

    columns: dict[str, Tensor]

    def batch(self, first: int, count: int) -> dict[str, Tensor]:
        return {name: column[first : first + count] for name, column in self.columns.items()}


def evaluate(context: RankContext, case: Case, plan: str, counts: tuple[int, ...]) -> list[float]:
    """The evaluation loss of the first samples of the case's batch, for several numbers of them."""
    session = case.session(plan, context=context)
    losses = [session.evaluate(Rows(case.batch), count) for count in counts]
    session.close()
    return losses


class Stack(nn.Module):
    """Small everywhere, so that even scaled gradients are; but those of the embedding grow with the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 1, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        with torch.no_grad():
            self.embed.weight.mul_(1e-5)
            self.head.weight.mul_(0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x).squeeze(-1), y)


@dataclass(frozen=True)
class HalfStep:
    """A step in half precision on one rank: was its own part finite, were its weights changed, and the scale after."""

    finite_here: bool
    changed: bool
    scale: float


def half_steps(
    context: RankContext, captured: Captured, plan: Plan, values: dict[str, Tensor], sizes: tuple[float, ...]
):
    """Steps in float16 on inputs of these sizes."""
    session = Session.open(
        captured, RunConfig(dtype="float16", batch_size=4, compile="off"), plan, context=context,
        trainable=captured.trainable, read=lambda name, is_master, piece: values[name], buffers={},
    )  # fmt: skip
    found: list[HalfStep] = []
    for size in sizes:
        before = {name: weight.exact.clone() for name, weight in session.state.parameters.trained.items()}
        step = session.step.begin({"x": torch.full((4, 4), size), "y": torch.zeros(4)}, 0, lr=1e-6)
        session.step.engine.run(session.step.program, step, until=Op.STEP)
        finite = all(bool(gradient.isfinite().all()) for gradient in step.gradients.values())
        session.step.engine.run(session.step.program, step)
        after = {name: weight.exact for name, weight in session.state.parameters.trained.items()}
        changed = any(not torch.equal(before[name], value) for name, value in after.items())
        found.append(HalfStep(finite, changed, float(session.state.loss_scale.value)))
    session.close()
    return found

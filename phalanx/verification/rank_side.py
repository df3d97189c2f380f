"""One rank of the plan side: runs its part of every step through the same objects as training, and reports its pieces.

A target of `launch`: everything it is given and gives back can be pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.engine.inputs import num_samples
from phalanx.engine.rank import Rank
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Op
from phalanx.state.layout import Box
from phalanx.verification.case import Case


@dataclass(frozen=True)
class Owned:
    """The elements of some boxes of a tensor, one box after the other."""

    name: str
    boxes: tuple[Box, ...]
    data: Tensor


@dataclass
class Trace:
    """What one rank did; gradients and parameters as far as this rank owns them."""

    losses: list[float] = field(default_factory=list)
    gradients: list[list[Owned]] = field(default_factory=list)
    parameters: list[list[Owned]] = field(default_factory=list)
    instructions: dict[str, int] = field(default_factory=dict)
    parameter_elements: int = 0
    keeps_only_inputs: bool = True
    peak_gathered: int = 0
    sent_bytes: int = 0
    redistributed_bytes: int = 0


def run_rank(context: RankContext, case: Case, plan: Plan, captured: Captured, folder: Path) -> Trace:
    """Every step of the case. folder: holds the initial values of all parameters in `initial.pt`."""
    torch.set_num_threads(1 if context.world > 1 else torch.get_num_threads())
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32
    initial: Mapping[str, Tensor] = torch.load(folder / "initial.pt", mmap=True)

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        return piece.of(initial[name])

    device = torch.device(context.device)
    rank = Rank(
        captured, _config(case), plan, context=context, trainable=captured.trainable, read=read,
        buffers={name: value.to(device) for name, value in captured.buffers.items()},
    )  # fmt: skip
    trace = Trace()
    for consumed, batch in case.batches(case.spec()):
        _step(rank, case, consumed, batch, trace)
    _describe(rank, trace)
    rank.close()
    return trace


def _config(case: Case) -> RunConfig:
    training = case.training
    return RunConfig.create(
        lr=training.lr, betas=training.betas, eps=training.eps, weight_decay=training.weight_decay, clip=training.clip,
        seed=case.seed, dtype=case.dtype, compile=case.compile, batch_size=case.num_samples,
    )  # fmt: skip


def _step(rank: Rank, case: Case, consumed: int, batch: dict[str, Tensor], trace: Trace) -> None:
    """As `runtime.step.Step`, looking at the gradients before the optimizer uses them up."""
    first, count = rank.part(consumed, num_samples(batch))
    begin = first - consumed
    mine = {name: tensor[begin : begin + count] for name, tensor in batch.items()}
    step = rank.step.begin(mine, first, case.training.lr)
    program = rank.step.program
    rank.step.engine.run(program, step, until=Op.STEP)
    trace.gradients.append(_owned(rank, step.gradients))
    rank.step.engine.run(program, step)
    trace.keeps_only_inputs = step.linked.table.keeps_only_inputs
    assert step.loss is not None
    trace.losses.append(float(step.loss))
    rank.parameters.settle()
    weights = {name: weight.exact for name, weight in rank.parameters.weights.items()}
    trace.parameters.append(_owned(rank, weights))


def _owned(rank: Rank, tensors: Mapping[str, Tensor]) -> list[Owned]:
    found: list[Owned] = []
    for name, tensor in tensors.items():
        weight = rank.parameters.weights[name]
        if name in rank.formation.owned:
            data = weight.piece.packed(tensor.detach()).cpu().clone()
            found.append(Owned(name, weight.piece.boxes(), data))
    return found


def _describe(rank: Rank, trace: Trace) -> None:
    engine = rank.step.engine
    trace.instructions = {str(op): count for op, count in engine.executed.items()}
    trace.parameter_elements = rank.parameters.resident_elements
    trace.peak_gathered = rank.parameters.peak_gathered
    trace.sent_bytes = rank.links.sent_bytes
    trace.redistributed_bytes = sum(mover.moved_bytes for mover in engine.parts.movers.values())


def facts_of(traces: list[Trace], plan: Plan) -> dict[str, Any]:
    """What was measured, by name: per rank, and elements kept per rank of the pipeline, over its replicas."""
    kept, beside = [trace.parameter_elements for trace in traces], plan.dp * plan.tp
    facts: dict[str, Any] = {
        "instructions": [trace.instructions for trace in traces],
        "parameter elements kept": [sum(kept[p * beside : (p + 1) * beside]) for p in range(plan.pp)],
        "buckets gathered at once": [trace.peak_gathered for trace in traces],
    }
    if plan.tp == 1:
        return facts | {"only inputs kept for backward": all(trace.keeps_only_inputs for trace in traces)}
    return facts | {"bytes redistributed": [trace.redistributed_bytes for trace in traces]}

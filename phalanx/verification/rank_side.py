"""One rank of the plan side: runs its part of every step through the same objects as training, and reports its pieces.

A target of `launch`: everything it is given and gives back can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.engine.engine import Executed
from phalanx.engine.inputs import num_samples
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.prepare.initial_weights import load_buffers, open_weights
from phalanx.program.instructions import Op
from phalanx.session.session import Session
from phalanx.state.layout import Box
from phalanx.verification.case import Case, Copy, Part, Start


@dataclass
class Trace:
    """What one rank did: gradients and parameters of every step as far as this rank owns them, and all that it holds
    after the last."""

    initial: list[Part] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradients: list[list[Part]] = field(default_factory=list)
    parameters: list[list[Part]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    instructions: dict[str, int] = field(default_factory=dict)
    parameter_elements: int = 0
    keeps_only_inputs: bool = True
    peak_gathered: int = 0
    sent_bytes: int = 0
    redistributed_bytes: int = 0


def run_rank(context: RankContext, case: Case, plan: Plan, captured: Captured, folder: Path) -> Trace:
    """Every step of the case. folder: holds where both sides begin in `start.pt`."""
    torch.set_num_threads(1 if context.world > 1 else torch.get_num_threads())
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # float32 means float32
    start = Start(**torch.load(folder / "start.pt", mmap=True))
    weights = open_weights(case.model, case.spec(), case.seed)[0] if start.loads else None

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        if name in start.given:
            return piece.of(start.given[name])
        assert weights is not None, f"{name} is neither given nor loaded"
        return piece.read(weights, name)

    session = Session.open(
        captured, _config(case), plan, context=context, trainable=captured.trainable, read=read,
        buffers=load_buffers(captured, weights, torch.device(context.device)),
    )  # fmt: skip
    executed = Executed()
    session.step.engine.watches.append(executed)
    trace = Trace(initial=_owned(session, _weights(session)))
    for consumed, batch in case.batches(case.spec()):
        _step(session, case, consumed, batch, trace)
    trace.copies = list(_copies(session))
    _describe(session, executed, trace)
    session.close()
    return trace


def _config(case: Case) -> RunConfig:
    training = case.training
    return RunConfig.create(
        lr=training.lr, betas=training.betas, eps=training.eps, weight_decay=training.weight_decay, clip=training.clip,
        seed=case.seed, dtype=case.dtype, compile=case.compile, batch_size=case.num_samples,
    )  # fmt: skip


def _step(session: Session, case: Case, consumed: int, batch: dict[str, Tensor], trace: Trace) -> None:
    """As `engine.step.Step`, looking at the gradients before the optimizer uses them up."""
    first, count = session.part(consumed, num_samples(batch))
    begin = first - consumed
    mine = {name: tensor[begin : begin + count] for name, tensor in batch.items()}
    step = session.step.begin(mine, first, case.training.lr)
    program = session.step.program
    session.step.engine.run(program, step, until=Op.STEP)
    if session.compiled.device.type == "cuda":
        torch.cuda.synchronize()  # gradients may be on their way to the host
    trace.gradients.append(_owned(session, step.gradients))
    session.step.engine.run(program, step)
    trace.keeps_only_inputs = step.linked.table.keeps_only_inputs
    assert step.loss is not None
    trace.losses.append(float(step.loss))
    session.state.parameters.settle()
    trace.parameters.append(_owned(session, _weights(session)))


def _weights(session: Session) -> dict[str, Tensor]:
    return {name: weight.exact for name, weight in session.state.parameters.weights.items()}


def _owned(session: Session, tensors: Mapping[str, Tensor]) -> list[Part]:
    weights, owned = session.state.parameters.weights, session.compiled.formation.owned
    pieces = {name: weights[name].piece for name in tensors if name in owned}
    return [_part(piece, tensors[name]) for name, piece in pieces.items()]


def _part(piece: Piece, tensor: Tensor) -> Part:
    return Part(piece.name, piece.boxes(), piece.packed(tensor.detach()).cpu().clone())


def _copies(session: Session) -> Iterator[Copy]:
    """What a checkpoint would be written from, the parameters that are always here, and the buffers."""
    me, locals_here = session.compiled.formation.rank, session.compiled.formation.locals()
    for shard, data in session.state.shards():
        kind, _, name = shard.name.partition("/")
        yield Copy(me, "optimizer" if kind == "optimizer" else "copy", Part(name, shard.boxes, data.detach().cpu()))
    for name, tensor in session.state.parameters.resident().items():
        piece = Piece.whole(name, locals_here[name])
        if piece.local.numel:
            yield Copy(me, "copy", _part(piece, tensor))
    for name, tensor in session.compiled.buffers.items():
        yield Copy(me, "buffer", Part(name, (Box.whole(tuple(tensor.shape)),), tensor.detach().reshape(-1).cpu()))


def _describe(session: Session, executed: Executed, trace: Trace) -> None:
    trace.instructions = {str(op): count for op, count in executed.items()}
    trace.parameter_elements = session.state.parameters.resident_elements
    trace.peak_gathered = session.state.parameters.peak_gathered
    trace.sent_bytes = session.connected.links.sent_bytes
    trace.redistributed_bytes = sum(mover.moved_bytes for mover in session.step.engine.parts.movers.values())


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

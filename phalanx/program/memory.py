"""The memory a rank needs for one step, from when its instructions run: a prediction, in bytes by what holds them.

An upper bound where the exact moment of release is not known: what a forward saved is held until its weight gradients
are done, a message until it has arrived and been used. What libraries keep for themselves is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.costs import Costs
from phalanx.program.holders import buckets_of
from phalanx.program.instructions import COMPUTE, RECEIVES, SENDS, Instruction, Op
from phalanx.program.shape import ModelShape
from phalanx.program.shares import Shares
from phalanx.program.timeline import COMPUTE as COMPUTE_RESOURCE
from phalanx.program.timeline import Event

Change = tuple[float, int, str]  # when, bytes more (or less), of what


def peak_memory(plan: Plan, shape: ModelShape, costs: Costs, rank: int, events: Sequence[Event]) -> dict[str, int]:
    """What a rank holds at the moment it holds most; `events` are its own, in the order of its program."""
    held = _always(plan, shape, costs, rank)
    peak = dict(held)
    shares = Shares(plan, shape, costs)
    changes = [*_activations(costs, shares, events), *_messages(shares, events), *_gathered(costs, events)]
    changes += _working(costs, shares, events)
    if plan.zero >= 2:
        changes += _gradients(shape, costs, events)
    # At one moment, what is released makes room for what is taken.
    for _, size, part in sorted(changes):
        held[part] = held.get(part, 0) + size
        if sum(held.values()) > sum(peak.values()):
            peak = dict(held)
    return peak


def _always(plan: Plan, shape: ModelShape, costs: Costs, rank: int) -> dict[str, int]:
    """Held during the whole step. ZeRO shards the optimizer's state, from 2 on the gradients, with 3 the weights."""

    def share(size: int, from_stage: int) -> int:
        return -(-size // plan.shards) if plan.zero >= from_stage else size

    pp_index, *_ = Mesh.of(plan).coordinates(rank)
    held = buckets_of(plan, shape, pp_index)
    trained = [bucket for bucket in held if shape.trained[bucket]]
    return {
        "weights": share(sum(costs.buckets[bucket].weight_bytes for bucket in held), 3),
        "gradients": share(sum(costs.buckets[bucket].gradient_bytes for bucket in trained), 2),
        "optimizer": share(sum(costs.buckets[bucket].optimizer_bytes for bucket in trained), 1),
        "activations": 0,
        "buffers": 0,
    }


def _activations(costs: Costs, shares: Shares, events: Sequence[Event]) -> Iterable[Change]:
    """A forward without a backward (evaluation) keeps nothing."""
    computed = [(e, _place(e.instruction)) for e in events if e.instruction.op in COMPUTE]
    begun = {place: e.start for e, place in reversed(computed) if e.instruction.op in (Op.A, Op.B, Op.BW)}
    done = {place: e.end for e, place in computed if e.instruction.op in (Op.W, Op.BW)}
    for event, place in computed:
        block = event.instruction.block
        assert block is not None
        if event.instruction.op == Op.F and place in begun:
            share = shares.kept(event.instruction)
            saved, rebuilt = round(share * costs.saved_bytes[block]), round(share * costs.rebuilt_bytes[block])
            yield event.start, saved, "activations"
            yield begun[place], rebuilt, "activations"
            yield done[place], -saved - rebuilt, "activations"


def _working(costs: Costs, shares: Shares, events: Sequence[Event]) -> Iterable[Change]:
    for event in events:
        it = event.instruction
        if it.op in costs.working_bytes and it.block is not None:
            size = round(shares.kept(it) * costs.working_bytes[it.op][it.block])
            yield event.start, size, "working"
            yield event.end, -size, "working"


def _place(it: Instruction) -> tuple[int | None, ...]:
    return it.micro_batch, it.slice, it.half, it.block, it.step


def _messages(shares: Shares, events: Sequence[Event]) -> Iterable[Change]:
    """A buffer is taken where the message is issued, and given back when it was sent, or used for the first time."""
    now = 0.0  # the begin of the step
    waiting: dict[tuple[bool, int | None, int | None, int | None, int | None], int] = {}
    for event in events:
        instruction = event.instruction
        forward = instruction.op in (Op.F, Op.RECV_F)
        place = (forward, instruction.stage, instruction.micro_batch, instruction.slice, instruction.half)
        if instruction.op in SENDS or instruction.op in RECEIVES:
            size = shares.message_bytes(instruction)
            yield now, size, "buffers"
            if instruction.op in SENDS:
                yield event.end, -size, "buffers"
            else:
                waiting[place] = size
        elif instruction.op in COMPUTE - {Op.A} and place in waiting:
            yield event.end, -waiting.pop(place), "buffers"
        if event.resource == COMPUTE_RESOURCE:
            now = event.end


def _gathered(costs: Costs, events: Sequence[Event]) -> Iterable[Change]:
    now = 0.0  # the begin of the step
    for event in events:
        op, bucket = event.instruction.op, event.instruction.block
        if op in (Op.GATHER, Op.FREE):
            assert bucket is not None
            size = costs.buckets[bucket].weight_bytes
            yield (now, size, "weights") if op == Op.GATHER else (event.end, -size, "weights")
        if event.resource == COMPUTE_RESOURCE:
            now = event.end


def _gradients(shape: ModelShape, costs: Costs, events: Sequence[Event]) -> Iterable[Change]:
    """A bucket's whole gradients exist from the first backward that adds to them until they have been reduced."""
    live: dict[int, int] = {}
    for event in events:
        op, block = event.instruction.op, event.instruction.block
        if op in (Op.W, Op.BW):
            assert block is not None
            for bucket in shape.buckets(block):
                if bucket not in live and shape.trained[bucket]:
                    live[bucket] = costs.buckets[bucket].gradient_bytes
                    yield event.start, live[bucket], "gradients"
        elif op == Op.REDUCE and block in live:
            yield event.end, -live.pop(block), "gradients"

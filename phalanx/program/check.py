"""Proves that lowered programs are right before anything runs: complete, in order, matched, and free of deadlock.

Programs are those of one pipeline, by the places of its ranks. The error shows the grid of ranks against time with the
offending place marked. Nothing here knows how long things take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.bind import bind
from phalanx.program.block_ops import BlockOps
from phalanx.program.check_ranks import check_messages, check_progress, check_ties
from phalanx.program.check_values import Broken, check_values
from phalanx.program.grid import Mark, draw, short_view
from phalanx.program.holders import buckets_of, fetched_of, is_tied, left_of, reduced_of, summed_of
from phalanx.program.instructions import HALVES, MOVES, RECEIVES, SENDS, Instruction, Op, Program, is_fetch
from phalanx.program.moved import moved_of
from phalanx.program.passes.offload import update
from phalanx.program.rules import place_of
from phalanx.program.schedules.one_f_one_b import NUM_AHEAD, most_held
from phalanx.program.shape import ModelShape
from phalanx.program.values import Table
from phalanx.program.visits import in_visits, seems_split, visit_of

WIDTH = 120
NEARBY = 3  # instructions shown on each side of the offending one
_UPDATE = frozenset((Op.REDUCE, Op.SUM, Op.TIE, Op.COUNT, Op.NORM, Op.STEP, Op.SHARE))


def check(
    plan: Plan, shape: ModelShape, programs: Sequence[Program], num_micro_batches: int, *, training: bool
) -> tuple[Table, ...]:
    """Raises a PlanError unless these are the programs of a training step, or of an evaluation; their tables."""
    if len(programs) != plan.pp:
        message = f"program: {len(programs)} programs for the {plan.pp} ranks of the pipeline"
        raise PlanError(message, "give one program per rank of the pipeline, in order")
    scope = Scope(plan, shape, num_micro_batches, training)
    try:
        tables = tuple(_check_rank(scope, index, program) for index, program in enumerate(programs))
        check_messages(programs)
        check_ties(plan, shape, programs)
        check_progress(plan, shape, tables)
        _check_bounds(scope, programs)
    except Broken as broken:
        hint = "correct the schedule or the pass that put it there (phalanx/program/)"
        words = f"program: rank {broken.index} {broken.words}"
        raise PlanError(f"{words}\n{_picture(programs, broken)}", hint) from None
    return tables


@dataclass(frozen=True)
class Scope:
    """A plan on a model, for a training step or for an evaluation."""

    plan: Plan
    shape: ModelShape
    num_micro_batches: int
    training: bool

    @property
    def halves(self) -> tuple[int | None, ...]:
        """The parts of a micro-batch, as instructions name them."""
        return tuple(range(self.plan.halves)) if self.plan.halves > 1 else (None,)

    def slices(self, micro_batch: int) -> tuple[int | None, ...]:
        """The parts of a micro-batch's tokens, as instructions name them."""
        return tuple(range(self.plan.num_slices(micro_batch))) if self.plan.slices else (None,)

    def parts(self) -> Iterator[tuple[int, int | None, int | None]]:
        """Micro-batch, slice and half."""
        for i in range(self.num_micro_batches):
            for slice_ in self.slices(i):
                for half in self.halves:
                    yield i, slice_, half


def _check_rank(scope: Scope, index: int, program: Program) -> Table:
    wanted = Counter((*_wanted(scope, index), *_moves(scope, index, program)))
    stages, held = scope.plan.stages_of(index), buckets_of(scope.plan, scope.shape, index)
    fetched = fetched_of(scope.plan, scope.shape, index)
    for position, it in enumerate(program):
        for work in _works(it, scope.plan):
            if work in wanted and wanted[work] > 0:
                wanted[work] -= 1
            elif work in wanted:
                raise Broken(f"runs {work} twice", index, position)
            elif not (is_fetch(it) and it.block in fetched) and not (
                it.op is Op.GATHER and scope.plan.gathers and it.block in held
            ):
                raise Broken(_out_of_place(scope, stages, it), index, position)
    missing = [work for work, count in wanted.items() if count > 0]
    if missing:
        raise Broken(f"never runs {missing[0]}", index)
    _check_update(program, index)
    table = bind(scope.plan, scope.shape, program, index)
    check_values(scope.plan, scope.shape, index, table)
    return table


_EARLIER = {  # what comes before: of the same bucket, or any
    Op.SUM: (Op.REDUCE,), Op.TIE: (Op.REDUCE, Op.SUM), Op.NORM: (Op.REDUCE, Op.SUM, Op.TIE), Op.STEP: (Op.NORM,),
    Op.SHARE: (Op.STEP,),
}  # fmt: skip


def _check_update(program: Program, index: int) -> None:
    """Gradients are reduced, summed, tied, measured, used and what became of them shared, in this order."""
    last = {(it.op, it.block): position for position, it in enumerate(program) if it.op in _UPDATE}
    for position, it in enumerate(program):
        for op in _EARLIER.get(it.op, ()):
            alike = it.op in (Op.SUM, Op.TIE)
            late = [p for (other, bucket), p in last.items() if other is op and (not alike or bucket == it.block)]
            if any(p > position for p in late):
                raise Broken(f"has {it} before {program[max(late)]}", index, position)


def _works(it: Instruction, plan: Plan) -> list[Instruction]:
    """BW is two of them; where a reduction stands is free but for its micro-batch."""
    if it.op is Op.BW:
        return [_as(it, Op.B), _as(it, Op.W)]
    if it.op is Op.REDUCE:
        micro_batch = it.micro_batch if plan.reduces == "micro-batch" else None
        return [Instruction(Op.REDUCE, micro_batch=micro_batch, block=it.block)]
    return [it]


def _as(it: Instruction, op: Op) -> Instruction:
    return Instruction(op, it.stage, it.micro_batch, it.block, None, it.half, it.op_index, it.slice)


def _wanted(scope: Scope, index: int) -> Iterator[Instruction]:
    """Everything that the rank at this place of the pipeline has to do, in no order."""
    plan, shape = scope.plan, scope.shape
    blocks = [BlockOps.of(plan, shape, block) for block in range(shape.num_blocks)]
    yield from {Instruction(Op.INPUT, micro_batch=i, half=half): None for i, _, half in scope.parts()}
    for stage in plan.stages_of(index):
        for micro_batch, slice_, half in scope.parts():
            for block in shape.blocks_with(slice_, plan.stage_blocks(stage)):
                for op, op_index in _pieces(blocks[block], scope.training):
                    yield Instruction(op, stage, micro_batch, block, None, half, op_index, slice_)
            yield from _messages(scope, stage, micro_batch, slice_, half)
    if scope.training:
        yield from _update(scope, index)


def _pieces(block: BlockOps, training: bool) -> Iterator[tuple[Op, int | None]]:
    def name(i: int) -> int | None:
        return i if block.numbered else None

    yield from ((block.forward(i), name(i)) for i in (*block.segments, *block.moved_forward))
    if training:
        yield from ((block.again_as(i), name(i)) for i in block.done_again)
        yield from ((op, name(i)) for i in block.segments for op in (Op.B, Op.W))
        yield from ((block.backward(i), name(i)) for i in block.moved_backward)


def _moves(scope: Scope, index: int, program: Program) -> set[Instruction]:
    """What goes to the host comes back. How much of what may go does is the affair of the pass."""
    movable = moved_of(scope.plan, scope.shape, program, index)
    moving = [it for it in program if it.op in MOVES and place_of(it) in movable]
    return {it._replace(op=op) for it in moving for op in MOVES}


def _messages(
    scope: Scope, stage: int, micro_batch: int, slice_: int | None, half: int | None
) -> Iterator[Instruction]:  # fmt: skip
    plan = scope.plan
    for op, back, way in ((Op.RECV_F, Op.SEND_B, -1), (Op.SEND_F, Op.RECV_B, 1)):
        other = stage + way
        if not 0 <= other < plan.num_stages or plan.pp_index(other) == plan.pp_index(stage):
            continue
        last = plan.stage_blocks(min(stage, other))[-1]
        if slice_ and last < scope.shape.num_whole_blocks:
            continue  # what crosses there belongs to the micro-batch and goes with slice 0
        for kind in (op, back) if scope.training else (op,):
            yield Instruction(kind, stage, micro_batch, None, plan.pp_index(other), half, None, slice_)


def _update(scope: Scope, index: int) -> Iterator[Instruction]:
    plan, shape = scope.plan, scope.shape
    yield Instruction(Op.COUNT)
    yield from update(plan, shape, index)
    yield from (Instruction(Op.OUT, block=bucket) for bucket in left_of(plan, shape, index))
    trained = [bucket for bucket in buckets_of(plan, shape, index) if shape.trained[bucket]]
    moments = range(scope.num_micro_batches) if plan.reduces == "micro-batch" else (None,)
    for bucket in trained:
        if is_tied(plan, shape, bucket):
            yield Instruction(Op.TIE, block=bucket)
        if plan.zero in (1, 2):
            yield Instruction(Op.SHARE, block=bucket)
    for bucket in reduced_of(plan, shape, index):
        yield from (Instruction(Op.REDUCE, micro_batch=moment, block=bucket) for moment in moments)
    yield from (Instruction(Op.SUM, block=bucket) for bucket in summed_of(plan, shape, index))


def _out_of_place(scope: Scope, stages: tuple[int, ...], it: Instruction) -> str:
    """Why an instruction has no place in a program."""
    plan = scope.plan
    if not scope.training and (it.op in _UPDATE or (in_visits(it) and visit_of(it, split=True).op is not Op.F)):
        return f"has {it} in an evaluation, which is forward only"
    if it.op is Op.GATHER and plan.gathers:
        return f"has {it}, but holds nothing of bucket {it.block}"
    if it.op is Op.GATHER:
        return f"has {it}, but zero={plan.zero} leaves every parameter in place"
    if is_fetch(it):
        return f"has {it}, but the parameters of bucket {it.block} do not lie on its host"
    if it.stage is not None and it.stage not in stages:
        held = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        return f"has {it}, but stage {it.stage} is not on this rank (it holds {held})"
    if it.micro_batch is not None and it.micro_batch >= scope.num_micro_batches:
        return f"has {it}, but there are {scope.num_micro_batches} micro-batches, counted from 0"
    if in_visits(it) and it.half not in scope.halves:
        cut = "whole" if scope.halves == (None,) else f"cut into the halves {' and '.join(HALVES)}"
        return f"has {it}, but micro-batches are {cut} under this plan"
    if in_visits(it) and it.micro_batch is not None and it.slice not in (own := scope.slices(it.micro_batch)):
        cut = "is not cut into slices" if own == (None,) else f"has the slices 0 to {own[-1]}"
        return f"has {it}, but micro-batch {it.micro_batch} {cut} under this plan"
    if in_visits(it) and it.stage is not None:
        blocks = plan.stage_blocks(it.stage)
        if it.block not in blocks:
            return f"has {it}, but stage {it.stage} is made of the blocks {blocks[0]} to {blocks[-1]}"
        if it.block not in scope.shape.blocks_with(it.slice, blocks):
            return f"has {it}, but block {it.block} runs once per micro-batch, with slice 0"
        return f"has {it}, for which block {it.block} has no op under this plan"
    if it.op in MOVES:
        return f"has {it}, but of block {it.block} nothing is to move there under this plan"
    if it.op in SENDS or it.op in RECEIVES:
        return f"has {it}, but nothing passes there between stage {it.stage} and rank {it.peer}"
    return f"has {it} once more than this plan needs"


def held_activations(program: Program) -> int:
    """The most forwards of a stage and part of a micro-batch that wait for their backward (B or BW) at once."""
    change: Counter[int] = Counter()
    last: dict[tuple[bool, int | None, int | None, int | None, int | None], int] = {}
    for position, it in enumerate(program):
        if in_visits(it) and it.op not in (Op.W, Op.A, Op.CA, Op.LA):
            forward = it.op in (Op.F, Op.CF, Op.LF)
            last[forward, it.stage, it.micro_batch, it.slice, it.half] = position
    for (forward, *_), position in last.items():
        change[position] += 1 if forward else -1
    now = most = 0
    for position in sorted(change):
        now += change[position]
        most = max(most, now)
    return most


def _check_bounds(scope: Scope, programs: Sequence[Program]) -> None:
    """Holds 1F1B and its kin to their promise: stage s has at most n + pp - 1 - s forwards that wait for their
    backward, n being the most slices of a micro-batch, under eager-1f1b n + 2 (pp - 1 - s), and twice that with halves.
    Others promise nothing, nor does an evaluation, which keeps no activations."""
    plan = scope.plan
    if plan.schedule not in NUM_AHEAD or not scope.training:
        return
    slices = [len(scope.slices(i)) for i in range(scope.num_micro_batches)] if plan.slices else []
    for stage, program in enumerate(programs):
        most = plan.halves * most_held(plan.schedule, plan.pp, stage, slices)
        if (held := held_activations(program)) > most:
            words = f"has {held} forwards at once that wait for their backward"
            raise Broken(f"{words}, where schedule={plan.schedule} promises {most} at most", stage)


def _picture(programs: Sequence[Program], broken: Broken) -> str:
    """The pipeline as a grid, and the offending program near the place."""
    views = [short_view(program) for program in programs]
    program = programs[broken.index]
    mark = Mark(broken.index, _nearest_computation(program, broken.position))
    grid = draw(views, [f"rank {index}" for index in range(len(programs))], mark, WIDTH)
    position = len(program) if broken.position is None else broken.position
    before, after = program[max(0, position - NEARBY) : position], program[position + 1 : position + 1 + NEARBY]
    here = f"[{program[position]}]" if position < len(program) else "[end]"
    excerpt = " ".join([*map(str, before), here, *map(str, after)])
    return f"{grid}\nrank {broken.index}, instruction {position} of {len(program)}: {excerpt}"


def _nearest_computation(program: Program, position: int | None) -> Instruction | None:
    """What to mark in the short view: the computation itself, the one a receive is for, or the one before."""
    if position is None:
        return None
    it, view = program[position], short_view(program)
    if it.op in RECEIVES:
        ops = (Op.F,) if it.op is Op.RECV_F else (Op.B, Op.BW)
        users = [user for user in view if user.op in ops and _visited(user) == _visited(it)]
        return users[0] if users else None
    split = seems_split(program)
    earlier = [visit_of(i, split) for i in program[: position + 1] if in_visits(i)]
    return earlier[-1] if earlier else next(iter(view), None)


def _visited(it: Instruction) -> tuple[int | None, ...]:
    return it.stage, it.micro_batch, it.slice

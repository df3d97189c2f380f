"""Proves that lowered programs are right before anything runs: complete, in order, matched, and free of deadlock.

The error shows the grid of ranks against time with the offending place marked. Nothing here knows how long things take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.errors import PlanError
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.checks.collectives import Groups, check_collectives
from phalanx.program.checks.compute import ComputeRules
from phalanx.program.checks.execution import Execution
from phalanx.program.checks.gathers import GatherRules
from phalanx.program.checks.messages import check_messages
from phalanx.program.checks.peaks import Peaks, check_bound
from phalanx.program.checks.scope import Broken, Scope
from phalanx.program.checks.update import UpdateRules
from phalanx.program.grid import Mark, draw, short_view
from phalanx.program.instructions import RECEIVES, Instruction, Op, Program
from phalanx.program.lower import without_overlap
from phalanx.program.shape import ModelShape
from phalanx.program.visits import in_visits, seems_split, visit_of

WIDTH = 120
NEARBY = 3  # instructions shown on each side of the offending one


def check(plan: Plan, shape: ModelShape, programs: Sequence[Program]) -> tuple[Peaks, ...]:
    """Raises a PlanError unless these are programs of a training step; the most that each rank holds at once."""
    return _check(Scope(plan, shape, plan.mb, training=True), programs)


def check_forward(
    plan: Plan, shape: ModelShape, programs: Sequence[Program], num_micro_batches: int
) -> tuple[Peaks, ...]:
    """The same for programs of an evaluation."""
    return _check(Scope(without_overlap(plan), shape, num_micro_batches, training=False), programs)


def _check(scope: Scope, programs: Sequence[Program]) -> tuple[Peaks, ...]:
    if len(programs) != scope.plan.world:
        message = f"program: {len(programs)} programs for the {scope.plan.world} ranks of the plan"
        raise PlanError(message, "give one program per rank, in the order of the ranks")
    try:
        peaks = _check_ranks(scope, programs)
        check_messages(programs)
        groups = Groups(scope)
        check_collectives(groups, programs)
        Execution(scope, groups, programs).run()
        for rank, peak in enumerate(peaks):
            check_bound(scope, rank, peak)
    except Broken as broken:
        hint = "correct the schedule or the pass that put it there (phalanx/program/)"
        raise PlanError(f"program: {broken.words}\n{_picture(scope, programs, broken)}", hint) from None
    return peaks


def _check_ranks(scope: Scope, programs: Sequence[Program]) -> tuple[Peaks, ...]:
    """Each rank for itself; those whose programs are the same but for the ranks they talk to, once."""
    found: list[Peaks] = []
    first: dict[int, int] = {}  # pp index → rank
    for rank, program in enumerate(programs):
        alike = first.setdefault(scope.mesh.coordinates(rank)[0], rank)
        same = alike != rank and _is_replica(scope.mesh, program, rank, programs[alike])
        found.append(found[alike] if same else _check_rank(scope, rank, program))
    return tuple(found)


def _is_replica(mesh: Mesh, program: Program, rank: int, other: Program) -> bool:
    def same(own: Instruction, its: Instruction) -> bool:
        return own is its or (its.peer is not None and own == replace(its, peer=there[its.peer]))

    if len(program) != len(other):
        return False
    peers = {it.peer for it in other if it.peer is not None}
    there = {peer: mesh.at_stage(rank, mesh.coordinates(peer)[0]) for peer in peers}
    return all(map(same, program, other))


def _check_rank(scope: Scope, rank: int, program: Program) -> Peaks:
    compute, gathers = ComputeRules(scope, rank), GatherRules(scope, rank)
    update = UpdateRules(scope, rank) if scope.training else None
    rules = [compute, gathers, *([update] if update else [])]
    for position, instruction in enumerate(program):
        if update is None and instruction.op in _UPDATE:
            raise Broken(f"rank {rank} has {instruction} in an evaluation, which is forward only", rank, position)
        for rule in rules:
            if words := rule.see(instruction):
                raise Broken(f"rank {rank} {words}", rank, position)
    for rule in rules:
        if words := rule.finish():
            raise Broken(f"rank {rank} {words}", rank)
    levels = (compute.activations, compute.weights_pending, compute.buffers, gathers.gathered)
    return Peaks(*(level.peak for level in levels))


_UPDATE = frozenset((Op.REDUCE, Op.SUM, Op.TIE, Op.COUNT, Op.NORM, Op.STEP, Op.SHARE))


def _picture(scope: Scope, programs: Sequence[Program], broken: Broken) -> str:
    """The pipeline of the offending rank as a grid, and its lowered program near the place."""
    column = scope.mesh.column(broken.rank)
    views = [short_view(programs[rank]) for rank in column]
    program = programs[broken.rank]
    mark = Mark(column.index(broken.rank), _nearest_computation(program, broken.position))
    grid = draw(views, [f"rank {rank}" for rank in column], mark, WIDTH)
    position = len(program) if broken.position is None else broken.position
    before, after = program[max(0, position - NEARBY) : position], program[position + 1 : position + 1 + NEARBY]
    here = f"[{program[position]}]" if position < len(program) else "[end]"
    excerpt = " ".join([*map(str, before), here, *map(str, after)])
    return f"{grid}\nrank {broken.rank}, instruction {position} of {len(program)}: {excerpt}"


def _nearest_computation(program: Program, position: int | None) -> Instruction | None:
    """What to mark in the short view: the computation itself, the one a receive is for, or the one before."""
    if position is None:
        return None
    it = program[position]
    view = short_view(program)
    if it.op in RECEIVES:
        ops = (Op.F,) if it.op is Op.RECV_F else (Op.B, Op.BW)
        users = [user for user in view if user.op in ops and _visited(user) == _visited(it)]
        return users[0] if users else None
    split = seems_split(program)
    earlier = [visit_of(i, split) for i in program[: position + 1] if in_visits(i)]
    return earlier[-1] if earlier else next(iter(view), None)


def _visited(it: Instruction) -> tuple[int | None, ...]:
    return it.stage, it.micro_batch, it.slice

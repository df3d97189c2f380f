"""From a plan and a model's shape to what each rank runs: blocks, messages, gathers, reductions and the update.

Nothing is decided after this: the lowered program is what is checked, simulated and run. Ranks with the same place in
their pipeline have the same program but for the ranks they send to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.expand import forwards_of, schedule_of
from phalanx.program.holders import buckets_of, is_tied
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.passes.blocks import to_blocks
from phalanx.program.passes.messages import Route, add_messages
from phalanx.program.passes.reductions import add_reductions
from phalanx.program.passes.zero import gather_per_micro_batch, gather_per_step
from phalanx.program.shape import ModelShape


def lower(plan: Plan, shape: ModelShape) -> tuple[Program, ...]:
    """The programs of one training step, per rank of the world."""
    programs = [_gathered(to_blocks(order, plan.stage_blocks), plan, shape) for order in schedule_of(plan)]
    if plan.dp > 1:
        per_micro_batch = plan.reduces == "micro-batch"
        programs = [add_reductions(program, shape, per_micro_batch=per_micro_batch) for program in programs]
    programs = add_messages(programs, _route(plan))
    return _for_world([_complete(program, plan, shape, p) for p, program in enumerate(programs)], plan)


def lower_forward(plan: Plan, shape: ModelShape, num_micro_batches: int) -> tuple[Program, ...]:
    """The programs of an evaluation, per rank of the world: forwards, their messages and gathers."""
    orders = forwards_of(plan, num_micro_batches)
    programs = [_gathered(to_blocks(order, plan.stage_blocks), plan, shape) for order in orders]
    return _for_world(add_messages(programs, _route(plan)), plan)


def _gathered(program: Program, plan: Plan, shape: ModelShape) -> Program:
    if not plan.gathers:
        return program
    return gather_per_step(program, shape) if plan.gathers == "step" else gather_per_micro_batch(program, shape)


def _route(plan: Plan) -> Route:
    return Route(plan.num_stages, plan.pp_index)


def _complete(program: Program, plan: Plan, shape: ModelShape, pp_index: int) -> Program:
    """What surrounds the passes through the model: the number of items before them, the update after them."""
    trained = [bucket for bucket in buckets_of(plan, shape, pp_index) if shape.trained[bucket]]
    count = [Instruction(Op.COUNT)] if plan.dp > 1 else []
    ties = [Instruction(Op.TIE, block=bucket) for bucket in trained if is_tied(plan, shape, bucket)]
    shares = [Instruction(Op.SHARE, block=bucket) for bucket in trained if plan.zero in (1, 2)]
    return (*count, *program, *ties, Instruction(Op.NORM), Instruction(Op.STEP), *shares)


def _for_world(programs: Sequence[Program], plan: Plan) -> tuple[Program, ...]:
    mesh = Mesh.of(plan)
    return tuple(
        tuple(_to_replica(instruction, mesh, dp_index) for instruction in programs[pp_index])
        for pp_index, dp_index in map(mesh.coordinates, range(plan.world))
    )


def _to_replica(instruction: Instruction, mesh: Mesh, dp_index: int) -> Instruction:
    if instruction.peer is None:
        return instruction
    return replace(instruction, peer=mesh.rank(instruction.peer, dp_index))

"""From a plan and a model's shape to what each rank runs: blocks and their steps, messages, gathers, reductions
and the update.

Nothing is decided after this: the lowered program is what is checked, simulated and run. Ranks with the same place in
their pipeline have the same program but for the ranks they send to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.expand import forwards_of, schedule_of
from phalanx.program.holders import buckets_of, is_tied, reduced_of, summed_of
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.passes.blocks import at_their_grain, to_blocks
from phalanx.program.passes.messages import Route, add_messages
from phalanx.program.passes.reductions import add_reductions, add_sums
from phalanx.program.passes.steps import to_steps
from phalanx.program.passes.zero import gather_per_micro_batch, gather_per_step
from phalanx.program.schedules.one_f_one_b import NUM_AHEAD
from phalanx.program.shape import ModelShape
from phalanx.program.visits import is_split


def lower(plan: Plan, shape: ModelShape) -> tuple[Program, ...]:
    """The programs of one training step, per rank of the world."""
    orders = schedule_of(plan)
    split = is_split(orders)
    programs = [_gathered(_stepped(order, plan, shape), plan, shape, split) for order in orders]
    per_micro_batch = plan.reduces == "micro-batch"
    programs = [
        add_reductions(program, shape, reduced_of(plan, shape, p), per_micro_batch=per_micro_batch)
        for p, program in enumerate(programs)
    ]
    programs = [add_sums(program, summed_of(plan, shape, p)) for p, program in enumerate(programs)]
    programs = add_messages(programs, _route(plan), split, NUM_AHEAD.get(plan.schedule, 1))
    return _for_world([_complete(program, plan, shape, p) for p, program in enumerate(programs)], plan)


def lower_forward(plan: Plan, shape: ModelShape, num_micro_batches: int) -> tuple[Program, ...]:
    """The programs of an evaluation, per rank of the world: forwards, their messages, exchanges and gathers."""
    whole = without_overlap(plan)
    orders = forwards_of(plan, num_micro_batches)
    programs = [_gathered(_stepped(order, whole, shape), plan, shape, split=False) for order in orders]
    return _for_world(add_messages(programs, _route(plan), split=False), plan)


def without_overlap(plan: Plan) -> Plan:
    """How an evaluation runs a plan: without a backward there is nothing to compute again, and batches stay whole."""
    return replace(plan, overlap="none", pairs=False)


def _stepped(order: Program, plan: Plan, shape: ModelShape) -> Program:
    return to_steps(at_their_grain(to_blocks(order, plan.stage_blocks), shape), shape, plan)


def _gathered(program: Program, plan: Plan, shape: ModelShape, split: bool) -> Program:
    if not plan.gathers:
        return program
    gather = gather_per_step if plan.gathers == "step" else gather_per_micro_batch
    return gather(program, shape, split)


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
        tuple(_to_replica(instruction, mesh, rank) for instruction in programs[mesh.coordinates(rank)[0]])
        for rank in mesh.world
    )


def _to_replica(instruction: Instruction, mesh: Mesh, rank: int) -> Instruction:
    if instruction.peer is None:
        return instruction
    return replace(instruction, peer=mesh.at_stage(rank, instruction.peer))

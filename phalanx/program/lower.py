"""From a plan and a model's shape to what each rank runs: blocks and their ops, messages, gathers, reductions
and the update.

Nothing is decided after this: the lowered program is what is checked, simulated and run.
"""

from __future__ import annotations

from dataclasses import replace

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.holders import buckets_of, fetched_of, is_tied, reduced_of, summed_of
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.passes.blocks import add_inputs, at_their_grain, to_blocks
from phalanx.program.passes.messages import Route, add_messages
from phalanx.program.passes.offload import check_fetched, check_hosted, leave_gradients, move_activations, update
from phalanx.program.passes.ops import to_ops
from phalanx.program.passes.reductions import add_reductions, add_sums, check_sums
from phalanx.program.passes.zero import fetch, fetch_to_gather, gather_per_micro_batch, gather_per_step
from phalanx.program.schedules import SCHEDULES
from phalanx.program.schedules.one_f_one_b import NUM_AHEAD
from phalanx.program.shape import ModelShape
from phalanx.program.visits import is_split


def schedule_of(plan: Plan) -> tuple[Program, ...]:
    """The order of forward and backward on each rank of the pipeline, without messages and collectives."""
    return _orders(plan, plan.mb)


def forwards_of(plan: Plan, num_micro_batches: int) -> tuple[Program, ...]:
    """The same order when nothing but the forward is wanted: forwards wait for forwards only, so it can run as well."""
    orders = _orders(plan, num_micro_batches)
    return tuple(tuple(instruction for instruction in order if instruction.op is Op.F) for order in orders)


def slices_of(plan: Plan, num_micro_batches: int) -> tuple[int, ...]:
    """The number of slices of each micro-batch; empty where they are not cut."""
    return tuple(map(plan.num_slices, range(num_micro_batches))) if plan.slices else ()


def _orders(plan: Plan, num_micro_batches: int) -> tuple[Program, ...]:
    counts = (slices_of(plan, num_micro_batches),) if plan.slices else ()
    return SCHEDULES[plan.schedule](plan.pp, plan.v, num_micro_batches, *counts)


def lower(plan: Plan, shape: ModelShape) -> tuple[Program, ...]:
    """The programs of one training step, per rank of a pipeline; peers are such ranks."""
    orders = schedule_of(plan)
    split = is_split(orders)
    check_fetched(plan, shape)
    programs = [_brought(_stepped(order, plan, shape), plan, shape, split, p) for p, order in enumerate(orders)]
    check_sums(programs, plan, shape)
    per_micro_batch = plan.reduces == "micro-batch"
    programs = [
        add_reductions(program, shape, reduced_of(plan, shape, p), per_micro_batch=per_micro_batch)
        for p, program in enumerate(programs)
    ]
    programs = [add_sums(program, summed_of(plan, shape, p)) for p, program in enumerate(programs)]
    programs = add_messages(programs, _route(plan), split, NUM_AHEAD.get(plan.schedule, 1))
    programs = move_activations(programs, plan, shape)
    check_hosted(plan, shape)
    return tuple(_complete(program, plan, shape, p) for p, program in enumerate(programs))


def lower_forward(plan: Plan, shape: ModelShape, num_micro_batches: int) -> tuple[Program, ...]:
    """The programs of an evaluation, likewise: forwards, their messages, redistributions and gathers."""
    whole = without_overlap(plan)
    orders = forwards_of(plan, num_micro_batches)
    programs = [_brought(_stepped(order, whole, shape), plan, shape, False, p) for p, order in enumerate(orders)]
    return add_messages(programs, _route(plan), split=False)


def without_overlap(plan: Plan) -> Plan:
    """How an evaluation runs a plan: without a backward there is nothing to compute again, and batches stay whole. Of
    what lies on the host it needs parameters."""
    fetched = tuple(own for own in plan.offload if own[0] == "parameters")
    return replace(plan, overlap="none", pairs=False, recompute=(), offload=fetched)


def _stepped(order: Program, plan: Plan, shape: ModelShape) -> Program:
    return add_inputs(to_ops(at_their_grain(to_blocks(order, plan.stage_blocks), shape), shape, plan))


def _brought(program: Program, plan: Plan, shape: ModelShape, split: bool, pp_index: int) -> Program:
    """Parameters that are not always here, before they are used."""
    hosted = fetched_of(plan, shape, pp_index)
    if plan.gathers == "step":
        return gather_per_step(program, shape, split)
    if not plan.gathers:
        return fetch(program, shape, split, hosted) if hosted else program
    gathered = gather_per_micro_batch(program, shape, split)
    return fetch_to_gather(gathered, shape, hosted) if hosted else gathered


def _route(plan: Plan) -> Route:
    return Route(plan.num_stages, plan.pp_index)


def _complete(program: Program, plan: Plan, shape: ModelShape, pp_index: int) -> Program:
    """What surrounds the passes through the model: the number of items before them, the update after them."""
    trained = [bucket for bucket in buckets_of(plan, shape, pp_index) if shape.trained[bucket]]
    ties = [Instruction(Op.TIE, block=bucket) for bucket in trained if is_tied(plan, shape, bucket)]
    shares = [Instruction(Op.SHARE, block=bucket) for bucket in trained if plan.zero in (1, 2)]
    passes = leave_gradients((*program, *ties), plan, shape, pp_index)
    return (Instruction(Op.COUNT), *passes, *update(plan, shape, pp_index), *shares)


# A training program in parts, for whoever has something to do between them: a loop of the user's own between gradients
# and update, an outer loss between the forwards and the backwards. Nothing is lowered anew.
_FORWARD = frozenset((Op.F, Op.CF, Op.LF, Op.SEND_F))
_BACKWARD = frozenset((Op.B, Op.BW, Op.W, Op.CB, Op.LB, Op.SEND_B))


def end_of_gradients(program: Program) -> int:
    """Where all gradients are complete, and loss and norm known on every rank."""
    return next(number for number, it in enumerate(program) if it.op is Op.NORM) + 1


def end_of_forwards(program: Program) -> int:
    """Where every micro-batch has gone forward; refused where one goes back before."""
    end = max(number for number, it in enumerate(program) if it.op in _FORWARD) + 1
    if any(it.op in _BACKWARD for it in program[:end]):
        raise PlanError(
            "plan: a loss that is computed outside needs the outputs of the whole batch before the first backward",
            "use schedule=gpipe, or leave the schedule out",
        )
    return end

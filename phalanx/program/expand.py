"""From a plan to the short view of its program. Pure: the same plan always gives the same program."""

from __future__ import annotations

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Op, Program
from phalanx.program.schedules import SCHEDULES


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

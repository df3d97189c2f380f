"""From a plan to the program of each rank. Pure: the same plan always gives the same program."""

from __future__ import annotations

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.schedules import SCHEDULES


def expand(plan: Plan) -> Program:
    """The instructions of one training step on the only rank."""
    return (*SCHEDULES[plan.schedule](plan.mb), Instruction(Op.STEP))

"""A training program in parts, for whoever has something to do between them: a loop of the user's own between gradients
and update, an outer loss between the forwards and the backwards.

A part is a range of the one program that there is; nothing is lowered anew.
"""

from __future__ import annotations

from phalanx.errors import PlanError
from phalanx.program.instructions import Op, Program

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

"""What a plan may say about tensor parallelism: the overlap modes, and which of its fields go together.

Nothing about the model: whether its layers and heads suit the degrees is found when it is split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from phalanx.errors import PlanError, nearest
from phalanx.plan import fields
from phalanx.plan.divisors import divisors, listed

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan


class Overlap(NamedTuple):
    """halves: interleaved parts of a micro-batch. again: what the backward computes again at a time, if anything."""

    halves: int
    again: str  # "", block or unit


OVERLAPS: Mapping[str, Overlap] = {
    "none": Overlap(1, ""),
    "default_checkpoint": Overlap(1, "block"),
    "optim_comm_checkpoint": Overlap(1, "unit"),
    "overlap_checkpoint": Overlap(2, "block"),
    "oases": Overlap(2, "unit"),
    "halves": Overlap(2, ""),
}
SAVES = ("result", "input")
_BY_UNIT = {"default_checkpoint": "optim_comm_checkpoint", "overlap_checkpoint": "oases"}  # block by block → by unit


def check_tensor(plan: Plan) -> None:
    """Raises a PlanError for the first rule that the plan breaks."""
    if plan.overlap not in OVERLAPS:
        raise PlanError(f"plan: unknown overlap '{plan.overlap}'", nearest(plan.overlap, OVERLAPS))
    if plan.save and plan.save not in SAVES:
        raise PlanError(f"plan: unknown save '{plan.save}'", nearest(plan.save, SAVES))
    if plan.tp == 1:
        _check_alone(plan)
    else:
        _check_split(plan)


def _check_alone(plan: Plan) -> None:
    """With one tensor-parallel rank, what only acts between several is refused."""
    reasons = {
        "degrees": "every unit lies whole on its rank",
        "sequence": "there is no other rank to split the tokens with",
        "save": "nothing is gathered on the way into a unit",
        "overlap": "there is no communication inside a block to hide",
        "pairs": "there is no communication inside a block to hide",
        "replicate": "every unit lies whole on its rank",
    }
    for name, reason in reasons.items():
        value = getattr(plan, name)
        if value and value != "none":
            instead = "; recompute=yes computes blocks again" if name == "overlap" and plan.again else ""
            message = f"plan: {fields.write({name: value})} does nothing with tp=1: {reason}"
            raise PlanError(message, f"use tp=2 or more, or leave {name} out{instead}")


def _check_split(plan: Plan) -> None:
    if plan.recompute:
        message = f"plan: recompute=yes leaves open, with tp={plan.tp}, which communication is repeated"
        raise PlanError(message, "use overlap=optim_comm_checkpoint, which repeats none, and leave recompute out")
    if plan.save and not plan.sequence:
        message = f"plan: save={plan.save} does nothing with sequence=no: nothing is gathered on the way into a unit"
        raise PlanError(message, "use sequence=yes, or leave save out")
    if plan.save and plan.again == "block":
        reason = "of a block that is computed again nothing is saved but what it was given"
        message = f"plan: save={plan.save} does nothing with overlap={plan.overlap}: {reason}"
        raise PlanError(message, f"use overlap={_BY_UNIT[plan.overlap]}, or leave save out")
    if plan.pairs:
        _check_pairs(plan)
    for layer, units in enumerate(plan.degrees):
        for degree in units:
            if degree < 1 or plan.tp % degree:
                place = f"layer {layer}" if len(plan.degrees) > 1 else "all layers"
                given = fields.write({"degrees": plan.degrees})
                message = f"plan: {given} has degree {degree} for {place}, which does not divide tp={plan.tp}"
                raise PlanError(message, f"use {listed(divisors(plan.tp))}")


def _check_pairs(plan: Plan) -> None:
    if plan.pp > 1:
        reason = "the next stage would wait for a forward that waits for the backward beside it"
        raise PlanError(f"plan: pairs=yes lengthens a pipeline of pp={plan.pp}: {reason}", "use pp=1, or pairs=no")
    if plan.schedule != "1f1b":
        message = f"plan: pairs=yes does not go with schedule={plan.schedule}, which has no such neighbours"
        raise PlanError(message, "use schedule=1f1b, or pairs=no")
    if plan.slices:
        message = "plan: pairs=yes does not go with slices, of which only the first of each micro-batch has a partner"
        raise PlanError(message, "leave slices out, or use pairs=no")
    if plan.gathers == "micro-batch":
        message = "plan: pairs=yes needs the parameters of more blocks at once than zero=3 with gather=micro-batch has"
        raise PlanError(message, "use gather=step, a smaller zero, or pairs=no")

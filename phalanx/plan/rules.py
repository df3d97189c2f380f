"""Which values of a plan's fields may stand, alone and together; nothing about the model, the batch or the ranks.

A value that would do nothing is refused with the reason, never ignored. Whether the model's layers and heads suit the
degrees is found when it is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.errors import PlanError, nearest
from phalanx.plan import fields
from phalanx.plan.fields import write_slicings
from phalanx.plan.offload import check_offload, write_offload

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan


def divisors(number: int) -> list[int]:
    """In rising order."""
    assert number >= 1
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})


def listed(choices: Iterable[int | str]) -> str:
    """`1, 2 or 4`."""
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


class ScheduleFacts(NamedTuple):
    """order: where in `program/schedules/` the function is, as module.function. virtual_stages: per rank; some
    schedules are defined for `more` of them too. slices: whether it orders them. for_pipelines: what it would be
    without on one rank; empty where it may run there. by_block: as many virtual stages as there are blocks for."""

    order: str
    virtual_stages: int
    slices: bool
    for_pipelines: str = ""
    more: bool = False
    by_block: bool = False


SCHEDULES: Mapping[str, ScheduleFacts] = {
    "1f1b": ScheduleFacts("one_f_one_b.one_f_one_b", 1, True),
    "eager-1f1b": ScheduleFacts("one_f_one_b.eager_one_f_one_b", 1, True, "there are no messages to hide"),
    "gpipe": ScheduleFacts("gpipe.gpipe", 1, True),
    "interleaved": ScheduleFacts("interleaved.interleaved", 2, False, "one rank has no bubble to fill", more=True),
    "zb-h1": ScheduleFacts("zb_h1.zb_h1", 1, True),
    "zb-v": ScheduleFacts("zb_v.zb_v", 2, False),
    "block-major": ScheduleFacts("block_major.block_major", 1, True, more=True, by_block=True),
}
VIRTUAL_STAGES = {name: schedule.virtual_stages for name, schedule in SCHEDULES.items()}
SLICED_SCHEDULES = tuple(name for name, schedule in SCHEDULES.items() if schedule.slices)
PIPELINES_ONLY = {name: schedule.for_pipelines for name, schedule in SCHEDULES.items() if schedule.for_pipelines}
MOMENTS = ("micro-batch", "step")


SEARCHED = ("stages", "recompute")


def require_searchable(given: Mapping[str, Any]) -> None:
    """Of a plan whose other fields a search decides. given: fields of a plan."""
    decided = [name for name in SEARCHED if name in given]
    if len(given.get("degrees", ())) > 1:
        decided.append("degrees of each layer")
    if decided:
        message = f"option plan: {decided[0]} is what the search decides, and cannot be given beside it"
        raise PlanError(message, "leave it out, or use `phalanx estimate` for a plan that is complete")


def validate(plan: Plan) -> None:
    """Raises a PlanError for the first rule that the plan breaks."""
    check_counts({"pp": plan.pp, "dp": plan.dp, "tp": plan.tp, "mb": plan.mb})
    _check_schedule(plan)
    _check_slices(plan)
    _check_stages(plan)
    _check_zero(plan)
    _check_moments(plan)
    _check_tensor(plan)
    check_offload(plan.offload)
    _check_hosted_parameters(plan)
    if plan.sums and plan.sums not in SUMS:
        raise PlanError(f"plan: unknown sums '{plan.sums}'", f"use sums={listed(SUMS)}, or leave it out")


def check_counts(fields: Mapping[str, Any]) -> None:
    """For fields of which not all are given yet."""
    meanings = {"pp": "pipeline ranks", "dp": "replicas", "tp": "tensor-parallel ranks", "mb": "micro-batches"}
    for name, meaning in meanings.items():
        if name in fields and fields[name] < 1:
            raise PlanError(f"plan: {name}={fields[name]} is not a number of {meaning}", f"use {name}=1 or more")


def _check_schedule(plan: Plan) -> None:
    if plan.schedule not in VIRTUAL_STAGES:
        raise PlanError(f"plan: unknown schedule '{plan.schedule}'", nearest(plan.schedule, VIRTUAL_STAGES))
    needed = VIRTUAL_STAGES[plan.schedule]
    if SCHEDULES[plan.schedule].more:
        if plan.v < needed:
            least = f"{needed} virtual stage{'s' * (needed > 1)}"
            message = f"plan: schedule={plan.schedule} needs at least {least} per rank, not v={plan.v}"
            raise PlanError(message, f"use v={needed} or more, or schedule=1f1b")
    elif plan.v != needed:
        message = f"plan: schedule={plan.schedule} has v={needed} (virtual stages per rank), not v={plan.v}"
        raise PlanError(message, f"use v={needed}, or schedule=interleaved with v=2 or more")
    if plan.pp == 1 and plan.schedule in PIPELINES_ONLY:
        message = f"plan: schedule={plan.schedule} does nothing with pp=1: {PIPELINES_ONLY[plan.schedule]}"
        raise PlanError(message, "use pp=2 or more, or schedule=1f1b")


def _check_stages(plan: Plan) -> None:
    if not plan.stages:
        return
    shown = "-".join(map(str, plan.stages))
    if len(plan.stages) != plan.num_stages:
        made = f"pp={plan.pp}" + (f" with v={plan.v}" if plan.v > 1 else "")
        message = f"plan: {made} needs {plan.num_stages} block counts, and stages={shown} has {len(plan.stages)}"
        raise PlanError(message, "give one for each of pp × v stages, or leave stages out to have them balanced")
    if min(plan.stages) < 1:
        empty = next(stage for stage, count in enumerate(plan.stages) if count < 1)
        raise PlanError(f"plan: stages={shown} leaves stage {empty} without blocks", "give every stage 1 block or more")


def _check_slices(plan: Plan) -> None:
    if not plan.slices:
        return
    shown = f"slices={write_slicings(plan.slices)}"
    for slicing in plan.slices:
        if not slicing or min(slicing) < 1:
            at = f", slice {next(i for i, length in enumerate(slicing) if length < 1)}" if slicing else ""
            raise PlanError(f"plan: {shown} has a slice without tokens{at}", "give every slice a length of 1 or more")
    if plan.slices and max(map(len, plan.slices)) == 1:
        message = f"plan: {shown} does nothing: micro-batches of one slice are whole"
        raise PlanError(message, "use slices=2 or more, or leave slices out")
    if plan.slices and plan.schedule not in SLICED_SCHEDULES:
        reason = "it orders whole micro-batches, and slices go forward in order and backward in reverse"
        message = f"plan: {shown} cannot be ordered by schedule={plan.schedule}: {reason}"
        raise PlanError(message, f"use schedule={listed(SLICED_SCHEDULES)}, or leave slices out")


def _check_zero(plan: Plan) -> None:
    zero, degree, dp = plan.zero, plan.zero_degree, plan.dp
    if zero not in range(4):
        allowed = "use zero=0 (off), 1 (optimizer state), 2 (gradients as well) or 3 (parameters as well)"
        raise PlanError(f"plan: zero={zero} is not a ZeRO stage", allowed)
    if zero and dp == 1:
        message = f"plan: zero={zero} does nothing with dp=1: state is sharded over the dp ranks"
        raise PlanError(message, "use dp=2 or more, or leave zero out")
    if degree and not zero:
        message = f"plan: zero_degree={degree} does nothing with zero=0"
        raise PlanError(message, "use zero=1, 2 or 3, or leave zero_degree out")
    if degree and degree not in (allowed := divisors(dp)[1:]):
        message = f"plan: zero_degree={degree} cannot shard over groups of the dp={dp} ranks"
        raise PlanError(message, f"use zero_degree={listed(allowed)}: a divisor of dp above 1")


def _check_moments(plan: Plan) -> None:
    for name, moment in (("gather", plan.gather), ("reduce", plan.reduce)):
        if moment and moment not in MOMENTS:
            raise PlanError(f"plan: unknown {name} '{moment}'", nearest(moment, MOMENTS))
    if plan.gather and plan.zero != 3:
        message = f"plan: gather={plan.gather} does nothing with zero={plan.zero}: every rank has all its parameters"
        raise PlanError(message, "use zero=3, or leave gather out")
    if plan.reduce and plan.dp == 1:
        message = f"plan: reduce={plan.reduce} does nothing with dp=1: there are no other replicas"
        raise PlanError(message, "use dp=2 or more, or leave reduce out")
    if plan.reduce == "micro-batch" and plan.zero < 2:
        message = f"plan: reduce=micro-batch saves nothing with zero={plan.zero}: every rank has all its gradients"
        raise PlanError(message, "use zero=2 or 3, or reduce=step")


def may_host_parameters(plan: Plan) -> bool:
    """Whether a plan goes with offload=parameters."""
    return plan.zero not in (1, 2) and plan.gathers != "step" and not plan.pairs


def _check_hosted_parameters(plan: Plan) -> None:
    if not plan.hosts_parameters:
        return
    shown = f"plan: offload={write_offload(plan.offload)}"
    if plan.zero in (1, 2):
        reason = "every host would keep all parameters, and collect what others updated of them"
        message = f"{shown} does not go with zero={plan.zero}: {reason}"
        raise PlanError(message, "use zero=3, where every host keeps a share of them, or zero=0")
    if plan.gathers == "step":
        message = f"{shown} does not go with gather=step, which keeps parameters on the device for a whole step"
        raise PlanError(message, "use gather=micro-batch, or leave parameters out of offload")
    if plan.pairs:
        message = f"{shown} does not go with pairs=yes, which needs the parameters of more blocks at once"
        raise PlanError(message, "use pairs=no, or leave parameters out of offload")


class Overlap(NamedTuple):
    """halves: interleaved parts of a micro-batch. recompute: what its name says of that; empty: nothing."""

    halves: int
    recompute: str


OVERLAPS: Mapping[str, Overlap] = {
    "none": Overlap(1, ""),
    "default_checkpoint": Overlap(1, "block"),
    "optim_comm_checkpoint": Overlap(1, "unit"),
    "overlap_checkpoint": Overlap(2, "block"),
    "oases": Overlap(2, "unit"),
    "halves": Overlap(2, ""),
}
SAVES = ("result", "input")
SUMS = ("exact",)
_BY_UNIT = {"default_checkpoint": "optim_comm_checkpoint", "overlap_checkpoint": "oases"}  # block by block → by unit


def _check_tensor(plan: Plan) -> None:
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
            implied = OVERLAPS[plan.overlap].recompute if name == "overlap" else ""
            instead = f"; recompute={implied} computes {implied}s again" if implied else ""
            message = f"plan: {fields.write({name: value})} does nothing with tp=1: {reason}"
            raise PlanError(message, f"use tp=2 or more, or leave {name} out{instead}")


def _check_split(plan: Plan) -> None:
    _check_recompute(plan)
    if plan.save and not plan.sequence:
        message = f"plan: save={plan.save} does nothing with sequence=no: nothing is gathered on the way into a unit"
        raise PlanError(message, "use sequence=yes, or leave save out")
    if plan.save and plan.policies == ("block",):
        reason = "of a block that is computed again nothing is saved but what it was given"
        by_unit = _BY_UNIT.get(plan.overlap)
        given, instead = (
            (f"overlap={plan.overlap}", f"overlap={by_unit}")
            if by_unit
            else (fields.write({"recompute": plan.recompute}), "recompute=unit")
        )
        raise PlanError(
            f"plan: save={plan.save} does nothing with {given}: {reason}", f"use {instead}, or leave save out"
        )
    if plan.pairs:
        _check_pairs(plan)
    for layer, units in enumerate(plan.degrees):
        for degree in units:
            if degree < 1 or plan.tp % degree:
                place = f"layer {layer}" if len(plan.degrees) > 1 else "all layers"
                given = fields.write({"degrees": plan.degrees})
                message = f"plan: {given} has degree {degree} for {place}, which does not divide tp={plan.tp}"
                raise PlanError(message, f"use {listed(divisors(plan.tp))}")


def _check_recompute(plan: Plan) -> None:
    """Some names of `overlap` say what is computed again."""
    halves, implied = OVERLAPS[plan.overlap]
    if implied and plan.recompute and plan.recompute != (implied,):
        given, instead = fields.write({"recompute": plan.recompute}), "halves" if halves > 1 else "none"
        message = f"plan: overlap={plan.overlap} computes every {implied} again, and {given} says otherwise"
        raise PlanError(message, f"leave recompute out, or use overlap={instead}, which leaves it to recompute")


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

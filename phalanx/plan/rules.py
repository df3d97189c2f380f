"""Which values of a plan's fields may stand, alone and together; nothing about the model, the batch or the ranks.

A value that would do nothing is refused with the reason, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.errors import PlanError, nearest
from phalanx.plan.divisors import divisors, listed
from phalanx.plan.slicing import check_slices
from phalanx.plan.tensor import check_tensor

if TYPE_CHECKING:
    from phalanx.plan.plan import Plan

# Virtual stages per rank. A schedule that is not interleaved is defined for this number only; interleaved for any more.
VIRTUAL_STAGES: Mapping[str, int] = {
    "1f1b": 1, "eager-1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2,
}  # fmt: skip
PIPELINES_ONLY = {"interleaved": "one rank has no bubble to fill", "eager-1f1b": "there are no messages to hide"}
MOMENTS = ("micro-batch", "step")


def validate(plan: Plan) -> None:
    """Raises a PlanError for the first rule that the plan breaks."""
    check_counts({"pp": plan.pp, "dp": plan.dp, "tp": plan.tp, "mb": plan.mb})
    _check_schedule(plan)
    check_slices(plan)
    _check_stages(plan)
    _check_zero(plan)
    _check_moments(plan)
    check_tensor(plan)


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
    if plan.schedule == "interleaved":
        if plan.v < needed:
            message = f"plan: schedule=interleaved needs at least {needed} virtual stages per rank, not v={plan.v}"
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

"""Completes a plan: what the user left open is decided from the ranks, the batch and the costs of the blocks.

Every decision comes with its reason in words. What was given is never changed: it fits, or it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from phalanx.errors import PlanError
from phalanx.plan import fields
from phalanx.plan.fields import Fields
from phalanx.plan.plan import Plan
from phalanx.plan.rules import VIRTUAL_STAGES, check_counts
from phalanx.plan.stages import balance

MICRO_BATCHES_PER_RANK = 4  # of a pipeline: 1F1B then idles less than 20 %, and micro-batches do not get tiny


class Completed(NamedTuple):
    """A plan with nothing left open, and why each field that was not given has its value."""

    plan: Plan
    reasons: dict[str, str]


def complete(given: str | Plan, *, world: int | None, batch_size: int, costs: Sequence[float]) -> Completed:
    """Decides what `given` leaves open. A Plan leaves open its stages at most, a text whatever it does not say.

    world: the number of ranks there are; None where as many are started as the plan needs.
    costs: what each block of the model costs, in any unit.
    """
    known = _known(given)
    check_counts(known)
    reasons: dict[str, str] = {}
    known |= _mesh(known, world, len(costs), reasons)
    if "schedule" not in known and known["pp"] > 1:
        reasons["schedule"] = "schedule 1f1b: no more bubble than gpipe, and holds fewer activations"
    plan = _with_micro_batches(Plan(**known), "mb" in known, batch_size, reasons)
    return Completed(_with_stages(plan, costs, reasons), reasons)


def needed_ranks(given: str | Plan) -> int | None:
    """How many ranks a plan asks for; None when it says neither pp nor dp."""
    known = _known(given)
    check_counts(known)
    return known.get("pp", 1) * known.get("dp", 1) if known.keys() & {"pp", "dp"} else None


def bubble(plan: Plan) -> float | None:
    """The share of a step in which ranks wait, with equal stages and F = B = W; None where no formula gives it."""
    idle, busy = plan.pp - 1, plan.mb
    if plan.schedule in ("1f1b", "gpipe"):
        return idle / (busy + idle)
    if plan.schedule == "interleaved" and plan.mb % plan.pp == 0:
        return idle / (plan.v * busy + idle)
    if plan.schedule == "zb-h1" and plan.mb >= plan.pp:
        return idle / (3 * busy + idle)
    return None


def _known(given: str | Plan) -> Fields:
    return fields.read(given.full_text if isinstance(given, Plan) else given)


def _mesh(known: Fields, world: int | None, num_blocks: int, reasons: dict[str, str]) -> Fields:
    """pp and dp, whose product is the world."""
    pp, dp = known.get("pp"), known.get("dp")
    if world is None:
        reasons |= {name: f"{name} 1: no more ranks are asked for" for name in ("pp", "dp") if name not in known}
        return {"pp": pp or 1, "dp": dp or 1}
    if pp and dp:
        if pp * dp != world:
            message = f"plan: pp={pp} × dp={dp} makes {pp * dp} {_ranks(pp * dp)}, and there {_are(world)}"
            raise PlanError(message, f"start {pp * dp} {_ranks(pp * dp)}, or leave out pp, dp or both")
    elif pp:
        dp = _rest(world, "pp", pp)
        reasons["dp"] = f"dp {dp}: {world} ranks / {pp} in each pipeline"
    elif dp:
        pp = _rest(world, "dp", dp)
        reasons["pp"] = f"pp {pp}: {world} ranks / {dp} replicas"
    else:
        pp, reasons["pp"] = _pipeline_length(known, world, num_blocks)
        dp = world // pp
        reasons["dp"] = f"dp {dp}: {world} ranks / {pp} in each pipeline"
    return {"pp": pp, "dp": dp}


def _rest(world: int, name: str, value: int) -> int:
    if world % value:
        allowed = _listed([number for number in range(1, world + 1) if world % number == 0])
        hint = f"use {name}={allowed}, or start a number of ranks that {value} divides"
        raise PlanError(f"plan: {name}={value} does not divide the number of ranks: there {_are(world)}", hint)
    return world // value


def _pipeline_length(known: Fields, world: int, num_blocks: int) -> tuple[int, str]:
    if known.get("zero") or known.get("reduce"):
        wish = "zero" if known.get("zero") else "reduce"
        return 1, f"pp 1: {wish}={known[wish]} acts between replicas, so every rank is one"
    v = known.get("v") or VIRTUAL_STAGES.get(known.get("schedule", "1f1b"), 1)
    pp = max((n for n in range(1, world + 1) if world % n == 0 and n * v <= num_blocks), default=1)
    if pp == world:
        return pp, f"pp {pp}: all ranks in one pipeline"
    return pp, f"pp {pp}: the most of {world} ranks, in equal pipelines, that {num_blocks} blocks can fill"


def _with_micro_batches(plan: Plan, decided: bool, batch_size: int, reasons: dict[str, str]) -> Plan:
    samples = batch_size // plan.dp  # of the replica with the fewest
    if not decided and samples:
        plan = replace(plan, mb=_micro_batches(plan.pp, samples))
        reasons["mb"] = f"micro-batches {plan.mb}: {_filling(plan)}"
    if plan.mb > samples:
        parts = f"mb={plan.mb}" if plan.dp == 1 else f"dp={plan.dp} × mb={plan.mb}"
        kind = "micro-batches" if plan.dp == 1 else "parts"
        hint = f"use mb={samples} or less" if samples else f"use dp={batch_size} or less, or batch_size={plan.dp}"
        message = f"plan: {parts} cuts a batch of {batch_size} samples into more {kind} than it has samples"
        raise PlanError(message, hint)
    return plan


def _micro_batches(pp: int, samples: int) -> int:
    if pp == 1:
        return 1
    largest = math.ceil(samples / min(MICRO_BATCHES_PER_RANK * pp, samples))
    return math.ceil(samples / largest)  # the fewest micro-batches of which none is larger


def _filling(plan: Plan) -> str:
    if plan.pp == 1:
        return "there is no pipeline to fill"
    share = bubble(plan)
    stages = f"fills {plan.num_stages} stages"
    return f"{stages} with {100 * share:.0f} % bubble" if share is not None else f"{stages} on {plan.pp} ranks"


def _with_stages(plan: Plan, costs: Sequence[float], reasons: dict[str, str]) -> Plan:
    if not plan.stages:
        plan = replace(plan, stages=balance(costs, plan.num_stages))
        reasons["stages"] = f"stages {_counts(plan)}: {_evenness(plan, costs)}"
    elif sum(plan.stages) != len(costs):
        message = f"plan: stages={_counts(plan)} holds {sum(plan.stages)} blocks, and the model has {len(costs)}"
        raise PlanError(message, f"give counts that add up to {len(costs)}, or leave stages out to have them balanced")
    return plan


def _evenness(plan: Plan, costs: Sequence[float]) -> str:
    if plan.num_stages == 1:
        return "all blocks in one stage"
    totals = [sum(costs[block] for block in plan.stage_blocks(stage)) for stage in range(plan.num_stages)]
    mean = sum(totals) / len(totals)
    above = 100 * (max(totals) / mean - 1) if mean else 0.0
    return f"the largest costs {above:.0f} % more than the mean" if above >= 0.5 else "all cost the same"


def _counts(plan: Plan) -> str:
    return "-".join(map(str, plan.stages))


def _listed(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _ranks(number: int) -> str:
    return "rank" if number == 1 else "ranks"


def _are(world: int) -> str:
    return "is 1" if world == 1 else f"are {world}"

"""Completes a plan: what the user left open is decided from the ranks, the batch and the costs of the blocks.

Every decision comes with its reason in words. What was given is never changed: it fits, or it is refused. Micro-batches
are as many as fill the pipeline, each with as many samples as the plan can divide. Stages are balanced exactly, not by
a heuristic; what a block costs is the caller's knowledge.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from phalanx.errors import PlanError
from phalanx.plan import fields
from phalanx.plan.fields import Fields
from phalanx.plan.plan import AXES, Plan
from phalanx.plan.rules import SCHEDULES, VIRTUAL_STAGES, check_counts, divisors, listed


class Completed(NamedTuple):
    """A plan with nothing left open, and why each field that was not given has its value."""

    plan: Plan
    reasons: dict[str, str]


def complete(
    given: str | Plan, *, world: int | None, batch_size: int, costs: Sequence[float], slot: int | None = None
) -> Completed:
    """Decides what `given` leaves open. A Plan leaves open its stages at most, a text whatever it does not say.

    world: the number of ranks there are; None where as many are started as the plan needs.
    costs: what each block of the model costs, in any unit.
    slot: how many samples every micro-batch has, and that nothing depends on the order of sums; None: as it comes.
    """
    known = _known(given)
    check_counts(known)
    reasons: dict[str, str] = {}
    known |= _mesh(known, world, len(costs), reasons)
    if slot is not None:
        known |= _slots(known, batch_size, slot, reasons)
    if "schedule" not in known and known["pp"] > 1:
        reasons["schedule"] = "schedule 1f1b: no more bubble than gpipe, and holds fewer activations"
    plan = with_micro_batches(Plan(**known), "mb" in known, batch_size, reasons)
    return Completed(_with_stages(plan, costs, reasons), reasons)


def needed_ranks(given: str | Plan) -> int | None:
    """How many ranks a plan asks for; None when it says nothing of the mesh."""
    known = _known(given)
    check_counts(known)
    return math.prod(known.get(axis, 1) for axis in AXES) if known.keys() & set(AXES) else None


def usable_ranks(given: str | Plan, world: int) -> int:
    """How many of the ranks there are a plan can use: all of them where it leaves pp or dp open and the rest divides
    them, else as many as it asks for, or a multiple of that."""
    known, asked = _known(given), least_ranks(given)
    if asked > world:
        raise PlanError(
            f"plan: {fields.write({axis: known[axis] for axis in AXES if axis in known})} needs {asked} ranks, and "
            f"there {_are(world)}",
            f"use {world} or fewer",
        )
    return asked if {"pp", "dp"} <= known.keys() else world - world % asked


def least_ranks(given: str | Plan) -> int:
    """How many ranks a plan asks for at least."""
    known = _known(given)
    check_counts(known)
    return math.prod(known.get(axis, 1) for axis in AXES)


def _known(given: str | Plan) -> Fields:
    return fields.read(given.full_text if isinstance(given, Plan) else given)


def _mesh(known: Fields, world: int | None, num_blocks: int, reasons: dict[str, str]) -> Fields:
    """pp, dp and tp, whose product is the world. tp is what was given, or 1."""
    pp, dp, tp = known.get("pp"), known.get("dp"), known.get("tp", 1)
    if world is None:
        reasons |= {name: f"{name} 1: no more ranks are asked for" for name in ("pp", "dp") if name not in known}
        return {"pp": pp or 1, "dp": dp or 1, "tp": tp}
    if pp and dp:
        _require_product(pp, dp, tp, world)
        return {"pp": pp, "dp": dp, "tp": tp}
    groups = _rest(world, 1, "tp", tp)  # what is left to be laid out along pp and dp
    there = f"{world} ranks" if tp == 1 else f"{world} ranks / {tp} tensor-parallel"
    if dp:
        pp = _rest(world, tp, "dp", dp)
        reasons["pp"] = f"pp {pp}: {there} / {dp} replicas"
        return {"pp": pp, "dp": dp, "tp": tp}
    if pp is None:
        pp, reasons["pp"] = _pipeline_length(known, groups, there, num_blocks)
    dp = _rest(world, tp, "pp", pp)
    reasons["dp"] = f"dp {dp}: {there} / {pp} in each pipeline"
    return {"pp": pp, "dp": dp, "tp": tp}


def _slots(known: Fields, batch_size: int, slot: int, reasons: dict[str, str]) -> Fields:
    """Micro-batches of a fixed number of samples, which are then the same whichever replica has them."""
    dp, given, samples = known["dp"], known.get("mb"), f"{slot} sample{'s' * (slot > 1)}"
    if batch_size % (dp * slot):
        fitting = [n for n in divisors(batch_size // slot) if batch_size % slot == 0] if batch_size >= slot else []
        hint = f"use dp={listed(fitting)}, or another batch_size or slot_size" if fitting else "use another slot_size"
        raise PlanError(
            f"plan: deterministic slots of {samples} do not divide a batch of {batch_size} over dp={dp}", hint
        )
    mb = batch_size // (dp * slot)
    if given not in (None, mb):
        own = batch_size / (dp * given)
        raise PlanError(
            f"plan: mb={given} makes micro-batches of {own:g} samples, and a deterministic slot has {slot}: what is "
            "computed together must not change with the plan",
            f"use mb={mb} or leave it out" + (f", or slot_size={own:g} in every run" if own.is_integer() else ""),
        )
    if given is None:
        reasons["mb"] = f"micro-batches {mb}: {samples} each, as the run is deterministic"
    return {"mb": mb, "sums": "exact"}


def _require_product(pp: int, dp: int, tp: int, world: int) -> None:
    made = pp * dp * tp
    if made != world:
        product, names = f"pp={pp} × dp={dp}", "pp, dp or both"
        if tp > 1:
            product, names = f"{product} × tp={tp}", "one or more of them"
        message = f"plan: {product} makes {made} {_ranks(made)}, and there {_are(world)}"
        raise PlanError(message, f"start {made} {_ranks(made)}, or leave out {names}")


def _rest(world: int, tp: int, name: str, value: int) -> int:
    """What `value` ranks along an axis leave for the others; `tp` is taken already."""
    if world // tp % value:
        also = f" with tp={tp}" if tp > 1 else ""
        hint = f"use {name}={listed(divisors(world // tp))}{also}, or start a number of ranks that {value * tp} divides"
        product = f"{name}={value} × tp={tp}" if tp > 1 else f"{name}={value}"
        raise PlanError(f"plan: {product} does not divide the number of ranks: there {_are(world)}", hint)
    return world // tp // value


def _pipeline_length(known: Fields, groups: int, there: str, num_blocks: int) -> tuple[int, str]:
    if known.get("zero") or known.get("reduce"):
        wish = "zero" if known.get("zero") else "reduce"
        return 1, f"pp 1: {wish}={known[wish]} acts between replicas, so there are as many of them as the ranks allow"
    v = known.get("v") or VIRTUAL_STAGES.get(known.get("schedule", "1f1b"), 1)
    pp = max((n for n in divisors(groups) if n * v <= num_blocks), default=1)
    if pp == groups:
        beside = f", {known['tp']} side by side" if known.get("tp", 1) > 1 else ""
        return pp, f"pp {pp}: all ranks in one pipeline{beside}"
    return pp, f"pp {pp}: the most of {there}, in equal pipelines, that {num_blocks} blocks can fill"


def _with_stages(plan: Plan, costs: Sequence[float], reasons: dict[str, str]) -> Plan:
    if not plan.stages:
        if SCHEDULES[plan.schedule].by_block and plan.v == VIRTUAL_STAGES[plan.schedule]:
            plan = replace(plan, v=max(plan.v, len(costs) // plan.pp))
            shared = "" if len(costs) == plan.num_stages else ", as far as they go round evenly"
            reasons["v"] = f"v {plan.v}: each of the {len(costs)} blocks is a virtual stage{shared}"
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


def _ranks(number: int) -> str:
    return "rank" if number == 1 else "ranks"


def _are(world: int) -> str:
    return "is 1" if world == 1 else f"are {world}"


def balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Blocks per stage, at least one each, with the smallest possible largest stage.

    Of those, the ones with the smallest sum of squared stage costs; of those, fewer blocks first, because under 1F1B
    earlier stages hold the activations of more micro-batches.
    """
    num_blocks = len(costs)
    assert num_stages >= 1 and all(cost >= 0 for cost in costs)
    if num_blocks < num_stages:
        message = f"plan: {num_stages} stages need at least as many blocks, and the model has {num_blocks}"
        raise PlanError(message, f"use fewer stages: pp × v of {num_blocks} or less")
    if not any(costs):
        costs = [1.0] * num_blocks  # with nothing to tell them apart, by number
    before = list(accumulate(costs, initial=0.0))  # cost of all blocks before block i
    return _most_even(before, num_stages, _smallest_largest(before, num_stages))


def _smallest_largest(before: list[float], num_stages: int) -> float:
    """The cost of the largest stage, when that is as small as possible."""
    best = before  # best[i]: the largest of k stages made of the first i blocks; k = 1
    for k in range(2, num_stages + 1):
        following = [math.inf] * len(before)
        for i in range(k, len(before)):
            # The last stage begins at `cut`: later cuts make it smaller and the stages before it larger, so the best
            # cut is where the two cross, or just before.
            cuts = range(k - 1, i)
            cross = bisect_left(cuts, True, key=lambda cut, i=i, best=best: best[cut] >= before[i] - before[cut])
            near = cuts[max(cross - 1, 0) : cross + 1]
            following[i] = min(max(best[cut], before[i] - before[cut]) for cut in near)
        best = following
    return best[-1]


def _most_even(before: list[float], num_stages: int, limit: float) -> tuple[int, ...]:
    """The stages with the smallest sum of squares of which none costs more than `limit`."""
    num_blocks = len(before) - 1
    squares = [math.inf] * num_blocks + [0.0]  # squares[i]: the smallest sum for the blocks from i on, in k stages
    ends: list[list[int]] = []  # ends[k - 1][i]: where the first of those stages ends
    for k in range(1, num_stages + 1):
        following, end = [math.inf] * (num_blocks + 1), [num_blocks] * (num_blocks + 1)
        for i in range(num_blocks - k, -1, -1):
            for j in range(i + 1, num_blocks - k + 2):
                cost = before[j] - before[i]
                if cost > limit:
                    break
                if squares[j] + cost * cost < following[i]:
                    following[i], end[i] = squares[j] + cost * cost, j
        squares = following
        ends.append(end)
    cuts = [0]
    for end in reversed(ends):
        cuts.append(end[cuts[-1]])
    return tuple(stop - start for start, stop in pairwise(cuts))


MICRO_BATCHES_PER_RANK = 4  # of a pipeline: 1F1B then idles less than 20 %, and micro-batches do not get tiny


def with_micro_batches(plan: Plan, decided: bool, batch_size: int, reasons: dict[str, str]) -> Plan:
    """decided: the plan's mb was given. Otherwise it is chosen here, and why goes into `reasons`."""
    _require_samples(plan, batch_size)
    _require_multiple(plan, batch_size)
    if not decided:
        plan = replace(plan, mb=_number(plan, batch_size // plan.dp))
        reasons["mb"] = f"micro-batches {plan.mb}: {_filling(plan)}"
    _require_turns(plan)
    _require_partners(plan)
    _require_several(plan)
    return plan


def require_evaluation(plan: Plan, samples: int) -> None:
    """Evaluation cuts its samples into micro-batches as large as those of training: what is left must fit as well."""
    if left := samples % plan.multiple:
        fitting = samples - left
        raise PlanError(
            f"plan: {_need(plan)}, and an evaluation of {samples} samples leaves {left} over",
            f"use eval_samples={fitting}" if fitting else f"evaluate on {plan.multiple} samples or more",
        )


def _require_samples(plan: Plan, batch_size: int) -> None:
    samples = batch_size // plan.dp  # of the replica with the fewest
    if plan.mb > samples:
        parts = f"mb={plan.mb}" if plan.dp == 1 else f"dp={plan.dp} × mb={plan.mb}"
        kind = "micro-batches" if plan.dp == 1 else "parts"
        hint = f"use mb={samples} or less" if samples else f"use dp={batch_size} or less, or batch_size={plan.dp}"
        message = f"plan: {parts} cuts a batch of {batch_size} samples into more {kind} than it has samples"
        raise PlanError(message, hint)


def _require_multiple(plan: Plan, batch_size: int) -> None:
    """Micro-batches are as even as possible: all are multiples of 2 or more only where all are equal."""
    if plan.multiple > 1 and batch_size % (plan.dp * plan.mb * plan.multiple):
        number = plan.dp * plan.mb
        sizes = listed(sorted({batch_size // number, -(-batch_size // number)}))
        raise PlanError(
            f"plan: {_need(plan)}, and dp={plan.dp} × mb={plan.mb} cuts a batch of {batch_size} samples into "
            f"micro-batches of {sizes}",
            _next_fit(plan, batch_size),
        )


def _require_turns(plan: Plan) -> None:
    """Slicings take turns over the micro-batches: one whose turn never comes would do nothing."""
    if len(plan.slices) > plan.mb:
        given, unused = (fields.write({"slices": slicings}) for slicings in (plan.slices, plan.slices[plan.mb :]))
        message = f"plan: {given} gives {len(plan.slices)} slicings, and mb={plan.mb} never comes to {unused}"
        raise PlanError(message, f"use mb={len(plan.slices)} or more, or fewer slicings")


def _require_partners(plan: Plan) -> None:
    if plan.pairs and plan.mb == 1:
        message = "plan: pairs=yes does nothing with mb=1: there is no other micro-batch to take turns with"
        raise PlanError(message, "use mb=2 or more, or leave pairs out")


def _require_several(plan: Plan) -> None:
    if SCHEDULES[plan.schedule].by_block and plan.mb == 1:
        message = f"plan: schedule={plan.schedule} does nothing with mb=1: blocks come one after the other in any order"
        raise PlanError(message, "use mb=2 or more, or leave schedule out")


def _need(plan: Plan) -> str:
    """What is needed, by which fields, for how many samples beside each other."""
    groups = plan.multiple // plan.halves
    names = [*(["tp", "degrees"] if groups > 1 else []), *(["overlap"] if plan.halves > 1 else [])]
    counts = [*([f"{groups} groups"] if groups > 1 else []), *(["2 halves"] if plan.halves > 1 else [])]
    cause = f"{fields.write({name: getattr(plan, name) for name in names})} ({' × '.join(counts)})"
    return f"{cause} needs a multiple of {plan.multiple} samples in every micro-batch"


def _next_fit(plan: Plan, batch_size: int) -> str:
    """The numbers nearest to what was given that fit."""
    needed = plan.dp * plan.mb * plan.multiple
    below = batch_size // needed * needed
    sizes = f"batch_size={listed(size for size in (below, below + needed) if size)}"
    rest, over = divmod(batch_size, plan.dp * plan.multiple)
    if over:
        return f"use {sizes}"
    fewer, more = ([mb for mb in divisors(rest) if (mb < plan.mb) == less] for less in (True, False))
    return f"use mb={listed([*fewer[-1:], *more[:1]])}, or {sizes}"


def bubble(plan: Plan) -> float | None:
    """The share of a step in which ranks wait, with equal stages and F = B = W; None where no formula gives it."""
    idle, busy = plan.pp - 1, plan.mb
    if plan.slices:
        return None  # later slices attend to more tokens and take longer
    if plan.schedule in ("1f1b", "eager-1f1b", "gpipe"):
        return idle / (busy + idle)
    if plan.schedule == "interleaved" and plan.mb % plan.pp == 0:
        return idle / (plan.v * busy + idle)
    if plan.schedule == "block-major" and plan.stages and plan.mb >= plan.pp:
        return idle / (plan.v * busy + idle)
    if plan.schedule == "zb-h1" and plan.mb >= plan.pp:
        return idle / (3 * busy + idle)
    return None


def _number(plan: Plan, samples: int) -> int:
    if plan.pp == 1 and not plan.pairs and not SCHEDULES[plan.schedule].by_block:
        return 1
    most = min(MICRO_BATCHES_PER_RANK * plan.pp, samples)
    if plan.multiple > 1:
        # Only equal micro-batches fit. A little too many is better than a pipeline that is hardly filled.
        return min(divisors(samples // plan.multiple), key=lambda mb: abs(math.log(mb / most)))
    largest = math.ceil(samples / most)
    return math.ceil(samples / largest)  # the fewest micro-batches of which none is larger


def _filling(plan: Plan) -> str:
    if plan.pp == 1 and SCHEDULES[plan.schedule].by_block:
        return "each block runs for all of them in a row"
    if plan.pp == 1:
        return "each but the first has a partner" if plan.pairs else "there is no pipeline to fill"
    share = bubble(plan)
    filled = f"with {100 * share:.0f} % bubble" if share is not None else f"on {plan.pp} ranks"
    fitting = f", each of a multiple of {plan.multiple} samples" if plan.multiple > 1 else ""
    return f"fills {plan.num_stages} stages {filled}{fitting}"

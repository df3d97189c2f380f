"""How a batch is cut into micro-batches: enough to fill the pipeline, each with as many samples as the plan can divide.

What was given is never changed: it fits the batch, or it is refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

from phalanx.errors import PlanError
from phalanx.plan import fields
from phalanx.plan.plan import Plan
from phalanx.plan.rules import divisors, listed

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
    if plan.schedule == "zb-h1" and plan.mb >= plan.pp:
        return idle / (3 * busy + idle)
    return None


def _number(plan: Plan, samples: int) -> int:
    if plan.pp == 1 and not plan.pairs:
        return 1
    most = min(MICRO_BATCHES_PER_RANK * plan.pp, samples)
    if plan.multiple > 1:
        # Only equal micro-batches fit. A little too many is better than a pipeline that is hardly filled.
        return min(divisors(samples // plan.multiple), key=lambda mb: abs(math.log(mb / most)))
    largest = math.ceil(samples / most)
    return math.ceil(samples / largest)  # the fewest micro-batches of which none is larger


def _filling(plan: Plan) -> str:
    if plan.pp == 1:
        return "each but the first has a partner" if plan.pairs else "there is no pipeline to fill"
    share = bubble(plan)
    filled = f"with {100 * share:.0f} % bubble" if share is not None else f"on {plan.pp} ranks"
    fitting = f", each of a multiple of {plan.multiple} samples" if plan.multiple > 1 else ""
    return f"fills {plan.num_stages} stages {filled}{fitting}"

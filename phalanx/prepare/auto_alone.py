"""The plan of a run that leaves it open (`plan=auto`) on one rank: it keeps everything as long as that fits, which
nothing is faster than; else it searches what to compute again and how to cut the batch, and asks of each choice what it
exactly holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from phalanx.config import RunConfig
from phalanx.errors import PhalanxError, PlanError
from phalanx.launch.context import RankContext
from phalanx.observe.format import bytes_text, seconds_text
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import Estimate
from phalanx.planning.search import search
from phalanx.planning.work import ModelWork
from phalanx.prepare.auto import Choice, Subject, known_of, record_of, shown_cluster, whole_model, work_of
from phalanx.prepare.budget import Budget, Fit
from phalanx.prepare.here import measure_here, planned_here, to_stderr

_TOO_HIGH = 1.3  # by about how much an estimate of memory may be, at most
_TRIES = 4
_FILLED = 0.985


def choose_alone(
    subject: Subject, context: RankContext, fit: Fit, look: Callable[[Plan], Fit], budget: Budget | None
) -> Choice | None:
    """For one rank, whose simple plan needs `fit`; None where nothing fits, as is then said of that plan. look: what
    another plan needs. budget: what there is, where that is known."""
    simple, there = subject.simple, "" if budget is None else f" of {bytes_text(budget.bytes)}"
    usable = 0.0 if budget is None else subject.tried.share * _filled(fit.device) * budget.bytes
    if budget is None or fit.bytes <= usable:
        needs = f"all that the backward needs fits ({bytes_text(fit.bytes)}{there})"
        return Choice(simple, f"{simple.shown}: one device, and {needs}")
    found, tried = lightened(subject, context, fit, look, int(usable)), subject.tried
    if not tried.plans:
        return found
    if found is None:
        raise tried.nothing_else()
    return replace(found, reason=found.reason + tried.words, record=found.record | tried.record)


def _filled(device: torch.device) -> float:
    """Of the memory there is, what tensors may fill: between those on a GPU there are gaps."""
    return _FILLED if device.type == "cuda" else 1.0


def lightened(
    subject: Subject, context: RankContext, fit: Fit, look: Callable[[Plan], Fit], budget: int
) -> Choice | None:
    """The fastest plan of one rank that holds no more than `budget` bytes; None where none is found. fit: of the simple
    plan, which does not. look: what another would hold."""
    fixed = subject.fixed
    if not subject.cuts:
        fixed = {"mb": 1, **fixed}
    try:
        work = work_of(subject, whole_model(subject, fit.device), ranks=1)
        measure_here(context, subject.config.dtype, to_stderr)
        cluster, software = planned_here(context, budget, subject.config.dtype)
        exact = replace(software, reserved=0.0, slack=0.0)  # what a rank holds is asked of its program
        found = _exactly(subject.config, work, cluster, exact, fixed, look, budget)
    except PhalanxError:
        found = None
    if found is not None:
        best, own = found
        why = f"keeping everything would need {bytes_text(fit.bytes)}, and this {bytes_text(own.bytes)}"
        reason = f"{own.plan.shown}: {why} of {bytes_text(budget)}; {seconds_text(best.step_seconds)} a step predicted"
        return Choice(own.plan, f"{reason} on {shown_cluster(cluster)}, {known_of(cluster, work)}", record_of(best, []))
    return _offloaded(subject, fit, budget)


def _exactly(
    config: RunConfig, work: ModelWork, cluster: Cluster, software: Software, fixed: Mapping[str, Any],
    look: Callable[[Plan], Fit], budget: int,
) -> tuple[Estimate, Fit] | None:  # fmt: skip
    """Searches within a budget that is corrected by how far the last estimate was off; one by which nothing fits may
    have been too high."""
    best: tuple[Estimate, Fit] | None = None
    allowed, seen = float(budget), set[str]()
    for _ in range(_TRIES):
        limited = Cluster(tuple(replace(kind, memory=allowed) for kind in cluster.nodes))
        try:
            own = search(
                work, limited, software, config.batch_size, fixed, slot=config.slot, all_devices=True
            ).plans[0]  # fmt: skip
        except PlanError:
            if seen:
                break
            allowed *= _TOO_HIGH
            continue
        if own.plan.text in seen:
            break
        seen.add(own.plan.text)
        held = look(own.plan)
        if held.bytes <= budget and (best is None or own.step_seconds < best[0].step_seconds):
            best = own, held
        allowed = min(allowed * 0.99, own.peak_bytes * budget / held.bytes) if held.bytes > budget else (
            own.peak_bytes * budget / held.bytes)  # fmt: skip
    return best


def _offloaded(subject: Subject, fit: Fit, budget: int) -> Choice | None:
    """Where no recomputation is enough: the quickest of single changes, also to what lies on the host."""
    fitting = fit.lighter(budget) if subject.cuts else []
    if not fitting:
        return None
    first = fitting[0]
    reason = f"{first.plan.shown}: keeping everything would need {bytes_text(fit.bytes)}, and this "
    return Choice(first.plan, f"{reason}{bytes_text(first.needs.memory)} of {bytes_text(budget)}")

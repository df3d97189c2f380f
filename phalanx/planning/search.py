"""The best plans for a model on a cluster, or on a part of it where that does better: every mesh in the order of a
limit from below, for each the best stages and what each layer computes again, judged by `estimate.py`. Stops where no
limit promises better than what is found.

Pure: facts in, plans out, a second for thousands of devices. What the runtime does not have is not in the space.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from phalanx.errors import ConfigError, PlanError, nearest
from phalanx.plan.plan import Plan
from phalanx.planning.candidates import UNEVEN, Candidate, mesh_key, plan_of, promising
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import Estimate
from phalanx.planning.parts import least_seconds, parts
from phalanx.planning.problem import Problem
from phalanx.planning.space import Base, meshes, variants, with_degrees
from phalanx.planning.stage_times import StageTimes, worked_out
from phalanx.planning.unfit import no_candidates, nothing_fits
from phalanx.planning.work import ModelWork

KEEP = 6  # plans that are shown: the best, and the best of other meshes
MOST_TRIED = 24  # plans that are worked out, of those that look best quickly
MOST_POLISHED = 8  # stages of a plan that is polished
MOST_OF_MESH = 5  # plans of one mesh of a model of many blocks that are worked out,
UNFIT = 0.1  # of such a plan, what one counts that fits in no way: that shows soon
SPLIT = 3  # of the best plans, those that are looked at with units over fewer ranks
FIRST_OF_MESH = 2  # of which so many before those of slower meshes
OF_PART = 2  # plans that are shown of a part of a cluster
WORTH_LEAVING = 1.03  # times better a plan is that leaves devices out
Judge = Callable[[float, float], float]  # of a plan's seconds, and dollars an hour: less is better
OBJECTIVES: Mapping[str, Judge] = {
    "time": lambda seconds, _: seconds,
    "cost": lambda seconds, price: seconds * price,
}
NEAR, FAR = 1.05, 1.3  # times what is found of a mesh: others of it that look slower are not worked out


@dataclass(frozen=True)
class Found:
    """plans: the best of each mesh (pp, tp, zero), best first. tried: candidates that were worked out; known: all.
    whole: of all plans that leave no device out the best, which is one of these."""

    plans: tuple[Estimate, ...]
    tried: int
    known: int
    whole: Estimate | None = None


def search(
    model: ModelWork, cluster: Cluster, software: Software, batch: int, fixed: Mapping[str, Any] | None = None,
    keep: int = KEEP, most: int = MOST_TRIED, slot: int | None = None, objective: str = "time",
    all_devices: bool = False,
) -> Found:  # fmt: skip
    """fixed: fields of a plan that are given. keep: plans to return. most: to work out. slot: samples of every
    micro-batch, where that is given. objective: a step's `time` or `cost`. all_devices: none is left out; otherwise
    plans may be for a part of the cluster, as each of them says. A PlanError where none fits."""
    judge, given = _judge(objective, cluster), fixed or {}
    problem = Problem(model, cluster, software, batch, slot, "degrees" in given)
    whole = _on_all(problem, given, keep, most)
    every, tried, known = list(whole.plans), whole.tried, whole.known
    for found in [] if all_devices else _on_parts(problem, whole, given, min(keep, OF_PART), most, judge):
        every, tried, known = [*every, *found.plans], tried + found.tried, known + found.known
    if not every:
        raise nothing_fits(problem, given)
    best = sorted(every, key=lambda own: judge(own.step_seconds, own.price))[:keep]
    if whole.plans and whole.plans[0] not in best and keep > 1:
        best[-1] = whole.plans[0]
    return Found(tuple(best), tried, known, whole.whole)


def _on_parts(
    problem: Problem, whole: Found, fixed: Mapping[str, Any], keep: int, most: int, judge: Judge
) -> Iterator[Found]:
    """What is found on each part of a cluster that is better than all that was found before: worth leaving devices
    out."""
    best = min((judge(own.step_seconds, own.price) for own in whole.plans), default=math.inf)
    for part in parts(problem.cluster):
        own = replace(problem, cluster=part)
        below = best / WORTH_LEAVING / judge(1.0, part.price)
        if least_seconds(own.model, part, own.software, own.batch, own.slot) >= below:
            continue
        try:
            found = _on_all(own, fixed, keep, most, below)
        except PlanError:
            continue  # what is given does not go with so many devices
        better = tuple(each for each in found.plans if each.step_seconds < below)
        best = judge(better[0].step_seconds, part.price) if better else best
        yield replace(found, plans=better)


def faster_part(problem: Problem, best: Estimate, fixed: Mapping[str, Any]) -> Estimate | None:
    """A plan that leaves devices out and is faster than the best one that does not; None where there is none."""
    found = _on_parts(problem, Found((best,), 0, 0), fixed, 1, MOST_TRIED, OBJECTIVES["time"])
    return min((own for each in found for own in each.plans), key=_seconds, default=None)


def _judge(objective: str, cluster: Cluster) -> Judge:
    if objective not in OBJECTIVES:
        raise ConfigError(f"option objective = {objective!r} is not one of {', '.join(OBJECTIVES)}",
                          nearest(objective, OBJECTIVES))  # fmt: skip
    free = ", ".join(str(kind) for kind in cluster.nodes if not kind.price)
    if objective == "cost" and free:
        message = f"option objective = cost needs what devices cost, and the cluster has no price for {free}"
        raise ConfigError(message, "write for example `8x8 H100, price 2.5`: of a device and hour; or leave it out")
    return OBJECTIVES[objective]


def better(
    problem: Problem, fixed: Mapping[str, Any], below: float, among: Container[tuple[int, int, int]], most: int
) -> Estimate | None:
    """The best plan that takes less than so many seconds, of those whose (pp, dp, tp) are `among` these; None where
    there is none."""
    found = _on_all(problem, fixed, 1, most, below, among).plans
    return found[0] if found and found[0].step_seconds < below else None


def _on_all(
    problem: Problem, fixed: Mapping[str, Any], keep: int, most: int, below: float = math.inf,
    among: Container[tuple[int, int, int]] | None = None,
) -> Found:  # fmt: skip
    """Without plans where none fits or is below. A PlanError where no plan has a part for every device, or none goes
    with what is given."""
    bases = list(meshes(problem, fixed, among))
    if not bases and math.isinf(below):
        raise no_candidates(problem.model, problem.cluster, problem.batch, fixed)
    candidates, known = promising(problem, bases, fixed, keep, below)
    if not candidates and fixed and math.isinf(below):
        _require_possible(problem, bases, fixed)
    best: dict[tuple[int, ...], Estimate] = {}
    is_large = not problem.is_small
    near, most_of_mesh = (NEAR, MOST_OF_MESH) if is_large else (FAR, math.inf)
    tried, least = 0, math.inf
    worked: dict[tuple[int, ...], float] = defaultdict(float)
    for candidate in _varied(candidates) if is_large else candidates:
        key, seconds = mesh_key(candidate.plan), candidate.seconds
        may_be_best = not is_large and candidate.least < least  # of few blocks one more or less matters
        if not may_be_best and (
            (best and tried >= 2 * most)
            or (best and tried >= most and seconds > _worst(best.values(), keep))
            or (key in best and seconds > near * best[key].step_seconds)
            or worked[key] >= most_of_mesh
        ):
            continue
        found = worked_out(problem, candidate.plan)
        worked[key] += 1 if found is not None else UNFIT
        if found is None:
            continue
        tried += 1
        own = found if is_large else polished(problem, found)
        if key not in best or own.step_seconds < best[key].step_seconds:
            best[key] = own
            least = min(least, own.step_seconds)
    if not best:
        return Found((), tried, known)
    first, *others = sorted(best.values(), key=_seconds)[:keep]
    # Of many blocks one is little: only the best plan is polished.
    first = polished(problem, first)
    if is_large:
        first = min([first, *_over_fewer_ranks(problem, [first, *others[: SPLIT - 1]], fixed)], key=_seconds)
    return Found((first, *others), tried, known, first)


def _over_fewer_ranks(problem: Problem, found: Sequence[Estimate], fixed: Mapping[str, Any]) -> Iterator[Estimate]:
    """The best plans of a model of many blocks, as they are and with twice the tensor-parallel ranks, whose units may
    be split over fewer than all of these, and whose tokens may be whole between units: where that may be better than
    the best."""
    for own in (own for own in found if own.plan.schedule != "block-major"):
        plan = replace(own.plan, stages=(), recompute=())
        is_open = "degrees" not in fixed
        wider = [own for own in _wider(problem, plan) if all(getattr(own, name) == fixed[name] for name in fixed)]
        every = [plan, *(wider if is_open else [])]
        whole = [replace(own, sequence=False) for own in every if own.sequence and not own.save]
        whole = [] if "sequence" in fixed else whole
        split = [it for own in (*every, *whole) for it in with_degrees(problem, own)] if is_open else []
        for other in (*whole, *split):
            if StageTimes(problem, other).quick(found[0].step_seconds).free < found[0].step_seconds:
                better = worked_out(problem, other)
                yield from [better] if better is not None else []


def _wider(problem: Problem, plan: Plan) -> list[Plan]:
    """With twice the tensor-parallel ranks and half the replicas, where there may be such a plan."""
    tp, dp, heads = 2 * plan.tp, plan.dp // 2, problem.model.heads
    if plan.dp % 2 or tp > 2 * problem.cluster.per_node or (heads and tp > heads and not problem.can_cap):
        return []
    alone = {"zero": 0, "gather": "", "reduce": ""} if dp == 1 else {}
    try:
        return [replace(plan, tp=tp, dp=dp, sequence=True, **alone)]
    except PlanError:
        return []


def _varied(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first plans of every mesh that is not much slower, then all others: a quick estimate is better at comparing
    plans of one mesh than meshes."""
    first: list[Candidate] = []
    others: list[Candidate] = []
    seen = Counter[tuple[int, ...]]()
    for candidate in candidates:
        key = mesh_key(candidate.plan)
        is_first = seen[key] < FIRST_OF_MESH and candidate.seconds < UNEVEN * candidates[0].seconds
        (first if is_first else others).append(candidate)
        seen[key] += 1
    return [*first, *others]


def _require_possible(problem: Problem, bases: Sequence[Base], fixed: Mapping[str, Any]) -> None:
    """Where what is given goes with no mesh at all: a PlanError that says why it does not with one of them."""
    every = [fields for base in bases for fields, _ in variants(problem, base, fixed)]
    if not every:
        raise no_candidates(problem.model, problem.cluster, problem.batch, fixed)
    if all(plan_of(fields, fixed) is None for fields in every):
        Plan(**every[-1])


def polished(problem: Problem, own: Estimate) -> Estimate:
    """With single blocks moved from stage to stage as long as that helps: the optimizer and gradients take longest
    where most parameters are, which cutting stages by their time does not see."""
    plan = own.plan
    if plan.num_stages == 1 or plan.num_stages > MOST_POLISHED:
        return own
    stages = StageTimes(problem, replace(plan, stages=(), recompute=()), in_order=problem.is_small)
    while True:
        moves = (_moved(own.plan.stages, a, b) for a, b in permutations(range(plan.num_stages), 2))
        found = [new for counts in moves if min(counts) and (new := stages.estimate(counts)) is not None]
        better = min(found, key=_seconds, default=own)
        if better.step_seconds >= own.step_seconds * (1 - 1e-6):
            return own
        own = better


def _moved(counts: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    return tuple(n - (stage == source) + (stage == target) for stage, n in enumerate(counts))


def _seconds(own: Estimate) -> float:
    return own.step_seconds


def _worst(found: Iterable[Estimate], keep: int) -> float:
    """What a plan must beat to be shown."""
    seconds = sorted(own.step_seconds for own in found)
    return seconds[keep - 1] if len(seconds) >= keep else math.inf

"""The best plans for a model on a cluster: every mesh in the order of a limit from below, for each the best stages and
what each layer computes again, judged by `estimate.py`. Stops where no limit promises better than what is found.

Pure: facts in, plans out, a second for thousands of devices. What the runtime does not have is not in the space.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.planning.candidates import UNEVEN, Candidate, mesh_key, plan_of, promising
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import Estimate
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
NEAR, FAR = 1.05, 1.3  # times what is found of a mesh: others of it that look slower are not worked out


@dataclass(frozen=True)
class Found:
    """plans: the best of each mesh (pp, tp, zero), best first. tried: candidates that were worked out; known: all."""

    plans: tuple[Estimate, ...]
    tried: int
    known: int


def search(
    model: ModelWork, cluster: Cluster, software: Software, batch: int, fixed: Mapping[str, Any] | None = None,
    keep: int = KEEP, most: int = MOST_TRIED, slot: int | None = None,
) -> Found:  # fmt: skip
    """fixed: fields of a plan that are given. keep: plans to return. most: to work out. slot: samples of every
    micro-batch, where that is given. A PlanError where none fits."""
    problem = Problem(model, cluster, software, batch, slot, degrees_given="degrees" in (fixed or {}))
    bases = list(meshes(problem, fixed or {}))
    if not bases:
        raise no_candidates(model, cluster, batch, fixed or {})
    candidates, known = promising(problem, bases, fixed or {}, keep)
    if not candidates and fixed:
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
        raise nothing_fits(problem, fixed or {})
    first, *others = sorted(best.values(), key=_seconds)[:keep]
    # Of many blocks one is little: only the best plan is polished.
    first = polished(problem, first)
    if is_large and "degrees" not in (fixed or {}):
        first = min([first, *_over_fewer_ranks(problem, [first, *others[: SPLIT - 1]], fixed or {})], key=_seconds)
    return Found((first, *others), tried, known)


def _over_fewer_ranks(problem: Problem, found: Sequence[Estimate], fixed: Mapping[str, Any]) -> Iterator[Estimate]:
    """The best plans of a model of many blocks, as they are and with twice the tensor-parallel ranks, whose units may
    be split over fewer than all of these: where that may be better than the best."""
    for own in (own for own in found if own.plan.schedule != "block-major"):
        plan = replace(own.plan, stages=(), recompute=())
        wider = [own for own in _wider(problem, plan) if all(getattr(own, name) == fixed[name] for name in fixed)]
        for split in (split for wide in (plan, *wider) for split in with_degrees(problem, wide)):
            if StageTimes(problem, split).quick(found[0].step_seconds).free < found[0].step_seconds:
                better = worked_out(problem, split)
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

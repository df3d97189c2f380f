"""The best plans for a model on a cluster: every mesh in the order of a limit from below, for each the best stages and
what each layer computes again, judged by `estimate.py`. Stops where no limit promises better than what is found.

Pure: facts in, plans out, a second for thousands of devices. What the runtime does not have is not in the space.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

from phalanx.errors import PlanError
from phalanx.plan.cluster import Cluster
from phalanx.plan.cost import Software
from phalanx.plan.estimate import Estimate
from phalanx.plan.footprint import held_by
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS
from phalanx.plan.space import SHARDING, Base, meshes, offloads, variants
from phalanx.plan.stage_times import Problem, Sharded, StageTimes
from phalanx.plan.unfit import no_candidates, nothing_fits
from phalanx.plan.work import ModelWork

KEEP = 6  # plans that are shown: the best, and the best of other meshes
MOST_TRIED = 24  # plans that are worked out, of those that look best quickly
UNEVEN = 1.15
FEW_BLOCKS, MOST_POLISHED = 12, 8  # in a model of which all that may be best is polished; stages of a plan that may be
MOST_OFFLOADS = 2  # times as many of them with something on the host
MOST_LOOKED = 3  # plans of each mesh and number of micro-batches of a model of many blocks, the most promising first
CLOSE = 1.02  # times what a mesh takes by a quick estimate: no plan of it is looked at that cannot take less
MOST_OF_MESH = 5  # plans of one mesh of a model of many blocks that are worked out,
UNFIT = 0.1  # of such a plan, what one counts that fits in no way: that shows soon
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
    problem = Problem(model, cluster, software, batch, slot)
    bases = list(meshes(problem, fixed or {}))
    if not bases:
        raise no_candidates(model, cluster, batch, fixed or {})
    promising, known = _promising(problem, bases, fixed or {}, keep)
    if not promising and fixed:
        _require_possible(problem, bases, fixed)
    best: dict[tuple[int, ...], Estimate] = {}
    is_large = len(model.blocks) > FEW_BLOCKS
    near, most_of_mesh = (NEAR, MOST_OF_MESH) if is_large else (FAR, math.inf)
    tried, least = 0, math.inf
    worked: dict[tuple[int, ...], float] = defaultdict(float)
    for candidate in _varied(promising) if is_large else promising:
        key, seconds = _mesh_key(candidate.plan), candidate.seconds
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
    return Found((polished(problem, first), *others), tried, known)


class Candidate(NamedTuple):
    """A plan whose stages are open. seconds: by a quick estimate, about; least: of a step, which none is below."""

    seconds: float
    least: float
    plan: Plan


def _varied(promising: Sequence[Candidate]) -> list[Candidate]:
    """The first plans of every mesh that is not much slower, then all others: a quick estimate is better at comparing
    plans of one mesh than meshes."""
    first: list[Candidate] = []
    others: list[Candidate] = []
    seen = Counter[tuple[int, ...]]()
    for candidate in promising:
        key = _mesh_key(candidate.plan)
        is_first = seen[key] < FIRST_OF_MESH and candidate.seconds < UNEVEN * promising[0].seconds
        (first if is_first else others).append(candidate)
        seen[key] += 1
    return [*first, *others]


def _require_possible(problem: Problem, bases: Sequence[Base], fixed: Mapping[str, Any]) -> None:
    """Where what is given goes with no mesh at all: a PlanError that says why it does not with one of them."""
    every = [fields for base in bases for fields, _ in variants(problem, base, fixed)]
    if not every:
        raise no_candidates(problem.model, problem.cluster, problem.batch, fixed)
    if all(_plan(fields, fixed) is None for fields in every):
        Plan(**every[-1])


def _promising(
    problem: Problem, bases: Sequence[Base], fixed: Mapping[str, Any], keep: int
) -> tuple[list[Candidate], int]:
    """Plans by their quick estimate; of many blocks, none whose limit from below is above what would be shown. Those
    that cannot keep everything are looked at again with something on the host, which makes nothing else faster."""
    looked = _Looked(problem, keep)
    settled: set[tuple[object, ...]] = set()
    for promise, least, fields in _in_order(problem, bases, fixed):
        looked.known += 1
        zero = fields.get("zero", 0)
        if not looked.may_be_shown((fields["pp"], fields["tp"], zero), fields["mb"], least, promise):
            continue
        key = tuple([fields.get(name) for name in _BESIDE_ZERO])
        if _shards_more(fields) and key in settled:
            continue
        plan = _plan(fields, fixed)
        if plan is not None and looked.at(plan, least, promise - least) and zero == 1:
            settled.add(key)
    is_small = len(problem.model.blocks) <= FEW_BLOCKS
    if "offload" not in fixed:
        for own in sorted(looked.tight, key=lambda own: own.free):
            for offload, extra in offloads(problem, own.plan):
                looked.known += 1
                least = own.least + extra if is_small else own.free + extra
                if least < own.seconds and looked.may_be_shown(_mesh_key(own.plan), own.plan.mb, least, offloads=True):
                    looked.at(replace(own.plan, offload=offload), own.least + extra, own.again)
    return sorted(looked.quick, key=lambda own: own.seconds), looked.known


def _shards_more(fields: Mapping[str, Any]) -> bool:
    """Than ZeRO 1, without anything that could be faster: weights that are gathered while others compute may be."""
    return fields.get("zero", 0) == 2 or (fields.get("zero", 0) == 3 and fields.get("gather") != "micro-batch")


_BESIDE_ZERO = ("pp", "tp", "mb", "overlap", "pairs", "schedule", "v", "slices", "zero_degree")


def _in_order(
    problem: Problem, bases: Sequence[Base], fixed: Mapping[str, Any]
) -> list[tuple[float, float, dict[str, Any]]]:
    """All variants, the most promising first: with about what they compute again so that they fit. Each with that, and
    with seconds that no step of it is below."""
    found: list[tuple[float, float, dict[str, Any]]] = []
    known: dict[tuple[object, ...], Sharded] = {}
    for base in bases:
        plan = base.plan
        for fields, least in variants(problem, base, fixed):
            own = {name: fields[name] for name in SHARDING if name in fields}
            key = (plan.pp, plan.tp, *own.values())
            if key not in known:
                mesh = _plan({"pp": plan.pp, "tp": plan.tp, "dp": plan.dp, **own}, fixed)
                known[key] = problem.sharded(mesh) if mesh is not None else Sharded(0.0, 0.0, 0.0, 0.0)
            update = known[key].update if "offload" not in fixed else 0.0
            least += update + plan.mb * max(0.0, base.whole / plan.pp + known[key].waits - base.longest)
            found.append((least + _computed_again(problem, base, fields, known[key].room), least, fields))
    return sorted(found, key=lambda own: own[0])


def _computed_again(problem: Problem, base: Base, fields: Mapping[str, Any], room: float) -> float:
    """About the seconds of a step, for the layers of an average place in the pipeline."""
    plan, layers = base.plan, len(problem.model.layers) / base.plan.pp
    if not layers or OVERLAPS[plan.overlap].recompute or len(problem.model.blocks) <= FEW_BLOCKS:
        return 0.0  # of few blocks everything is looked at that is not too slow whatever it computes again
    parts = max(map(len, fields.get("slices", ())), default=1)
    shape = fields.get("schedule", "1f1b"), plan.pp, plan.mb, fields.get("v", 1), parts
    if shape not in problem.held:
        problem.held[shape] = (held_by(*shape, 0) + held_by(*shape, plan.pp - 1)) / 2
    held = problem.held[shape]
    return plan.mb * layers * problem.again_seconds(base.machine, room / layers / held)


class _Tight(NamedTuple):
    """A plan that cannot keep everything. seconds: as it is; free: if it could; least: as of a candidate. again: about
    what it computes again."""

    free: float
    seconds: float
    least: float
    again: float
    plan: Plan


class _Looked:
    """Plans that were looked at, with their quick estimates."""

    def __init__(self, problem: Problem, keep: int) -> None:
        self._problem, self._keep = problem, keep
        self._is_large = len(problem.model.blocks) > FEW_BLOCKS
        self._best: dict[tuple[int, ...], float] = {}
        self._worst, self._least = math.inf, math.inf  # of what would be shown
        self._reached = 0.0 if self._is_large else math.inf  # by a plan of few blocks that was worked out
        self._counts: Counter[tuple[object, ...]] = Counter()  # of each mesh, without and with something on the host
        self.quick: list[Candidate] = []
        self.tight: list[_Tight] = []
        self.known = 0

    def may_be_shown(
        self, mesh: tuple[int, ...], mb: int, least: float, promise: float = 0.0, offloads: bool = False
    ) -> bool:
        """promise: about the seconds of a step. With something on the host, what is not much slower than the best."""
        if not self._is_large:
            return least < self._limit(mesh)
        most = (MOST_OFFLOADS if offloads else 1) * MOST_LOOKED
        slow = UNEVEN * (self._least if offloads else self._worst)
        return least < min(slow, self._limit(mesh)) and promise < slow and self._counts[mesh, mb, offloads] < most

    def _limit(self, mesh: tuple[int, ...]) -> float:
        """Seconds above which nothing is of interest. Quick estimates may be below what a plan takes in the end: of few
        blocks, only what is slower than one that was worked out is left out for them."""
        close = CLOSE if self._is_large else UNEVEN
        return max(self._reached, min(self._worst, close * self._best.get(mesh, math.inf)))

    def at(self, plan: Plan, least: float, again: float) -> bool:
        """Looks at a plan. Whether it keeps everything. again: about the seconds that it computes again."""
        mesh = _mesh_key(plan)
        sharded = self._problem.sharded(plan)
        room = sharded.room + plan.hosted_share * sharded.optimizer
        if room <= 0 and (plan.offload or room + sharded.optimizer <= 0):
            return False
        self._counts[mesh, plan.mb, bool(plan.offload)] += 1
        limit = self._limit(mesh)
        seconds, free = StageTimes(self._problem, plan).quick(limit if self._is_large else math.inf)
        if free >= limit and self._is_large:
            return False
        if not plan.offload and seconds > free * (1 + 1e-6):
            self.tight.append(_Tight(free, seconds, least, again, plan))
        # Even stages may be too large where uneven ones fit.
        if room > 0:
            about = seconds if math.isfinite(seconds) else UNEVEN * (free + again)
            self.quick.append(Candidate(about, least, plan))
        if seconds < self._best.get(mesh, math.inf):
            self._best[mesh] = seconds
            if seconds < self._least and not self._is_large and (own := worked_out(self._problem, plan)) is not None:
                self._reached = min(self._reached, own.step_seconds)
            self._least = min(self._least, seconds)
            self._worst = sorted(self._best.values())[self._keep - 1] if len(self._best) >= self._keep else math.inf
        return seconds <= free * (1 + 1e-6)


def _plan(fields: Mapping[str, Any], fixed: Mapping[str, Any]) -> Plan | None:
    """None where what is given does not go with this mesh, such as zero=1 with one replica."""
    try:
        return Plan(**fields)
    except PlanError:
        if not fixed:
            raise
        return None


def polished(problem: Problem, own: Estimate) -> Estimate:
    """With single blocks moved from stage to stage as long as that helps: the optimizer and gradients take longest
    where most parameters are, which cutting stages by their time does not see."""
    plan = own.plan
    if plan.num_stages == 1 or plan.num_stages > MOST_POLISHED:
        return own
    stages = StageTimes(problem, replace(plan, stages=(), recompute=()))
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


def _mesh_key(plan: Plan) -> tuple[int, ...]:
    return plan.pp, plan.tp, plan.zero


def _worst(found: Iterable[Estimate], keep: int) -> float:
    """What a plan must beat to be shown."""
    seconds = sorted(own.step_seconds for own in found)
    return seconds[keep - 1] if len(seconds) >= keep else math.inf


def worked_out(problem: Problem, plan: Plan) -> Estimate | None:
    """With the best stages and layers that compute again as little as fits; None where nothing does."""
    stages = StageTimes(problem, plan)
    counts = stages.best()
    return None if counts is None else stages.estimate(counts)

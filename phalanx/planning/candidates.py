"""Which plans are worth working out: all that the search knows, each with seconds that no step of it is below, of which
the promising ones get a quick estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS
from phalanx.planning.cost import Machine, machines
from phalanx.planning.footprint import held_by, most_slices
from phalanx.planning.problem import Problem, Sharded
from phalanx.planning.space import SHARDING, Base, Change, keeps, offloads, variants
from phalanx.planning.stage_times import StageTimes, worked_out

UNEVEN = 1.15
PROMISING = 1.08  # times what would be shown: a plan of many blocks is not looked at that promises no better
MOST_OFFLOADS = 2  # times as many of them with something on the host
MOST_LOOKED = 3  # plans of each mesh and number of micro-batches of a model of many blocks, the most promising first
CLOSE = 1.02  # times what a mesh takes by a quick estimate: no plan of it is looked at that cannot take less


class Candidate(NamedTuple):
    """A plan whose stages are open. seconds: by a quick estimate, about; least: of a step, which none is below."""

    seconds: float
    least: float
    plan: Plan


def promising(
    problem: Problem, bases: Sequence[Base], fixed: Mapping[str, Any], keep: int, below: float = math.inf
) -> tuple[list[Candidate], int]:
    """Plans by their quick estimate; of many blocks, none whose limit from below is above what would be shown. Those
    that cannot keep everything are looked at again with something on the host, which makes nothing else faster. below:
    seconds of a step; others are of no interest."""
    looked = _Looked(problem, keep, below)
    bases = [base for base in bases if base.least < below]
    settled: set[tuple[object, ...]] = set()
    for promise, least, fields in _in_order(problem, bases, fixed):
        looked.known += 1
        zero = fields.get("zero", 0)
        if not looked.may_be_shown((fields["pp"], fields["tp"], zero), fields["mb"], least, promise):
            continue
        key = tuple([fields.get(name) for name in _BESIDE_ZERO])
        if _shards_more(fields) and key in settled:
            continue
        plan = plan_of(fields, fixed)
        if plan is not None and looked.at(plan, least, promise - least) and zero == 1:
            settled.add(key)
    if "offload" not in fixed:
        for promise, extra, own, change in _on_host(problem, looked.tight, fixed):
            looked.known += 1
            least = extra + (own.least if problem.is_small else own.free)
            mesh, mb = mesh_key(own.plan), own.plan.mb
            if least < own.seconds and looked.may_be_shown(mesh, mb, least, promise, offloads=True):
                looked.at(replace(own.plan, **change), own.least + extra, own.again)
    return sorted(looked.quick, key=lambda own: own.seconds), looked.known


def _shards_more(fields: Mapping[str, Any]) -> bool:
    """Than ZeRO 1, without anything that could be faster: weights that are gathered while others compute may be."""
    return fields.get("zero", 0) == 2 or (fields.get("zero", 0) == 3 and fields.get("gather") != "micro-batch")


_BESIDE_ZERO = ("pp", "tp", "mb", "overlap", "pairs", "degrees", "schedule", "v", "slices", "zero_degree")


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
            key = (plan.pp, plan.tp, *[fields.get(name) for name in SHARDING])
            if key not in known:
                own = {name: fields[name] for name in SHARDING if name in fields}
                mesh = plan_of({"pp": plan.pp, "tp": plan.tp, "dp": plan.dp, **own}, fixed)
                known[key] = problem.sharded(mesh) if mesh is not None else Sharded(0.0, 0.0, 0.0, 0.0, 0.0)
            update = known[key].update if "offload" not in fixed else 0.0
            least += update + plan.mb * max(0.0, base.whole / plan.pp + known[key].waits - base.longest)
            found.append((least + _computed_again(problem, base, fields, known[key].room), least, fields))
    return sorted(found, key=lambda own: own[0])


def _computed_again(problem: Problem, base: Base, fields: Mapping[str, Any], room: float) -> float:
    """About the seconds of a step, for the layers of an average place in the pipeline."""
    plan, layers = base.plan, len(problem.model.layers) / base.plan.pp
    if not layers or OVERLAPS[plan.overlap].recompute or problem.is_small:
        return 0.0  # of few blocks everything is looked at that is not too slow whatever it computes again
    parts = max(map(len, fields.get("slices", ())), default=1)
    held = _held(problem, fields.get("schedule", "1f1b"), plan.pp, plan.mb, fields.get("v", 1), parts)
    return plan.mb * layers * problem.again_seconds(base.machine, room / layers / held)


def _held(problem: Problem, schedule: str, pp: int, mb: int, v: int, parts: int) -> float:
    """Micro-batches whose activations an average place of the pipeline holds at once."""
    shape = schedule, pp, mb, v, parts
    return problem.once("held", shape, lambda: (held_by(*shape, place=0) + held_by(*shape, place=pp - 1)) / 2)


class _Tight(NamedTuple):
    """A plan that cannot keep everything. seconds: as it is; free: if it could; least: as of a candidate. again: about
    what it computes again."""

    free: float
    seconds: float
    least: float
    again: float
    plan: Plan


class _Hosted(NamedTuple):
    """A tight plan with something on the host. promise: about the seconds of a step."""

    promise: float
    extra: float  # that it takes at least
    tight: _Tight
    change: Change


def _on_host(problem: Problem, tight: Sequence[_Tight], fixed: Mapping[str, Any]) -> list[_Hosted]:
    """The most promising first."""
    found: list[_Hosted] = []
    for own in tight:
        machine = machines(problem.cluster, problem.software, own.plan, problem.samples(own.plan))[0]
        for change, extra in (it for it in offloads(problem, own.plan) if keeps(it[0], fixed)):
            again = _again_beside(problem, machine, own.plan, change)
            found.append(_Hosted(own.free + extra + again, extra, own, change))
    return sorted(found, key=lambda own: own.promise)


def _again_beside(problem: Problem, machine: Machine, plan: Plan, change: Change) -> float:
    """About the seconds of a step for what an average place computes again beside what lies on the host, and for copies
    of activations that no computation hides."""
    hosted, sharded, layers = dict(change["offload"]), problem.sharded(plan), len(problem.model.layers) / plan.pp
    if OVERLAPS[plan.overlap].recompute or not layers:
        return 0.0
    share = hosted.get("optimizer", 0.0) + hosted.get("optimizer-step", 0.0)
    leaves = sharded.optimizer + sharded.rest if "parameters" in hosted else share * sharded.optimizer
    count = hosted.get("activations")
    moved = 0.0 if count is None else min(1.0, count * plan.v / layers) if count else 1.0
    held = _held(problem, plan.schedule, plan.pp, plan.mb, plan.v, most_slices(plan))
    stay = (sharded.room + leaves) / layers / held / max(1 - moved, 1e-9)
    return plan.mb * layers * (problem.again_seconds(machine, stay) + problem.copied_seconds(machine, moved))


class _Looked:
    """Plans that were looked at, with their quick estimates."""

    def __init__(self, problem: Problem, keep: int, below: float) -> None:
        self._problem, self._keep, self._below = problem, keep, below
        self._is_large = not problem.is_small
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
        if least >= self._below or not self._is_large:
            return least < min(self._below, self._limit(mesh))
        most = (MOST_OFFLOADS if offloads else 1) * MOST_LOOKED
        worst = min(self._below, self._least if offloads else self._worst)
        if least >= min(UNEVEN * worst, self._limit(mesh)) or promise >= PROMISING * worst:
            return False
        return self._counts[mesh, mb, offloads] < most

    def _limit(self, mesh: tuple[int, ...]) -> float:
        """Seconds above which nothing is of interest. Quick estimates may be below what a plan takes in the end: of few
        blocks, only what is slower than one that was worked out is left out for them."""
        close = CLOSE if self._is_large else UNEVEN
        return max(self._reached, min(self._worst, close * self._best.get(mesh, math.inf)))

    def at(self, plan: Plan, least: float, again: float) -> bool:
        """Looks at a plan. Whether it keeps everything. again: about the seconds that it computes again."""
        mesh = mesh_key(plan)
        sharded = self._problem.sharded(plan)
        room = sharded.room
        if room <= 0 and (plan.offload or room + sharded.optimizer + sharded.rest <= 0):
            return False
        self._counts[mesh, plan.mb, bool(plan.offload)] += 1
        limit = min(self._limit(mesh), UNEVEN * self._below)
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


def plan_of(fields: Mapping[str, Any], fixed: Mapping[str, Any]) -> Plan | None:
    """None where what is given does not go with this mesh, such as zero=1 with one replica."""
    try:
        return Plan(**fields)
    except PlanError:
        if not fixed:
            raise
        return None


def mesh_key(plan: Plan) -> tuple[int, ...]:
    return plan.pp, plan.tp, plan.zero

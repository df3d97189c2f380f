"""The best plans for a model on a cluster: every mesh in the order of a limit from below, for each the best stages and
what each layer computes again, judged by `estimate.py`. Stops where no limit promises better than what is found.

Pure: facts in, plans out, a second for thousands of devices. What the runtime does not have is not in the space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

from phalanx.errors import PlanError
from phalanx.plan.cluster import Cluster
from phalanx.plan.cost import Software, machines
from phalanx.plan.devices import GIB
from phalanx.plan.estimate import Estimate, estimate
from phalanx.plan.partition import evenly
from phalanx.plan.plan import Plan
from phalanx.plan.rules import VIRTUAL_STAGES, divisors, listed
from phalanx.plan.stage_times import Problem, StageTimes
from phalanx.plan.work import ModelWork

KEEP = 6  # plans that are shown: the best, and the best of other meshes
MOST_TRIED = 32  # plans that are worked out, of those that look best quickly
UNEVEN = 1.15
FEW_BLOCKS, MOST_POLISHED = 12, 8  # in a model of which every plan is polished; stages of a plan that may be
MOST_VIRTUAL = 4
MOST_STAGES = 128


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
    bases = sorted(meshes(problem, fixed or {}), key=lambda base: base.least)
    if not bases:
        raise _no_candidates(model, cluster, batch, fixed or {})
    promising, known = _promising(problem, bases, fixed or {}, keep)
    if not promising and fixed:
        _require_possible(problem, bases, fixed)
    best: dict[tuple[int, ...], Estimate] = {}
    tried = 0
    for seconds, plan in promising:
        key = _mesh_key(plan)
        if tried >= most and best and (seconds > _worst(best.values(), keep) or tried >= 2 * most):
            break
        tried += 1
        found = worked_out(problem, plan)
        if found is not None and len(model.blocks) <= FEW_BLOCKS:
            found = polished(problem, found)
        if found is not None and (key not in best or found.step_seconds < best[key].step_seconds):
            best[key] = found
    if not best:
        raise nothing_fits(problem, fixed or {})
    first, *others = sorted(best.values(), key=_seconds)[:keep]
    # Of many blocks one is little: only the best plan is polished.
    return Found((polished(problem, first), *others), tried, known)


def _require_possible(problem: Problem, bases: Sequence[Base], fixed: Mapping[str, Any]) -> None:
    """Where what is given goes with no mesh at all: a PlanError that says why it does not with one of them."""
    every = [fields for base in bases for fields, _ in variants(problem, base, fixed)]
    if not every:
        raise _no_candidates(problem.model, problem.cluster, problem.batch, fixed)
    if all(_plan(fields, fixed) is None for fields in every):
        Plan(**every[-1])


def _promising(
    problem: Problem, bases: Sequence[Base], fixed: Mapping[str, Any], keep: int
) -> tuple[list[tuple[float, Plan]], int]:
    """Plans by their quick estimate; none whose limit from below is above what would be shown."""
    quick: list[tuple[float, Plan]] = []
    best: dict[tuple[int, ...], float] = {}
    known = 0
    for base in bases:
        for fields, least in variants(problem, base, fixed):
            known += 1
            if least >= _worst_of(best, keep):
                continue
            plan = _plan(fields, fixed)
            if plan is None:
                continue
            stages = StageTimes(problem, plan)
            seconds = stages.quick()
            if math.isinf(seconds) and stages.is_hopeless():
                continue
            # Even stages may be too large where uneven ones fit.
            quick.append((seconds if math.isfinite(seconds) else UNEVEN * least, plan))
            key = _mesh_key(plan)
            if seconds < best.get(key, math.inf):
                best[key] = seconds
    return sorted(quick, key=lambda pair: pair[0]), known


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


def _worst_of(best: Mapping[tuple[int, ...], float], keep: int) -> float:
    return sorted(best.values())[keep - 1] if len(best) >= keep else math.inf


def worked_out(problem: Problem, plan: Plan) -> Estimate | None:
    """With the best stages and layers that compute again as little as fits; None where nothing does."""
    stages = StageTimes(problem, plan)
    counts = stages.best()
    return None if counts is None else stages.estimate(counts)


# The space.


class Base(NamedTuple):
    """A mesh and its micro-batches. least: seconds that all stages together take for a micro-batch at least; longest:
    that the longest of them takes."""

    plan: Plan
    whole: float
    longest: float
    least: float


def meshes(problem: Problem, fixed: Mapping[str, Any]) -> Iterator[Base]:
    model, cluster, batch = problem.model, problem.cluster, problem.batch
    for pp in _allowed(divisors(cluster.world), fixed, "pp"):
        if pp > min(len(model.blocks), MOST_STAGES):
            continue
        for tp in _allowed(divisors(cluster.world // pp), fixed, "tp"):
            dp = cluster.world // pp // tp
            splits = tp <= 2 * cluster.per_node and (not model.heads or tp <= model.heads)
            if splits and dp <= batch and fixed.get("dp", dp) == dp:
                known = {"sequence": tp > 1, **fixed}
                for mb in _allowed(_micro_batches(batch // dp, problem.slot), fixed, "mb"):
                    yield _base(problem, Plan(pp=pp, tp=tp, dp=dp, mb=mb, sequence=known["sequence"]))


def _base(problem: Problem, plan: Plan) -> Base:
    """If all stages were equal and kept everything."""
    places = machines(problem.cluster, problem.software, plan, problem.samples(plan))
    totals = [[own.total for own in problem.class_seconds(machine)] for machine in set(places)]
    fastest = [min(column) for column in zip(*totals, strict=True)]
    whole = sum(fastest[place] for place in problem.model.blocks)
    longest = max(whole / plan.pp, *fastest)
    return Base(plan, whole, longest, plan.mb * longest)


def variants(problem: Problem, base: Base, fixed: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """Schedules and ways to shard state, as a plan's fields, each with seconds that no step of it is below."""
    plan = base.plan
    for schedule in _schedules(plan, len(problem.model.blocks), fixed):
        filling = {"zb-h1": 0.25, "interleaved": 1 / schedule.get("v", 1)}.get(schedule["schedule"], 1.0)
        least = base.least + filling * (base.whole - base.longest) + problem.software.step
        for zero in _shardings(plan, problem.cluster, fixed):
            fields = {**fixed, "pp": plan.pp, "tp": plan.tp, "dp": plan.dp, "mb": plan.mb, "sequence": plan.sequence}
            yield {**fields, **schedule, **zero}, least


def _allowed(values: Sequence[int], fixed: Mapping[str, Any], name: str) -> list[int]:
    return [value for value in values if fixed.get(name, value) == value]


def _micro_batches(samples: int, slot: int | None) -> list[int]:
    """Numbers of micro-batches that divide the samples of a replica, or of which none is larger. slot: their size."""
    if slot is not None:
        return [samples // slot] if samples % slot == 0 else []
    return sorted({math.ceil(samples / size) for size in divisors(samples) if size <= 64})


def _schedules(plan: Plan, num_blocks: int, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "schedule" in known:
        v = known.get("v") or VIRTUAL_STAGES.get(known["schedule"], 1)
        return [{"schedule": known["schedule"], "v": v}] if plan.pp * v <= num_blocks else []
    if plan.pp == 1:
        return [{"schedule": "1f1b"}]
    virtual = [v for v in range(2, MOST_VIRTUAL + 1) if plan.pp * v <= num_blocks and plan.mb >= plan.pp]
    single = ({"schedule": name} for name in ("1f1b", "eager-1f1b", "zb-h1"))
    return [*single, *({"schedule": "interleaved", "v": v} for v in virtual)]


def _shardings(plan: Plan, cluster: Cluster, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Over all replicas or, where these lie on several nodes, over those of one node."""
    if plan.dp == 1:
        return [{}]  # what is given of this is refused with the mesh
    inside = cluster.per_node // plan.tp
    degrees = [0, inside] if 1 < inside < plan.dp and plan.dp % inside == 0 else [0]
    found: list[dict[str, Any]] = [{"zero": 0}]
    for degree in degrees:
        found += [{"zero": 1, "zero_degree": degree}, {"zero": 2, "zero_degree": degree}]
        found += [{"zero": 3, "zero_degree": degree, "gather": gather} for gather in ("micro-batch", "step")]
    given = {name: known[name] for name in ("zero", "zero_degree", "gather", "reduce") if name in known}
    return [own | given for own in found if all(own.get(name, value) == value for name, value in given.items())]


def _no_candidates(model: ModelWork, cluster: Cluster, batch: int, fixed: Mapping[str, Any]) -> PlanError:
    given = ", ".join(f"{name}={value}" for name, value in fixed.items())
    if given:
        message = f"plan: no plan with {given} divides {cluster.world} devices and a batch of {batch} samples"
        hint = (
            f"leave some of them open, or give numbers whose product divides the devices; pp × v ≤ {len(model.blocks)}"
        )
        return PlanError(message, hint)
    largest = 2 * cluster.per_node * min(len(model.blocks), MOST_STAGES)
    message = f"plan: a batch of {batch} samples is too small for {cluster.world} devices: every replica needs a sample"
    return PlanError(message, f"use a batch of {-(-cluster.world // largest)} samples or more, or fewer devices")


def nothing_fits(problem: Problem, fixed: Mapping[str, Any]) -> PlanError:
    """What the leanest plan lacks, and what would mend it."""
    model, cluster = problem.model, problem.cluster
    leanest = min(_lean(problem, fixed), key=_lacking)
    lacks, place = _lacking(leanest), leanest.fullest
    held = leanest.memory[place]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items() if size > 0.01 * sum(held.values()))
    nodes = next((n for n in (2, 4, 8, 16, 32, 64) if _fits_on(problem, cluster.scaled(n), fixed)), None)
    hints = [f"{nodes} times the nodes"] if nodes else []
    needed = sum(held.values()) / (1 - problem.software.slack) + problem.software.reserved
    hints += [f"devices with {math.ceil(needed / GIB)} GiB or more", "shorter samples"]
    given = f" with {', '.join(f'{name}={value}' for name, value in fixed.items())}" if fixed else ""
    message = (
        f"plan: {model.name} does not fit on {cluster}{given}: the leanest plan ({leanest.plan.shown}) lacks "
        f"{lacks / GIB:.1f} GiB on each device of place {place} of the pipeline, which would hold {parts} GiB of "
        f"{leanest.budget[place] / GIB:.1f}"
    )
    return PlanError(message, f"use {listed(hints)}")


def _lean(problem: Problem, fixed: Mapping[str, Any]) -> Iterator[Estimate]:
    """Of every mesh the plan that needs least: all state sharded, all layers computed again, smallest micro-batches."""
    smallest: dict[tuple[int, int], Plan] = {}
    for base in meshes(problem, fixed):
        key = base.plan.pp, base.plan.tp
        if key not in smallest or base.plan.mb > smallest[key].mb:
            smallest[key] = base.plan
    for plan in smallest.values():
        sharded = {"zero": 3} if plan.dp > 1 else {}
        counts = evenly([1.0] * len(problem.model.blocks), plan.pp)
        lean = replace(plan, **{**sharded, **_sharding(fixed)}, stages=counts, recompute=("block",))
        yield estimate(problem.model, lean, problem.cluster, problem.software, problem.batch)


def _sharding(fixed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fixed[name] for name in ("zero", "zero_degree", "gather", "reduce") if name in fixed}


def _lacking(own: Estimate) -> float:
    return own.peak_bytes - own.budget[own.fullest]


def _fits_on(problem: Problem, cluster: Cluster, fixed: Mapping[str, Any]) -> bool:
    larger = Problem(problem.model, cluster, problem.software, problem.batch)
    open_fields = {name: value for name, value in fixed.items() if name not in ("pp", "dp", "tp")}
    return any(own.fits for own in _lean(larger, open_fields))

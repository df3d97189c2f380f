"""The best plans for a model on a cluster: every mesh in the order of a limit from below, for each the best stages and
what each layer computes again, judged by `estimate.py`. Stops where no limit promises better than what is found.

Pure: facts in, plans out, a second for thousands of devices. What the runtime does not have is not in the space.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any, NamedTuple

from phalanx.errors import PlanError
from phalanx.plan.cluster import Cluster
from phalanx.plan.cost import Machine, Software, machines
from phalanx.plan.devices import GIB
from phalanx.plan.estimate import Estimate, estimate
from phalanx.plan.fields import Slicings
from phalanx.plan.footprint import held_by
from phalanx.plan.offload import Offload
from phalanx.plan.partition import evenly
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS, SLICED_SCHEDULES, VIRTUAL_STAGES, divisors, listed
from phalanx.plan.slice_shares import equal
from phalanx.plan.stage_times import Problem, Sharded, StageTimes
from phalanx.plan.work import ModelWork

KEEP = 6  # plans that are shown: the best, and the best of other meshes
MOST_TRIED = 24  # plans that are worked out, of those that look best quickly
UNEVEN = 1.15
FEW_BLOCKS, MOST_POLISHED = 12, 8  # in a model of which every plan is polished; stages of a plan that may be
MOST_VIRTUAL = 4
MOST_STAGES = 128
SLICES, FEWEST_TOKENS, GRAINS = (2, 4, 8, 16, 32, 64), 64, 16  # numbers of slices; tokens and grains of one
HOSTED = (0.25, 0.5, 0.75, 1.0)  # of the optimizer's state, shares that may lie on the host
FEWEST_MOVED = 4  # layers of a stage of which what they keep may lie on the host
MOST_OFFLOADS = 3  # times as many of them with something on the host
MOST_LOOKED = 3  # plans of each mesh and number of micro-batches of a model of many blocks, the most promising first
CLOSE = 1.02  # times what a mesh takes by a quick estimate: no plan of it is looked at that cannot take less
MOST_OF_MESH = 5  # plans of one mesh of a model of many blocks that are worked out,
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
        raise _no_candidates(model, cluster, batch, fixed or {})
    promising, known = _promising(problem, bases, fixed or {}, keep)
    if not promising and fixed:
        _require_possible(problem, bases, fixed)
    best: dict[tuple[int, ...], Estimate] = {}
    is_large = len(model.blocks) > FEW_BLOCKS  # of few blocks one more or less matters
    near, most_of_mesh = (NEAR, MOST_OF_MESH) if is_large else (FAR, math.inf)
    tried, worked = 0, Counter[tuple[int, ...]]()
    for seconds, plan in _varied(promising) if is_large else promising:
        key = _mesh_key(plan)
        if best and tried >= 2 * most:
            break
        if best and tried >= most and seconds > _worst(best.values(), keep):
            continue
        if (key in best and seconds > near * best[key].step_seconds) or worked[key] >= most_of_mesh:
            continue
        tried += 1
        worked[key] += 1
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


def _varied(promising: Sequence[tuple[float, Plan]]) -> list[tuple[float, Plan]]:
    """The first plans of every mesh that is not much slower, then all others: a quick estimate is better at comparing
    plans of one mesh than meshes."""
    first: list[tuple[float, Plan]] = []
    others: list[tuple[float, Plan]] = []
    seen = Counter[tuple[int, ...]]()
    for seconds, plan in promising:
        key = _mesh_key(plan)
        is_first = seen[key] < FIRST_OF_MESH and seconds < UNEVEN * promising[0][0]
        (first if is_first else others).append((seconds, plan))
        seen[key] += 1
    return [*first, *others]


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
    """Plans by their quick estimate; none whose limit from below is above what would be shown. Those that cannot keep
    everything are looked at again with something on the host, which makes nothing else faster."""
    looked = _Looked(problem, keep)
    settled: set[tuple[object, ...]] = set()
    for least, fields in _in_order(problem, bases, fixed):
        looked.known += 1
        zero, key = fields.get("zero", 0), tuple(fields.get(name) for name in _BESIDE_ZERO)
        mesh = (fields["pp"], fields["tp"], zero)
        if not looked.may_be_shown(mesh, fields["mb"], least) or (zero > 1 and key in settled):
            continue
        plan = _plan(fields, fixed)
        if plan is not None and looked.at(plan, least) and zero == 1:
            settled.add(key)  # sharding more only takes longer
    if "offload" not in fixed:
        for own in sorted(looked.tight, key=lambda own: own.free):
            for offload, extra in offloads(problem, own.plan):
                looked.known += 1
                if own.free + extra < own.seconds and looked.may_be_shown(
                    _mesh_key(own.plan), own.plan.mb, own.free + extra, offloads=True
                ):
                    looked.at(replace(own.plan, offload=offload), own.free + extra)
    return sorted(looked.quick, key=lambda pair: pair[0]), looked.known


_BESIDE_ZERO = ("pp", "tp", "mb", "overlap", "pairs", "schedule", "v", "slices", "zero_degree")


def _in_order(problem: Problem, bases: Sequence[Base], fixed: Mapping[str, Any]) -> list[tuple[float, dict[str, Any]]]:
    """All variants with seconds that no step of them is below, the most promising first: with about what they compute
    again so that they fit."""
    found: list[tuple[float, float, dict[str, Any]]] = []
    known: dict[tuple[object, ...], Sharded] = {}
    for base in bases:
        plan = base.plan
        for fields, least in variants(problem, base, fixed):
            own = {name: fields[name] for name in _SHARDING if name in fields}
            key = (plan.pp, plan.tp, *own.values())
            if key not in known:
                mesh = _plan({"pp": plan.pp, "tp": plan.tp, "dp": plan.dp, **own}, fixed)
                known[key] = problem.sharded(mesh) if mesh is not None else Sharded(0.0, 0.0, 0.0, 0.0)
            update = known[key].update if "offload" not in fixed else 0.0
            least += update + plan.mb * known[key].waits
            found.append((least + _computed_again(problem, base, fields, known[key].room), least, fields))
    return [(least, fields) for _, least, fields in sorted(found, key=lambda own: own[0])]


def _computed_again(problem: Problem, base: Base, fields: Mapping[str, Any], room: float) -> float:
    """About the seconds of a step, for the layers of an average place in the pipeline."""
    plan, layers = base.plan, len(problem.model.layers) / base.plan.pp
    if not layers or OVERLAPS[plan.overlap].recompute or len(problem.model.blocks) <= FEW_BLOCKS:
        return 0.0  # of few blocks everything is looked at that is not too slow whatever it computes again
    parts = max(map(len, fields.get("slices", ())), default=1)
    shape = fields.get("schedule", "1f1b"), plan.pp, plan.mb, fields.get("v", 1), parts
    held = (held_by(*shape, 0) + held_by(*shape, plan.pp - 1)) / 2
    return plan.mb * layers * problem.again_seconds(base.machine, room / layers / held)


class _Tight(NamedTuple):
    """A plan that cannot keep everything. seconds: as it is; free: if it could."""

    free: float
    seconds: float
    plan: Plan


class _Looked:
    """Plans that were looked at, with their quick estimates."""

    def __init__(self, problem: Problem, keep: int) -> None:
        self._problem, self._keep = problem, keep
        self._best: dict[tuple[int, ...], float] = {}
        self._worst = math.inf  # of what would be shown
        is_large = len(problem.model.blocks) > FEW_BLOCKS
        self._most, self._close = (MOST_LOOKED, CLOSE) if is_large else (math.inf, UNEVEN)
        self._counts: Counter[tuple[object, ...]] = Counter()  # of each mesh, without and with something on the host
        self.quick: list[tuple[float, Plan]] = []
        self.tight: list[_Tight] = []
        self.known = 0

    def may_be_shown(self, mesh: tuple[int, ...], mb: int, least: float, offloads: bool = False) -> bool:
        is_better = least < self._worst and least < self._close * self._best.get(mesh, math.inf)
        return is_better and self._counts[mesh, mb, offloads] < (MOST_OFFLOADS if offloads else 1) * self._most

    def at(self, plan: Plan, least: float) -> bool:
        """Looks at a plan. Whether it keeps everything."""
        mesh = _mesh_key(plan)
        sharded = self._problem.sharded(plan)
        room = sharded.room + plan.hosted_share * sharded.optimizer
        if room <= 0 and (plan.offload or room + sharded.optimizer <= 0):
            return False
        self._counts[mesh, plan.mb, bool(plan.offload)] += 1
        limit = min(self._worst, self._close * self._best.get(mesh, math.inf))
        seconds, free = StageTimes(self._problem, plan).quick(limit)
        if free >= limit:
            return False
        if not plan.offload and seconds > free * (1 + 1e-6):
            self.tight.append(_Tight(free, seconds, plan))
        # Even stages may be too large where uneven ones fit.
        if room > 0:
            self.quick.append((seconds if math.isfinite(seconds) else UNEVEN * free, plan))
        if seconds < self._best.get(mesh, math.inf):
            self._best[mesh] = seconds
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


# The space.


class Base(NamedTuple):
    """A mesh and its micro-batches. whole: seconds that all stages together take for a micro-batch at least; longest:
    that the longest of them takes; least: of all micro-batches. machine: the first place of the pipeline."""

    plan: Plan
    whole: float
    longest: float
    least: float
    machine: Machine


def meshes(problem: Problem, fixed: Mapping[str, Any]) -> Iterator[Base]:
    model, cluster, batch = problem.model, problem.cluster, problem.batch
    for pp in _allowed(divisors(cluster.world), fixed, "pp"):
        if pp > min(len(model.blocks), MOST_STAGES):
            continue
        for tp in _allowed(divisors(cluster.world // pp), fixed, "tp"):
            dp = cluster.world // pp // tp
            splits = tp <= 2 * cluster.per_node and (not model.heads or tp <= model.heads)
            if splits and dp <= batch and fixed.get("dp", dp) == dp:
                sequence = fixed.get("sequence", tp > 1)
                for mb in _allowed(_micro_batches(batch // dp, problem.slot), fixed, "mb"):
                    for overlap, pairs in _ways_to_hide(batch, pp, tp, dp, mb, fixed):
                        plan = Plan(pp=pp, tp=tp, dp=dp, mb=mb, sequence=sequence, overlap=overlap, pairs=pairs)
                        yield _base(problem, plan)


def _ways_to_hide(
    batch: int, pp: int, tp: int, dp: int, mb: int, fixed: Mapping[str, Any]
) -> Iterator[tuple[str, bool]]:
    """Communication inside blocks: by halves of micro-batches, by pairs of them, by both or not."""
    overlaps = [fixed["overlap"]] if "overlap" in fixed else ["none", "halves"]
    for overlap, pairs in product(overlaps, [fixed["pairs"]] if "pairs" in fixed else [False, True]):
        splits = tp > 1 or (overlap == "none" and not pairs)
        halves = OVERLAPS[overlap].halves == 1 or batch % (2 * dp * mb) == 0
        if splits and halves and not (pairs and (pp > 1 or mb == 1)):
            yield overlap, pairs


def _base(problem: Problem, plan: Plan) -> Base:
    """If all stages were equal and kept everything."""
    places = machines(problem.cluster, problem.software, plan, problem.samples(plan))
    totals = [[own.total for own in problem.class_seconds(machine)] for machine in set(places)]
    fastest = [min(column) for column in zip(*totals, strict=True)]
    whole = sum(fastest[place] for place in problem.model.blocks)
    longest = max(whole / plan.pp, *fastest)
    return Base(plan, whole, longest, plan.mb * longest, places[0])


def variants(problem: Problem, base: Base, fixed: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """Schedules, slices and ways to shard state, as a plan's fields, each with seconds that no step of it is below."""
    plan = base.plan
    names = ("pp", "tp", "dp", "mb", "sequence", "overlap", "pairs")
    fields = {**fixed, **{name: getattr(plan, name) for name in names}}
    shardings = _shardings(plan, problem.cluster, fixed)
    for schedule in _schedules(plan, len(problem.model.blocks), fixed):
        filling: float = _FILLED.get(schedule["schedule"], 1 / int(schedule.get("v", 1)))
        for slices in _slicings(problem, base, schedule["schedule"], fixed):
            parts = max(map(len, slices), default=1)
            least = base.least + filling * (base.whole - base.longest) / parts + problem.software.step
            cut = {"slices": slices} if slices else {}
            for zero in shardings:
                yield {**fields, **schedule, **cut, **zero}, least


_SHARDING = ("zero", "zero_degree", "gather", "reduce")
_FILLED = {"zb-h1": 0.25, "zb-v": 0.1}  # of what others do, the least that is idle where weight gradients fill gaps


def _slicings(problem: Problem, base: Base, schedule: str, fixed: Mapping[str, Any]) -> list[Slicings]:
    """Of slices that cost the same; none where a pipeline has enough micro-batches."""
    plan, model = base.plan, problem.model
    if "slices" in fixed:
        return [fixed["slices"]]
    if plan.pp == 1 or schedule not in SLICED_SCHEDULES or not model.causal or plan.pairs:
        return [()]
    most = 4 * plan.pp // plan.mb
    counts = [n for n in SLICES if n <= most < 16 * n and n * FEWEST_TOKENS <= model.tokens]
    attention = problem.attention(plan) if counts else 0.0
    return [(), *((equal(count, attention, GRAINS * count),) for count in counts)]


def offloads(problem: Problem, plan: Plan) -> list[tuple[Offload, float]]:
    """What may lie on the host, with the seconds that it takes at least: state of the optimizer, activations, both."""
    if any(kind.device.name == "CPU" for kind in problem.cluster.nodes):
        return []  # where devices have no memory of their own
    model = problem.model
    own = model.trained * model.num_parameters / plan.pp / plan.tp / plan.shards
    rate = max(Machine(kind, problem.software, plan, 1).host_rate for kind in problem.cluster.nodes)
    ways = {"optimizer": model.state_width / rate, "optimizer-step": 1 / problem.software.host_updates}
    word = min(ways, key=lambda name: ways[name])
    state = [(((word, share),), share * own * ways[word]) for share in HOSTED]
    layers = len(model.layers) // plan.num_stages
    counts = [-(-layers // 2), 0] if layers >= FEWEST_MOVED else []
    moved: list[tuple[Offload, float]] = [((("activations", count),), 0.0) for count in counts]
    both = [((*first, *state[-1][0]), state[-1][1]) for first, _ in moved]
    return [*state, *moved, *both]


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
    folded = [{"schedule": "zb-v", "v": 2}] if 2 * plan.pp <= num_blocks else []
    return [*single, *({"schedule": "interleaved", "v": v} for v in virtual), *folded]


def _shardings(plan: Plan, cluster: Cluster, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Over all replicas or, where these lie on several nodes, over those of one node."""
    if plan.dp == 1:
        return [{}]  # what is given of this is refused with the mesh
    inside = cluster.per_node // plan.tp
    degrees = [0, inside] if 1 < inside < plan.dp and plan.dp % inside == 0 else [0]
    found: list[dict[str, Any]] = [{"zero": 0}]
    for degree in degrees:
        found += [{"zero": 1, "zero_degree": degree}, {"zero": 2, "zero_degree": degree}]
        moments = ("step",) if plan.pairs else ("micro-batch", "step")
        found += [{"zero": 3, "zero_degree": degree, "gather": gather} for gather in moments]
    given = {name: known[name] for name in _SHARDING if name in known}
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
        if key not in smallest or (base.plan.mb, not base.plan.pairs) > (smallest[key].mb, not smallest[key].pairs):
            smallest[key] = base.plan
    for plan in smallest.values():
        sharded = {"zero": 3} if plan.dp > 1 else {}
        counts = evenly([1.0] * len(problem.model.blocks), plan.pp)
        again = () if OVERLAPS[plan.overlap].recompute else ("block",)
        lean = replace(plan, **{**sharded, **_sharding(fixed)}, stages=counts, recompute=again)
        yield estimate(problem.model, lean, problem.cluster, problem.software, problem.batch)


def _sharding(fixed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fixed[name] for name in (*_SHARDING, "offload") if name in fixed}


def _lacking(own: Estimate) -> float:
    return own.peak_bytes - own.budget[own.fullest]


def _fits_on(problem: Problem, cluster: Cluster, fixed: Mapping[str, Any]) -> bool:
    larger = Problem(problem.model, cluster, problem.software, problem.batch)
    open_fields = {name: value for name, value in fixed.items() if name not in ("pp", "dp", "tp")}
    return any(own.fits for own in _lean(larger, open_fields))

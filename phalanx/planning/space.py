"""The plans that the search knows: meshes of all devices, ways to hide communication, schedules, slices, ways to shard
state, and what may lie on the host. Each with seconds that no step of it is below.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from phalanx.plan.fields import Slicings
from phalanx.plan.offload import Offload
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS, SLICED_SCHEDULES, VIRTUAL_STAGES, divisors, may_host_parameters
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Machine, among_others, machines, update_bytes
from phalanx.planning.degrees import Degrees
from phalanx.planning.problem import Problem
from phalanx.planning.slice_shares import equal

Degreed = tuple[Degrees, ...]  # of every layer, or of all
MOST_VIRTUAL = 4
MOST_STAGES = 128
SLICES, FEWEST_TOKENS, GRAINS = (2, 4, 8, 16, 32, 64), 64, 16  # numbers of slices; tokens and grains of one
HOSTED = (0.25, 0.5, 0.75, 1.0)  # of the optimizer's state, shares that may lie on the host
FEWEST_MOVED = 4  # layers of a stage of which what they keep may lie on the host


class Base(NamedTuple):
    """A mesh and its micro-batches. whole: seconds that all stages together take for a micro-batch at least; longest:
    that the longest of them takes; least: of all micro-batches. machine: the first place of the pipeline."""

    plan: Plan
    whole: float
    longest: float
    least: float
    machine: Machine


def meshes(
    problem: Problem, fixed: Mapping[str, Any], among: Container[tuple[int, int, int]] | None = None
) -> Iterator[Base]:
    """among: the (pp, dp, tp) that are looked at; None: all."""
    model, cluster, batch = problem.model, problem.cluster, problem.batch
    for pp in _allowed(divisors(cluster.world), fixed, "pp"):
        if pp > min(len(model.blocks), MOST_STAGES):
            continue
        for tp in _allowed(divisors(cluster.world // pp), fixed, "tp"):
            dp = cluster.world // pp // tp
            if among is not None and (pp, dp, tp) not in among:
                continue
            if tp <= 2 * cluster.per_node and dp <= batch and fixed.get("dp", dp) == dp:
                sequences = _sequences(problem, tp, fixed)
                for mb in _allowed(_micro_batches(batch // dp, problem.slot), fixed, "mb"):
                    for (overlap, pairs), sequence in product(_ways_to_hide(batch, pp, tp, dp, mb, fixed), sequences):
                        plan = Plan(pp=pp, tp=tp, dp=dp, mb=mb, sequence=sequence, overlap=overlap, pairs=pairs)
                        yield from (base_of(problem, own) for own in _over_fewer_ranks(problem, plan, fixed))


def _sequences(problem: Problem, tp: int, fixed: Mapping[str, Any]) -> list[bool]:
    """Whether tokens are split between units. Of a model of many blocks they are; only the best plans are looked at
    without in the end."""
    if "sequence" in fixed:
        return [fixed["sequence"]]
    return [tp > 1, False] if tp > 1 and problem.is_small else [tp > 1]


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


def _over_fewer_ranks(problem: Problem, plan: Plan, fixed: Mapping[str, Any]) -> Iterator[Plan]:
    """As it is, and with the degrees that units may have. Of a model of many blocks only where units have too few
    heads for what is given; the best plans are looked at with them in the end."""
    if "degrees" in fixed:
        own = fixed["degrees"]
        if all(plan.tp % degree == 0 for units in own for degree in units):
            yield from with_degrees(problem, plan, own)
        return
    has_heads = not problem.model.heads or plan.tp <= problem.model.heads
    if has_heads:
        yield plan
    if problem.is_small:
        yield from with_degrees(problem, plan)
    elif not has_heads and "tp" in fixed and problem.can_cap:
        yield from with_degrees(problem, plan, ((plan.tp,),))


def with_degrees(problem: Problem, plan: Plan, given: Degreed = ()) -> Iterator[Plan]:
    """With the degrees that are given, or all that units may have, where these leave every group of ranks as many
    samples of each micro-batch."""
    samples = problem.batch // (plan.dp * plan.mb * plan.halves)
    if plan.tp == 1 or problem.batch % (plan.dp * plan.mb * plan.halves):
        return
    allowed = tuple(degree for degree in divisors(plan.tp) if samples % (plan.tp // degree) == 0)
    split = replace(plan, degrees=given or (allowed,))
    ways = problem.splits(split)
    groups = {plan.tp // degree for way in ways for units in way for degree in units}
    if len(ways) > (0 if given else 1) and all(samples % count == 0 for count in groups):
        yield split


def base_of(problem: Problem, plan: Plan) -> Base:
    """If all stages were equal and kept everything."""
    places = machines(problem.cluster, problem.software, plan, problem.samples(plan))
    totals = [[own.total for own in problem.class_seconds(machine)] for machine in set(places)]
    fastest = [min(column) for column in zip(*totals, strict=True)]
    whole = sum(fastest[place] for place in problem.model.blocks)
    longest = max(whole / plan.pp, *fastest)
    return Base(plan, whole, longest, _through(places[0], whole, plan.mb * longest), places[0])


def _through(machine: Machine, whole: float, seconds: float) -> float:
    return among_others(seconds, machine.plan.mb * whole / machine.plan.pp, machine.crowded)


def variants(problem: Problem, base: Base, fixed: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], float]]:
    """Schedules, slices and ways to shard state, as a plan's fields, each with seconds that no step of it is below."""
    plan = base.plan
    names = ("pp", "tp", "dp", "mb", "sequence", "overlap", "pairs", "degrees")
    fields = {**fixed, **{name: getattr(plan, name) for name in names}}
    shardings = _shardings(plan, problem.cluster, fixed)
    for schedule in _schedules(plan, len(problem.model.blocks), fixed):
        filling: float = _FILLED.get(schedule["schedule"], 1 / int(schedule.get("v", 1)))
        for slices in _slicings(problem, base, schedule["schedule"], fixed):
            parts = max(map(len, slices), default=1)
            through = plan.mb * base.longest + filling * (base.whole - base.longest) / parts
            least = _through(base.machine, base.whole, through) + problem.software.step
            cut = {"slices": slices} if slices else {}
            for zero in shardings:
                yield {**fields, **schedule, **cut, **zero}, least


SHARDING = ("zero", "zero_degree", "gather", "reduce")
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


Change = dict[str, Any]  # fields of a plan


def offloads(problem: Problem, plan: Plan) -> list[tuple[Change, float]]:
    """What may lie on the host, with the seconds that it takes at least: state of the optimizer, activations, both;
    parameters as well, at last block by block."""
    if any(kind.device.name == "CPU" for kind in problem.cluster.nodes):
        return []  # where devices have no memory of their own
    model = problem.model
    own = model.trained * model.num_parameters / plan.pp / plan.tp / plan.shards
    kinds = [Machine(kind, problem.software, plan, 1) for kind in problem.cluster.nodes]
    rate = max(kind.host_rate for kind in kinds)
    here = update_bytes(model.width, model.state_width) / min(kind.bandwidth for kind in kinds)
    ways = {"optimizer": model.state_width / rate, "optimizer-step": 1 / problem.software.host_updates - here}
    word = min(ways, key=lambda name: ways[name])
    state = [(((word, share),), share * own * ways[word]) for share in HOSTED]
    layers = len(model.layers) // plan.num_stages
    counts = [-(-layers // 2), 0] if layers >= FEWEST_MOVED else []
    moved: list[tuple[Offload, float]] = [((("activations", count),), 0.0) for count in counts]
    both = [((*first, *state[-1][0]), state[-1][1]) for first, _ in moved]
    found: list[tuple[Change, float]] = [({"offload": words}, extra) for words, extra in (*state, *moved, *both)]
    return found + [(change, own * ways[word]) for change in _fetched(problem, plan, word)]


def keeps(change: Change, given: Mapping[str, Any]) -> bool:
    """Whether whatever is given of a plan stays as it is."""
    return all(given.get(name, value) == value for name, value in change.items())


def _fetched(problem: Problem, plan: Plan, word: str) -> list[Change]:
    """With all parameters on the host. word: who updates."""
    if not may_host_parameters(plan):
        return []
    updates: Offload = (("optimizer-step", 1.0),) if word == "optimizer-step" else ()
    words: list[Offload] = [(("parameters", 0), *updates)]
    if len(problem.model.layers) // plan.num_stages >= FEWEST_MOVED:
        words.append((("activations", 0), *words[0]))
    found: list[Change] = [{"offload": own} for own in words]
    if plan.pp == 1 and plan.mb > 1 and plan.overlap == "none" and not plan.slices:
        blocks = {"schedule": "block-major", "v": len(problem.model.blocks), "recompute": ("block",)}
        found += [{"offload": own, **blocks} for own in words]
    return found


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
    most = max(MOST_VIRTUAL, known.get("v", 1))
    virtual = [v for v in range(2, most + 1) if plan.pp * v <= num_blocks and plan.mb >= plan.pp]
    single = ({"schedule": name} for name in ("1f1b", "eager-1f1b", "zb-h1"))
    folded = [{"schedule": "zb-v", "v": 2}] if 2 * plan.pp <= num_blocks else []
    every = [*single, *({"schedule": "interleaved", "v": v} for v in virtual), *folded]
    return [own for own in every if known.get("v", own.get("v", 1)) == own.get("v", 1)]


def _shardings(plan: Plan, cluster: Cluster, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Over all replicas or, where these lie on several nodes, over those of one node."""
    if plan.dp == 1:
        return [{}]  # what is given of this is refused with the mesh
    inside = cluster.per_node // plan.tp
    degrees = [0, inside] if 1 < inside < plan.dp and plan.dp % inside == 0 else [0]
    found: list[dict[str, Any]] = [{"zero": 0}]
    for degree in degrees:
        found += [{"zero": 1, "zero_degree": degree}, {"zero": 2, "zero_degree": degree}]
        found += [{"zero": 3, "zero_degree": degree, **moments} for moments in _moments(plan, known)]
    given = {name: known[name] for name in SHARDING if name in known}
    return [own | given for own in found if all(own.get(name, value) == value for name, value in given.items())]


def _moments(plan: Plan, known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """When parameters are gathered and gradients reduced under ZeRO 3. Gathered once for a step they take as long as
    under ZeRO 2, and more memory: only where that is asked for. Reduced once for several micro-batches, gradients take
    less time and more memory."""
    found = [] if plan.pairs else [{"gather": "micro-batch"}]
    if found and plan.mb > 1 and "reduce" not in known:
        found.append({"gather": "micro-batch", "reduce": "step"})
    return [*found, {"gather": "step"}] if known.get("zero") == 3 or "gather" in known else found

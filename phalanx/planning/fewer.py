"""Which plan fewer ranks go on with: meshes for them, each with all that the plan before says beside the mesh, in the
order of the seconds that a step of them is estimated to take. Of those that take about as long, the one comes first for
which least state moves.

Pure, and quick enough for a moment between two steps. Memory is not looked at here: whoever tries the plans does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice

from phalanx.errors import PlanError
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.plan.shrink import Shape, leaner, shapes, shrunk
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import estimate
from phalanx.planning.footprint import place_blocks
from phalanx.planning.work import ModelWork

ALIKE = 1.03  # times as long: nearer than estimates are
_MOST_JUDGED = 64  # meshes
_MOST_LOOKED_AT = 600  # texts, of which these are made
_MOST_PLANS, _MOST_LEANER = 64, 32  # that are tried for the ranks that are left; the second where memory is short
_PLACES = 5  # of ranks that may be lost, by which it is judged how much state moves

Complete = Callable[[str], Plan]  # with nothing left open; a PlanError where the run cannot go on with it


@dataclass(frozen=True)
class Known:
    """By what plans are judged. batch: samples of a step. by: where it comes from, in words."""

    model: ModelWork
    cluster: Cluster
    software: Software
    batch: int
    by: str = ""


@dataclass(frozen=True)
class Order:
    """What ranks go on with, as texts in the order in which they are tried. seconds: of a step, estimated of the first
    ones in that order. by: from what; why_not: why of none, where there is a choice."""

    plans: list[str]
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    by: str = ""
    why_not: str = ""


def candidates(whole: Plan, num_ranks: int, batch: int, complete: Complete) -> list[Plan]:
    """Plans for at most so many ranks, made of the one for all: of every number of stages and tensor parts the one with
    most replicas that the run can go on with, keeping as much as it can of all else, and whose micro-batches of a batch
    of so many samples are not larger than before."""
    found: list[Plan] = []
    tries = 0
    for pp, tp in _stages_and_parts(whole, num_ranks):
        for dp in range(num_ranks // (pp * tp), 0, -1):
            texts = list(shrunk(whole, (pp, dp, tp)))
            known = (_completed(text, complete) for text in texts)
            plan = next((own for own in known if own and _samples(own, batch) <= _samples(whole, batch)), None)
            tries += len(texts)
            if plan is not None:
                found.append(plan)
                break
            if tries >= _MOST_LOOKED_AT:
                return found
        if len(found) == _MOST_JUDGED:
            break
    return found


def _stages_and_parts(whole: Plan, num_ranks: int) -> list[tuple[int, int]]:
    """Those that there are first, then those that leave fewest ranks without work."""
    every = dict.fromkeys((pp, tp) for pp, _, tp in shapes(whole, num_ranks))
    return sorted(every, key=lambda own: own != (whole.pp, whole.tp))


def _samples(plan: Plan, batch: int) -> int:
    """Of a micro-batch, the largest."""
    return -(-batch // (plan.dp * plan.mb))


def _completed(text: str, complete: Complete) -> Plan | None:
    try:
        return complete(text)
    except PlanError:
        return None


def ranked(
    known: Known, plans: Sequence[Plan], now: Plan, lost: int, leaves_out: Callable[[Plan], int]
) -> list[tuple[Plan, float]]:
    """Plans with their seconds, in the order in which they are to be tried. now: whose state there is; lost: how many
    of its ranks there will be fewer. leaves_out: how much of what must stay a plan does not keep, which counts
    first."""

    @cache
    def moved(plan: Plan) -> float:
        return moved_share(known.model, now, plan, lost)

    judged = [(plan, estimate(known.model, plan, known.cluster, known.software, known.batch).step_seconds)
              for plan in plans]  # fmt: skip
    found: list[tuple[Plan, float]] = []
    for least in sorted({leaves_out(plan) for plan in plans}):
        left = sorted((own for own in judged if leaves_out(own[0]) == least), key=lambda own: own[1])
        while left:
            alike = [own for own in left if own[1] <= ALIKE * left[0][1]]
            first = alike[0] if len(alike) == 1 else min(alike, key=lambda own: moved(own[0]))
            left.remove(first)
            found.append(first)
    return found


def moved_share(model: ModelWork, now: Plan, plan: Plan, lost: int) -> float:
    """Parameters that ranks come to hold, of all; on average over which neighbours are lost. ZeRO's shards, which move
    with every mesh, count as if they were whole."""
    after = Mesh.of(plan)
    sizes = [model.block(block).parameters for block in range(len(model.blocks))]
    most = now.world - lost
    places = sorted({round(step * most / max(1, _PLACES - 1)) for step in range(_PLACES)})

    @cache
    def missing(was: tuple[int, int] | None, place: int, part: int) -> float:
        """was: place and part that a rank had."""
        held = frozenset(place_blocks(now, was[0])) if was is not None else frozenset[int]()
        both = 0.0
        if was is not None:
            stop, start = min((was[1] + 1) / now.tp, (part + 1) / plan.tp), max(was[1] / now.tp, part / plan.tp)
            both = max(0.0, stop - start)
        blocks = place_blocks(plan, place)
        return sum(sizes[block] * (1 / plan.tp - (both if block in held else 0.0)) for block in blocks)

    total = 0.0
    for first in places:
        for rank in after.world:
            place, _, part = after.coordinates(rank)
            old = rank if rank < first else rank + lost
            total += missing(_place_of(now, old), place, part)
    return total / len(places) / max(1.0, sum(sizes))


def _place_of(plan: Plan, rank: int) -> tuple[int, int] | None:
    """None of a rank without work."""
    if rank >= plan.world:
        return None
    place, _, part = Mesh.of(plan).coordinates(rank)
    return place, part


def in_order(
    whole: Plan, num_ranks: int, first: Sequence[Plan] = (), keeps: Callable[[str], bool] | None = None
) -> list[str]:
    """What so many ranks go on with: the plans that were ranked; then the same and all other meshes with less of what
    the plan says; then what needs less memory. keeps: of texts, those that come before all others."""
    if whole.world <= num_ranks:
        return [whole.full_text]
    meshes = dict.fromkeys([*map(_shape, first), *shapes(whole, num_ranks)])
    every = chain((plan.full_text for plan in first), chain.from_iterable(shrunk(whole, own) for own in meshes))
    usual = islice(_once(every), _MOST_PLANS)
    found = list(dict.fromkeys([*usual, *islice(leaner(whole, meshes), _MOST_LEANER)]))
    return found if keeps is None else sorted(found, key=lambda text: not keeps(text))


def _once(texts: Iterable[str]) -> Iterator[str]:
    """Without making all of them to know the first few."""
    seen = set[str]()
    for text in texts:
        if text not in seen:
            seen.add(text)
            yield text


def _shape(plan: Plan) -> Shape:
    return plan.pp, plan.dp, plan.tp

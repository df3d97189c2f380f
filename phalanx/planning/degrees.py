"""Units that are split over fewer than all tensor-parallel ranks: as many groups of these ranks as there are then have
the same parameters and compute different samples.

A block whose units are split so asks for something else than the same block over all ranks: it is a class of its own,
whose numbers are such that what is divided by `tp` elsewhere comes out right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.plan.rules import divisors
from phalanx.planning.work import BlockTime, BlockWork, Copied, Exchange, Kept, ModelWork, Unit

Degrees = tuple[int, ...]  # of each unit of a block


def split_model(model: ModelWork, plan: Plan) -> ModelWork:
    """With a class of its own for each block that the plan's degrees make different."""
    if not plan.degrees:
        return model
    classes: list[BlockWork] = []
    places: dict[tuple[int, Degrees, int], int] = {}
    blocks: list[int] = []
    for place, degrees, entering in _splits(model, plan):
        key = (place, degrees, entering)
        if key not in places:
            places[key] = len(classes)
            classes.append(split_block(model.classes[place], degrees, entering, plan))
        blocks.append(places[key])
    added = sum(classes[own].parameters - model.block(block).parameters for block, own in enumerate(blocks))
    return replace(
        model, classes=tuple(classes), blocks=tuple(blocks), num_parameters=model.num_parameters + int(added)
    )


def _splits(model: ModelWork, plan: Plan) -> Iterator[tuple[int, Degrees, int]]:
    """Of each block its class, its degrees (none where it is no layer, and lies over all ranks), and the degree of what
    enters it."""
    entering, layer, num_layers = plan.tp, 0, len(model.layers)
    for place in model.blocks:
        units = model.classes[place].units
        degrees: Degrees = plan.degrees_of(layer, units, num_layers) if units else ()
        yield place, degrees, entering
        layer += bool(units)
        entering = degrees[-1] if degrees else plan.tp


def split_block(work: BlockWork, degrees: Degrees, entering: int, plan: Plan) -> BlockWork:
    """As it is where its units have these degrees, none for a block that is no layer. entering: the degree of what
    enters it."""
    tp = plan.tp
    moves = tuple(_moves(pairwise((entering, *(degrees or (tp,)))), work.crossing, plan))
    if all(degree == tp for degree in degrees):
        return replace(work, moves=moves) if moves else work
    copied = _copied(work, degrees, tp)
    share = sum(degrees) / len(degrees) / tp  # of the samples of a micro-batch that a rank sees, on average
    parameters = sum(own.elements for own in copied)
    each = work.exchanges // work.units
    sums = [Exchange(degree, 1, work.crossing * degree / tp) for degree in degrees for _ in range(each)]
    return replace(
        work, parameters=parameters, kept={rung: _kept(own, degrees, share, plan) for rung, own in work.kept.items()},
        moved=_seen(work.moved, 1.0 if plan.sequence else share, 1.0 if plan.sequence else share),
        fixed=work.fixed * parameters / work.parameters, crossing=work.crossing * max(degrees) / tp,
        times=_times(work, max(degrees), tp), sums=tuple(own for own in sums if own.ranks > 1), moves=moves,
        copied=copied, side=math.sqrt(work.parameters / work.units) / share,
    )  # fmt: skip


def _copied(work: BlockWork, degrees: Degrees, tp: int) -> tuple[Copied, ...]:
    """Its parameters, by how many groups of ranks have the same."""
    units = work.parts if len(work.parts) == len(degrees) else (Unit(1.0),) * len(degrees)
    whole = work.parameters / sum(unit.parameters for unit in units)
    found: dict[int, float] = {}
    for unit, degree in zip(units, degrees, strict=True):
        copies = tp // degree
        found[copies] = found.get(copies, 0.0) + copies * whole * unit.parameters
    return tuple(Copied(*own) for own in sorted(found.items()))


def all_copied(works: Iterable[BlockWork]) -> tuple[Copied, ...]:
    """Of all of them, those that more than one group of ranks has."""
    found: dict[int, float] = {}
    for own in (own for work in works for own in work.copied if own.copies > 1):
        found[own.copies] = found.get(own.copies, 0.0) + own.elements
    return tuple(Copied(*own) for own in sorted(found.items()))


def _kept(own: Kept, degrees: Degrees, share: float, plan: Plan) -> Kept:
    if max(degrees) == 1:  # as on a rank that splits nothing, of fewer samples
        return Kept(own.alone, own.alone)
    return _seen(own, 1.0 if plan.sequence and plan.saves == "input" else share, 1.0 if plan.sequence else share)


def _seen(own: Kept, entries: float, rest: float) -> Kept:
    """With shares of what is not divided by the ranks of a unit."""
    return Kept(own.alone, own.split, entries * own.entries, rest * own.rest)


def _moves(degrees: Iterable[tuple[int, int]], size: float, plan: Plan) -> Iterator[Exchange]:
    """What is gathered in a forward and its backward where a value goes from units of one degree to those of another:
    tokens, where these are split, and samples. What a rank has already costs nothing."""
    for one, other in degrees:
        if one == other:
            continue
        if plan.sequence:
            yield from (Exchange(degree, 1, size * degree / plan.tp) for degree in (one, other) if degree > 1)
        small, large = sorted((one, other))
        ways = [(small, large)] if large % small == 0 else [(one, plan.tp), (other, plan.tp)]
        yield from (Exchange(b // a, a, size * b / plan.tp) for a, b in ways if b > a)


def _times(work: BlockWork, degree: int, tp: int) -> Mapping[int, tuple[BlockTime, ...]]:
    """What it was seen to take at the nearest degree, for the samples that a group of ranks sees."""
    if not work.times:
        return work.times
    nearest = max((own for own in work.times if own <= degree), default=min(work.times))
    more, part = tp / degree, nearest / degree
    seen = (
        BlockTime(own.samples * more, part * own.forward, part * own.backward, part * own.weight)
        for own in work.times[nearest]
    )
    return {tp: tuple(seen)}


def choices(work: BlockWork, plan: Plan, heads: int, given: bool = False) -> list[Degrees]:
    """Every way to give each unit of a layer one of the degrees that the plan names, or all tensor-parallel ranks, and
    no more than its heads where it attends. given: as they are in the plan. heads: 0 where that is not known."""
    if given:
        return [plan.degrees_of(0, work.units, 1)]
    degrees = sorted({plan.tp, *(degree for units in plan.degrees for degree in units)})
    units = work.parts or (Unit(1.0),) * work.units
    own = [dict.fromkeys(capped(d, heads) if unit.attends else d for d in degrees) for unit in units]
    return list(product(*own))


def capped(degree: int, heads: int) -> int:
    """The largest number of ranks, of so many, that may share so many heads."""
    return max(own for own in divisors(degree) if not heads or heads % own == 0)


def require_heads(model: ModelWork, plan: Plan) -> None:
    """A PlanError where units that attend have fewer heads than ranks, unless these may all do the same."""
    heads = model.heads
    for layer, block in enumerate(model.layers):
        work = model.block(block)
        degrees = plan.degrees_of(layer, work.units, len(model.layers))
        most = max((d for d, unit in zip(degrees, work.parts, strict=False) if unit.attends), default=1)
        if heads and most > heads and not plan.replicate:
            raise PlanError(
                f"plan: {model.name} attends with {heads} heads, which {most} ranks cannot split",
                f"use tp={heads} or less, a smaller degree for that unit (degrees=…), or replicate=yes to do the "
                "attention whole on every rank",
            )

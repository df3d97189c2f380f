"""The runs of the soak, as their numbers say: ranks, plan, options and the faults that will happen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import soak_nodes
import soak_strikes
import soak_supervisor
from soak_job import Fault
from soak_strikes import PLANS

KINDS = tuple(dict.fromkeys([*soak_strikes.KINDS, *soak_supervisor.KINDS, *soak_nodes.KINDS]))
_PLACES = {"pool": tuple(soak_strikes.KINDS), "supervisor": soak_supervisor.KINDS, "nodes": tuple(soak_nodes.KINDS)}
_TURNS = ("pool", "pool", "nodes", "pool", "pool", "supervisor")  # so that soon every kind has happened
_FAULTS = {"pool": 30, "supervisor": 3, "nodes": 6}  # of a run


@dataclass(frozen=True)
class Setting:
    """One run. place: whether faults happen to ranks of a pool, to supervisors, or to nodes of a lab."""

    number: int
    place: str
    world: int
    plan: str
    on_loss: str
    faults: tuple[Fault, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(cls, number: int, kinds: Sequence[str]) -> Setting:
        draw = random.Random(number)
        places = [place for place in _TURNS if any(kind in kinds for kind in _PLACES[place])]
        turn, place = divmod(number, len(places))[0], places[number % len(places)]
        nth = turn * places.count(place) + places[: number % len(places)].count(place)  # of the runs of its place
        world = 2 if place != "pool" else draw.choice([2, 3, 4, 4])
        own = [kind for kind in _PLACES[place] if kind in kinds]
        faults = _faults(nth, own, draw, _FAULTS[place])
        options: dict[str, Any] = {"checkpoint_every": draw.choice([1, 2, 3, 5])}
        if draw.random() < 0.6 or any(fault.kind == "corrupt copy" for fault in faults):
            options["mirror_every"] = draw.choice([0, 1, 2, 3, "auto"])
        plan, on_loss = draw.choice(PLANS[world]), draw.choice(["replace", "replace", "shrink", "regrow"])
        if place == "nodes":
            plan, on_loss = draw.choice(["dp=2", "dp=2,zero=1", "pp=2,mb=2"]), draw.choice(["replace", "regrow"])
        return cls(number, place, world, plan, on_loss, faults, options)


def _faults(nth: int, kinds: Sequence[str], draw: random.Random, count: int) -> tuple[Fault, ...]:
    """All kinds have their turn, from run to run; in a run they come in a random order."""
    chosen = [kinds[(nth * count + n) % len(kinds)] for n in range(count)]
    draw.shuffle(chosen)
    chosen.sort(key=lambda kind: {"first step": -1, "last step": 1}.get(kind, 0))
    return tuple(Fault(kind, draw.randint(1, 3), draw.random() * 0.06, draw.getrandbits(32)) for kind in chosen)

"""Plans for fewer ranks, made of the one that a run has: the quick way, when a rank was lost and steps wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from phalanx.plan import fields
from phalanx.plan.plan import Plan
from phalanx.plan.rules import divisors

# What is left to be decided anew where a mesh does not allow it, a little more each time.
_RELAXED = (
    (),
    ("mb",),
    ("zero_degree", "degrees"),
    ("schedule", "v", "slices", "pairs"),
    ("zero", "gather", "reduce", "overlap", "sequence", "save", "replicate"),
)
# What makes a plan need less memory, more each time: fewer ranks have more of a model each. ZeRO needs replicas.
_LEANER: tuple[dict[str, Any], ...] = ({"recompute": ("block",)}, {"zero": 1}, {"zero": 3})
_OF_ZERO = ("zero", "zero_degree", "gather", "reduce")
Shape = tuple[int, int, int]  # pp, dp, tp


def shapes(plan: Plan, num_ranks: int) -> list[Shape]:
    """Meshes of at most so many ranks, in the order in which they are tried where nothing is known of their speed: as
    many ranks as possible; then stages and tensor parts as before, because state then stays where it is; then more
    replicas."""
    found = [
        (pp, dp, tp)
        for tp in divisors(plan.tp)
        for pp in range(1, num_ranks // tp + 1)
        for dp in range(1, num_ranks // (tp * pp) + 1)
    ]
    return sorted(found, key=lambda own: (-own[0] * own[1] * own[2], own[2] != plan.tp, own[0] != plan.pp, -own[1]))


def shrunk(plan: Plan, shape: Shape) -> Iterator[str]:
    """The same plan on another mesh, as text: with ever less of what else it says. Which of them the model, the batch
    and the memory allow is found by trying."""
    known = _on_mesh(plan, shape)
    for names in _RELAXED:
        known = _without(known, names)
        yield fields.write(known)


def leaner(plan: Plan, meshes: Iterable[Shape]) -> Iterator[str]:
    """The same on any of these meshes with less to keep, for ranks that lack memory for what `shrunk` gives.
    Micro-batches stay as large as before."""
    changes: dict[str, Any] = {}
    every = tuple(meshes)
    for change in _LEANER:
        changes = {**changes, **change}
        for shape in every:
            alone = shape[1] == 1
            if "zero" in change and (alone or plan.zero >= change["zero"]):
                continue
            known = _on_mesh(plan, shape)
            kept = _without(known, _OF_ZERO) if "zero" in change or alone else known
            for names in ((), ("degrees", "zero_degree", "schedule", "v", "slices", "pairs")):
                yield fields.write({**_without(kept, names), **(_LEANER[0] if alone else changes)})


def _without(known: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    left = {name: value for name, value in known.items() if name not in names}
    if "schedule" in names:
        left.pop("stages", None)
    return left


def _on_mesh(plan: Plan, shape: Shape) -> dict[str, Any]:
    """What the plan says of other things, beside the mesh."""
    # Micro-batches as large as before need no other functions, and no more memory.
    mb = -(-plan.mb * plan.dp // shape[1])
    known = {**fields.read(plan.full_text), **dict(zip(("pp", "dp", "tp"), shape, strict=True)), "mb": mb}
    if shape[0] != plan.pp:
        known.pop("stages", None)
    return known

"""Plans for fewer ranks, made of the one that a run has: the quick way, when a rank was lost and steps wait."""

from __future__ import annotations

from collections.abc import Iterator
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


def shrunk(plan: Plan, num_ranks: int) -> Iterator[str]:
    """Plans of at most so many ranks, as text, the best guess first: as many ranks as possible; then stages and tensor
    parts as before, because state then stays where it is; then more replicas. Which of them the model, the batch and
    the memory allow is found by trying."""
    for _, known in _on_meshes(plan, num_ranks):
        for names in _RELAXED:
            known = _without(known, names)
            yield fields.write(known)


def leaner(plan: Plan, num_ranks: int) -> Iterator[str]:
    """The same with less to keep, for ranks that lack memory for what `shrunk` gives. Micro-batches stay as large as
    before."""
    changes: dict[str, Any] = {}
    for change in _LEANER:
        changes = {**changes, **change}
        for (_, dp, _), known in _on_meshes(plan, num_ranks):
            if "zero" in change and (dp == 1 or plan.zero >= change["zero"]):
                continue
            kept = _without(known, _OF_ZERO) if "zero" in change or dp == 1 else known
            for names in ((), ("degrees", "zero_degree", "schedule", "v", "slices", "pairs")):
                yield fields.write({**_without(kept, names), **(changes if dp > 1 else _LEANER[0])})


def _without(known: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    left = {name: value for name, value in known.items() if name not in names}
    if "schedule" in names:
        left.pop("stages", None)
    return left


def _on_meshes(plan: Plan, num_ranks: int) -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    """Meshes of at most so many ranks, the best guess first, and what the plan says of other things."""
    meshes = [
        (pp, dp, tp)
        for tp in divisors(plan.tp)
        for pp in range(1, num_ranks // tp + 1)
        for dp in range(1, num_ranks // (tp * pp) + 1)
    ]
    meshes.sort(key=lambda mesh: (-mesh[0] * mesh[1] * mesh[2], mesh[2] != plan.tp, mesh[0] != plan.pp, -mesh[1]))
    given = fields.read(plan.full_text)
    for mesh in meshes:
        # Micro-batches as large as before need no other functions, and no more memory.
        mb = -(-plan.mb * plan.dp // mesh[1])
        known = {**given, **dict(zip(("pp", "dp", "tp"), mesh, strict=True)), "mb": mb}
        if mesh[0] != plan.pp:
            known.pop("stages", None)
        yield mesh, known

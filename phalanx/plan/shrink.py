"""Plans for fewer ranks, made of the one that a run has: the quick way, when a rank was lost and steps wait."""

from __future__ import annotations

from collections.abc import Iterator

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


def shrunk(plan: Plan, num_ranks: int) -> Iterator[str]:
    """Plans of at most so many ranks, as text, the best guess first: as many ranks as possible; then stages and tensor
    parts as before, because state then stays where it is; then more replicas. Which of them the model, the batch and
    the memory allow is found by trying."""
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
        for names in _RELAXED:
            known = {name: value for name, value in known.items() if name not in names}
            if "schedule" in names:
                known.pop("stages", None)
            yield fields.write(known)

"""From what ranks saw in `overlap.py` to figures: pure functions.

All of them are formed within a round, from runs that follow each other within seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compare import TOLERANCE, quartiles
from overlap_cases import BASE
from overlap_rank import KINDS, Seen


def figures(seen: Sequence[Seen], dtype: str) -> dict[str, dict[str, Any]]:
    """By mode. A round takes as long as on its slowest rank."""
    _require_alike(seen[0].losses, TOLERANCE[dtype])
    slowest = {
        name: {kind: [max(times) for times in zip(*(s.seconds[name][kind] for s in seen))] for kind in KINDS}
        for name in seen[0].seconds
    }
    return {
        name: {
            "collectives": seen[0].collectives[name][0], "bytes": seen[0].collectives[name][1],
            **{kind: quartiles(seconds) for kind, seconds in kinds.items()},
            **_of_mode(kinds), "speed_up": _ratios(slowest[BASE]["step"], kinds["step"]),
        }
        for name, kinds in slowest.items()
    }  # fmt: skip


def _of_mode(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """blocking: computation, then communication. ideal: the longer of the two, the other quite hidden."""
    rounds = list(zip(*(seconds[kind] for kind in KINDS), strict=True))
    blocking = [compute + communication for _, compute, communication in rounds]
    ideal = [max(compute, communication) for _, compute, communication in rounds]
    hidden = [(b - step) / (b - i) for (step, _, _), b, i in zip(rounds, blocking, ideal, strict=True)]
    return {
        "ratio": _ratios(seconds["compute"], seconds["communication"]), "blocking": quartiles(blocking),
        "ideal": quartiles(ideal), "share": _ratios(ideal, seconds["step"]), "hidden": quartiles(hidden),
    }  # fmt: skip


def _ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    return quartiles([a / b for a, b in zip(above, below, strict=True)])


def _require_alike(losses: Mapping[str, float], tolerance: float) -> None:
    first = losses[BASE]
    for name, loss in losses.items():
        if not abs(loss - first) <= tolerance * abs(first):
            raise SystemExit(f"{BASE} and {name} do not compute the same: losses {first} and {loss}")

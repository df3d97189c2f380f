"""Invariant 1 on several ranks: every architecture under every kind of plan equals the plain model in float64.

Ranks are real processes that talk through gloo. Every case trains two steps of different shapes with dropout on. The
default run takes every plan with one architecture; the long one all pairs.
"""

from __future__ import annotations

from itertools import cycle

import pytest

from phalanx.launch.crew import Crew
from phalanx.verification.case import Case
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case
from tests.parity.architectures import ARCHITECTURES

PLANS = [
    "pp=2,mb=3,schedule=gpipe",
    "pp=2,mb=3",
    "pp=2,mb=4,schedule=zb-h1",
    "pp=2,mb=3,schedule=interleaved,v=2",
    "pp=2,mb=4,schedule=zb-v",
    "pp=4,mb=4",
    "pp=2,mb=4,schedule=eager-1f1b",
    "dp=2",
    "dp=2,zero=1,mb=2",
    "dp=2,zero=2,mb=2",
    "dp=2,zero=3,mb=2",
    "pp=2,dp=2,zero=1,mb=2",
    "pp=2,dp=2,zero=3,mb=2",
    "pp=2,dp=2,zero=3,mb=2,gather=step,reduce=step",
    "pp=2,dp=2,zero=3,mb=2,schedule=zb-h1,recompute=yes",
    "dp=4,zero=3,zero_degree=2,mb=2",
]


def _cases() -> list[object]:
    """Every pair. All are long but one for each plan, and those of T5, which is slow to capture."""
    quick = set(zip(cycle(name for name in ARCHITECTURES if "t5" not in name), PLANS))
    found: list[object] = []
    for name in ARCHITECTURES:
        for plan in PLANS:
            marks = () if (name, plan) in quick else (pytest.mark.long,)
            found.append(pytest.param(name, plan, marks=marks, id=f"{name}-{plan}"))
    return found


@pytest.mark.parametrize(("name", "plan"), _cases())
def test_a_plan_of_several_ranks_is_exact(name: str, plan: str, plain_process: PlainProcess, crew: Crew) -> None:
    report = verify_case(Case(name, plan, tiny=True, dropout=0.1), plain_process, crew)
    assert report.ok, f"\n{report}"

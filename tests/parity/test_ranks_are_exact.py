"""Invariant 1 on several ranks: every architecture under every kind of plan equals the plain model in float64.

Ranks are real processes that talk through gloo. Every case trains two steps of different shapes with dropout on. The
default run takes each kind of plan with one architecture; the long one all pairs.
"""

from __future__ import annotations

import pytest

from phalanx.launch.worker_pool import WorkerPool
from phalanx.verification.case import Case
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case
from tests.parity import architectures as a

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
    "pp=2,mb=3,recompute=unit",
    "pp=2,mb=4,schedule=zb-v,recompute=light",
    "dp=2,zero=3,mb=2,recompute=unit",
]
# Every schedule and every kind of ZeRO. What is left out is part of another plan here or of one with slices.
QUICK = {
    "pp=2,mb=3,schedule=gpipe": a.GPT2,
    "pp=2,mb=3,schedule=interleaved,v=2": a.LLAMA,
    "pp=2,mb=4,schedule=zb-v": a.GPT2,
    "pp=4,mb=4": a.WHISPER,
    "pp=2,mb=4,schedule=eager-1f1b": a.QWEN3,
    "dp=2": a.GPT2,
    "dp=2,zero=2,mb=2": a.LLAMA,
    "dp=2,zero=3,mb=2": a.PYTHIA,
    "pp=2,dp=2,zero=3,mb=2,gather=step,reduce=step": a.NEO,
    "pp=2,dp=2,zero=3,mb=2,schedule=zb-h1,recompute=yes": a.MISTRAL,
    "dp=4,zero=3,zero_degree=2,mb=2": a.ELECTRA,
}
BY_LAYER = "pp=2,mb=2,recompute=block+light*2+unit"  # of four layers


@pytest.mark.parametrize(("name", "plan"), a.table(a.ARCHITECTURES, PLANS, QUICK))
def test_a_plan_of_several_ranks_is_exact(name: str, plan: str, plain_process: PlainProcess, pool: WorkerPool) -> None:
    report = verify_case(Case(name, plan, tiny=True, dropout=0.1), plain_process, pool)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize("name", a.rows(a.DECODERS, [a.GPT2]))
def test_layers_that_compute_different_things_again_are_exact(
    name: str, plain_process: PlainProcess, pool: WorkerPool
) -> None:
    report = verify_case(Case(name, BY_LAYER, tiny=True, dropout=0.1), plain_process, pool)
    assert report.ok, f"\n{report}"

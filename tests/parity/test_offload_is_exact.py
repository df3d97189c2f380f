"""Invariant 1 with values on the host: whatever moves there and back, every step equals the plain model in float64.

The default run takes each kind of offload with one architecture and one combination; the long one all pairs.
"""

from __future__ import annotations

import pytest

from phalanx.launch.worker_pool import WorkerPool
from phalanx.verification.case import Case
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case
from tests.parity import architectures as a

PLANS = [
    "mb=2,offload=activations",
    "mb=2,recompute=yes,offload=activations",
    "pp=2,mb=3,offload=activations:1",
    "pp=2,mb=4,schedule=zb-h1,offload=activations",
    "pp=2,mb=4,schedule=interleaved,v=2,offload=activations",
    "dp=2,zero=3,mb=2,recompute=unit,offload=activations:2",
    "tp=2,mb=2,overlap=oases,offload=activations",
    "pp=2,tp=2,mb=2,slices=3-2,offload=activations",
    "pp=2,mb=2,slices=3,schedule=gpipe,recompute=light,offload=activations",
    "tp=2,mb=2,overlap=halves,sequence=yes,save=input,offload=activations",
    "mb=2,offload=optimizer",
    "mb=2,offload=optimizer-step:0.5",
    "pp=2,mb=3,offload=optimizer-step",
    "dp=2,zero=1,mb=2,offload=optimizer:0.6",
    "dp=2,zero=2,mb=2,offload=optimizer-step",
    "pp=2,dp=2,zero=3,mb=2,offload=activations+optimizer-step",
    "dp=4,zero=3,zero_degree=2,offload=optimizer",
    "pp=2,tp=2,mb=2,slices=2,offload=activations:1+optimizer",
    "tp=2,dp=2,mb=2,overlap=oases,offload=optimizer-step:0.6",
    "mb=2,offload=parameters",
    "pp=2,mb=3,recompute=block,offload=activations+parameters+optimizer-step",
    "pp=2,dp=2,mb=2,offload=parameters:1+optimizer-step:0.5",
    "dp=2,zero=3,mb=2,recompute=unit,offload=parameters",
    "dp=4,zero=3,zero_degree=2,mb=2,offload=parameters+optimizer-step",
    "tp=2,mb=2,overlap=oases,offload=parameters+optimizer-step",
    "pp=2,tp=2,mb=2,slices=2,offload=parameters:1",
    "mb=3,schedule=block-major,recompute=block,offload=activations+parameters+optimizer-step",
    "pp=2,mb=3,schedule=block-major,offload=parameters",
    "dp=2,zero=3,mb=2,schedule=block-major,slices=2,offload=parameters+optimizer-step",
]
QUICK = {
    "pp=2,tp=2,mb=2,slices=3-2,offload=activations": a.LLAMA,
    "tp=2,mb=2,overlap=oases,offload=activations": a.GPT2,
    "dp=2,zero=1,mb=2,offload=optimizer:0.6": a.LLAMA,
    "pp=2,dp=2,zero=3,mb=2,offload=activations+optimizer-step": a.GPT2,
    "dp=2,zero=3,mb=2,recompute=unit,offload=parameters": a.GPT2,
    "pp=2,mb=3,schedule=block-major,offload=parameters": a.LLAMA,
}


@pytest.mark.parametrize(("name", "plan"), a.table([a.GPT2, a.LLAMA, a.GEMMA3, a.WHISPER], PLANS, QUICK))
def test_a_plan_with_offload_and_dropout_is_exact(
    name: str, plan: str, plain_process: PlainProcess, pool: WorkerPool
) -> None:
    report = verify_case(Case(name, plan, tiny=True, dropout=0.1), plain_process, pool)
    assert report.ok, f"\n{report}"

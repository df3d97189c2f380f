"""Invariant 1 for token slices: every causal model, cut anywhere between its tokens, equals the plain model.

Steps have 24 and 16 tokens, so no slicing below divides both. The default run takes each kind of plan with one
architecture; the long run takes the whole table.
"""

from __future__ import annotations

import pytest

from phalanx.launch.worker_pool import WorkerPool
from phalanx.verification.case import Case
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case
from tests.parity import architectures as a
from tests.parity.architectures import long

PLANS = [
    "pp=2,mb=2,slices=3",
    "pp=2,mb=2,slices=5-3-1",
    "pp=4,mb=2,slices=3",
    "pp=4,mb=2,slices=1-4-2",
    "pp=2,tp=2,mb=2,slices=3-2",
    "pp=2,dp=2,zero=1,mb=2,slices=3-2",
    "pp=2,mb=2,slices=3,recompute=yes",
    "pp=2,mb=2,slices=3,schedule=zb-h1,recompute=unit",
    "pp=2,tp=2,mb=2,slices=3-2,overlap=halves,recompute=light",
    "pp=2,mb=3,slices=3-2-1/1-1,recompute=light",
    "pp=2,mb=2,slices=5-3-1,schedule=gpipe",
    "pp=2,mb=2,slices=4,schedule=zb-h1",
    "pp=4,mb=3,slices=3-2,schedule=eager-1f1b",
    "mb=2,slices=7,recompute=unit",
    "tp=2,mb=2,slices=3,overlap=oases",
    "pp=2,tp=2,mb=2,slices=3-2,sequence=yes,overlap=optim_comm_checkpoint",
    "pp=2,dp=2,zero=3,mb=2,slices=1-2-1,recompute=yes",
]
# The kinds that slices touch: schedules, uneven and differing slicings, tensor parallelism, ZeRO, recomputation, two
# stacks. Slices of two stages alone are those of the padded case below.
QUICK = {
    "pp=2,mb=2,slices=3": a.WHISPER,
    "pp=2,mb=3,slices=3-2-1/1-1,recompute=light": a.LLAMA_70B,
    "pp=2,mb=2,slices=4,schedule=zb-h1": a.QWEN3,
    "mb=2,slices=7,recompute=unit": a.GEMMA2,
    "tp=2,mb=2,slices=3,overlap=oases": a.LLAMA,
    "pp=2,dp=2,zero=3,mb=2,slices=1-2-1,recompute=yes": a.PHI3,
}
CUBE = "pp=2,tp=2,dp=2,zero=1,mb=2,slices=3-2"
SLICED = [*a.DECODERS, *a.TWO_STACKS]


def require_exact(case: Case, process: PlainProcess, pool: WorkerPool) -> None:
    report = verify_case(case, process, pool)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize(("name", "plan"), a.table(SLICED, PLANS, QUICK))
def test_a_plan_with_slices_and_dropout_is_exact(
    name: str, plan: str, plain_process: PlainProcess, pool: WorkerPool
) -> None:
    require_exact(Case(name, plan, tiny=True, dropout=0.1), plain_process, pool)


@pytest.mark.parametrize("name", a.rows(SLICED, [a.GPT2]))
def test_slices_of_padded_sequences_are_exact(name: str, plain_process: PlainProcess, pool: WorkerPool) -> None:
    """Some slices of a short sequence hold nothing but padding."""
    plan = "pp=2,mb=2,slices=5-3-1"
    require_exact(Case(name, plan, tiny=True, dropout=0.1, padding=True), plain_process, pool)


@pytest.mark.parametrize("name", a.rows(a.DECODERS, [a.MISTRAL]))
def test_slices_of_packed_documents_are_exact(name: str, plain_process: PlainProcess, pool: WorkerPool) -> None:
    """Documents end inside slices and go on in the next ones."""
    plan = "pp=2,mb=2,slices=5-3-1/4"
    require_exact(Case(name, plan, tiny=True, dropout=0.1, documents=True), plain_process, pool)


def test_slices_beside_three_kinds_of_parallelism_are_exact(plain_process: PlainProcess, pool: WorkerPool) -> None:
    require_exact(Case(a.LLAMA, CUBE, tiny=True, dropout=0.1, steps=1), plain_process, pool)


@long
@pytest.mark.parametrize("tokens", [31, 13, 17])
def test_lengths_that_no_slice_divides_are_exact(tokens: int, plain_process: PlainProcess, pool: WorkerPool) -> None:
    case = Case(a.GPT2, "pp=2,mb=2,slices=6", tiny=True, dropout=0.1, tokens=tokens)
    require_exact(case, plain_process, pool)


def test_slices_of_one_token_each_are_exact(plain_process: PlainProcess, pool: WorkerPool) -> None:
    case = Case(a.LLAMA, "pp=2,mb=1,slices=8", tiny=True, tokens=12)
    require_exact(case, plain_process, pool)


@pytest.mark.parametrize(
    ("mode", "slices"), [pytest.param("inductor", "5-3-1", marks=long), pytest.param("aot_eager", "5-3-1", marks=long),
                         ("aot_eager", "2")],
)  # fmt: skip
def test_compiled_slices_are_exact(mode: str, slices: str, plain_process: PlainProcess, pool: WorkerPool) -> None:
    case = Case(a.LLAMA, f"pp=2,mb=2,slices={slices}", tiny=True, dropout=0.1, compile=mode, steps=1)
    require_exact(case, plain_process, pool)

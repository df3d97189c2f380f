"""Invariant 1 for token slices: every causal model, cut anywhere between its tokens, equals the plain model.

Steps have 24 and 16 tokens, so no slicing below divides both. The default run takes each architecture under one plan,
such that every plan meets one; the long run takes the whole table.
"""

from __future__ import annotations

import pytest

from phalanx.launch.crew import Crew
from phalanx.model.zoo import zoo_table
from phalanx.verification.case import Case
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case
from tests.parity.architectures import ARCHITECTURES

long = pytest.mark.long
GPT2, LLAMA, MISTRAL, GEMMA = "gpt2-xl", "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1", "google/gemma-2-2b"
WHISPER, T5 = "openai/whisper-small", "google-t5/t5-small"
_TASKS = {name: entry.task for name in ARCHITECTURES if (entry := zoo_table.lookup(name))}
DECODERS = [name for name in ARCHITECTURES if _TASKS[name] == "causal-lm"]
TWO_STACKS = [name for name in ARCHITECTURES if _TASKS[name] in ("speech-to-text", "text-to-text")]

PLANS = [
    "pp=2,mb=2,slices=3",
    "pp=2,mb=2,slices=5-3-1",
    "pp=4,mb=2,slices=3",
    "pp=4,mb=2,slices=1-4-2",
    "pp=2,tp=2,mb=2,slices=3-2",
    "pp=2,dp=2,zero=1,mb=2,slices=3-2",
    "pp=2,mb=2,slices=3,recompute=yes",
    "pp=2,mb=3,slices=3-2-1/1-1",
    "pp=2,mb=2,slices=5-3-1,schedule=gpipe",
    "pp=2,mb=2,slices=4,schedule=zb-h1",
    "pp=4,mb=3,slices=3-2,schedule=eager-1f1b",
    "mb=2,slices=7",
    "tp=2,mb=2,slices=3,overlap=oases",
    "pp=2,tp=2,mb=2,slices=3-2,sequence=yes,overlap=optim_comm_checkpoint",
    "pp=2,dp=2,zero=3,mb=2,slices=1-2-1,recompute=yes",
]
BY_DEFAULT = {WHISPER: 5, T5: None, "google/flan-t5-base": None}  # the one plan of a row; T5 is slow to capture


def _table() -> list[object]:
    """Every pair; those that one diagonal through the table, once over all plans, leaves out are long."""
    found: list[object] = []
    for row, name in enumerate([*DECODERS, *TWO_STACKS]):
        chosen = BY_DEFAULT.get(name, row if row < len(PLANS) else None)
        for column, plan in enumerate(PLANS):
            marks = () if column == chosen else (long,)
            found.append(pytest.param(name, plan, marks=marks, id=f"{name}-{plan}"))
    return found


def _rows(names: list[str], chosen: set[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in chosen else (long,)) for name in names]


def require_exact(case: Case, process: PlainProcess, crew: Crew) -> None:
    report = verify_case(case, process, crew)
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize(("name", "plan"), _table())
def test_a_plan_with_slices_and_dropout_is_exact(name: str, plan: str, plain_process: PlainProcess, crew: Crew) -> None:
    require_exact(Case(name, plan, tiny=True, dropout=0.1), plain_process, crew)


@pytest.mark.parametrize("name", _rows([*DECODERS, *TWO_STACKS], {MISTRAL}))
def test_slices_of_padded_sequences_are_exact(name: str, plain_process: PlainProcess, crew: Crew) -> None:
    """Some slices of a short sequence hold nothing but padding."""
    plan = "pp=2,mb=2,slices=5-3-1"
    require_exact(Case(name, plan, tiny=True, dropout=0.1, padding=True), plain_process, crew)


@pytest.mark.parametrize("name", _rows(DECODERS, {GEMMA}))
def test_slices_of_packed_documents_are_exact(name: str, plain_process: PlainProcess, crew: Crew) -> None:
    """Documents end inside slices and go on in the next ones."""
    plan = "pp=2,mb=2,slices=5-3-1/4"
    require_exact(Case(name, plan, tiny=True, dropout=0.1, documents=True), plain_process, crew)


@pytest.mark.parametrize("tokens", [pytest.param(31, marks=long), 13, pytest.param(17, marks=long)])
def test_lengths_that_no_slice_divides_are_exact(tokens: int, plain_process: PlainProcess, crew: Crew) -> None:
    case = Case(GPT2, "pp=2,mb=2,slices=6", tiny=True, dropout=0.1, tokens=tokens)
    require_exact(case, plain_process, crew)


def test_slices_of_one_token_each_are_exact(plain_process: PlainProcess, crew: Crew) -> None:
    case = Case(LLAMA, "pp=2,mb=1,slices=8", tiny=True, tokens=12)
    require_exact(case, plain_process, crew)


@pytest.mark.parametrize("mode", [pytest.param("inductor", marks=long), "aot_eager"])
def test_compiled_slices_are_exact(mode: str, plain_process: PlainProcess, crew: Crew) -> None:
    case = Case(LLAMA, "pp=2,mb=2,slices=5-3-1", tiny=True, dropout=0.1, compile=mode)
    require_exact(case, plain_process, crew)

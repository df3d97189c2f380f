"""Invariant 1 for token slices: every causal model, cut anywhere between its tokens, equals the plain model.

Steps have 24 and 16 tokens, so no slicing below divides both. The default run takes each plan but the slowest with one
architecture; the long run takes the whole table.
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
GPT2, LLAMA, MISTRAL = "gpt2-xl", "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.1"
WHISPER = "openai/whisper-small"
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
SLOW = {  # others have the same in another mixture
    "pp=2,mb=2,slices=3", "pp=4,mb=2,slices=3", "pp=4,mb=2,slices=1-4-2", "pp=2,dp=2,zero=1,mb=2,slices=3-2",
    "pp=2,tp=2,mb=2,slices=3-2,sequence=yes,overlap=optim_comm_checkpoint",
}  # fmt: skip


def _table() -> list[object]:
    """Every pair. All are long but one for each plan that is not slow, and one with two stacks."""
    fused = [name for name in DECODERS if "gpt-" not in name]  # GPT-J and GPT-Neo weigh by hand, which takes longer
    quick = dict(zip(fused, (plan for plan in PLANS if plan not in SLOW)))
    quick[WHISPER] = "pp=2,dp=2,zero=1,mb=2,slices=3-2"
    found: list[object] = []
    for name in [*DECODERS, *TWO_STACKS]:
        for plan in PLANS:
            marks = () if quick.get(name) == plan else (long,)
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


@pytest.mark.parametrize("name", _rows([*DECODERS, *TWO_STACKS], {GPT2}))
def test_slices_of_padded_sequences_are_exact(name: str, plain_process: PlainProcess, crew: Crew) -> None:
    """Some slices of a short sequence hold nothing but padding."""
    plan = "pp=2,mb=2,slices=5-3-1"
    require_exact(Case(name, plan, tiny=True, dropout=0.1, padding=True), plain_process, crew)


@pytest.mark.parametrize("name", _rows(DECODERS, {MISTRAL}))
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


@pytest.mark.parametrize(
    ("mode", "slices"), [pytest.param("inductor", "5-3-1", marks=long), pytest.param("aot_eager", "5-3-1", marks=long),
                         ("aot_eager", "2")],
)  # fmt: skip
def test_compiled_slices_are_exact(mode: str, slices: str, plain_process: PlainProcess, crew: Crew) -> None:
    case = Case(LLAMA, f"pp=2,mb=2,slices={slices}", tiny=True, dropout=0.1, compile=mode)
    require_exact(case, plain_process, crew)

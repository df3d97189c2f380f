"""Invariant 1 for every architecture of the zoo: what Phalanx computes equals the plain HuggingFace model in float64.

Each case trains two steps with two different batch shapes from one capture. Three cases per architecture cover
dropout on and off, padding, packed documents, micro-batches, all schedules and what is computed again between them. The
default run takes a few for each; `test_quick_selection.py` holds that no architecture is left out by all tables.
"""

from __future__ import annotations

import pytest

from phalanx.model.zoo import zoo_table
from phalanx.verification.case import Case
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.verify import verify_case
from tests.parity.architectures import (
    ARCHITECTURES,
    BERT,
    DECODERS,
    DEEPSEEK,
    FLAN_T5,
    GPT2,
    GPTJ,
    LLAMA,
    MIXTRAL,
    QWEN3_MOE,
    T5,
    TAKES_PADDING,
    WHISPER,
    rows,
)

QUICK_DROPOUT, QUICK_PADDED, QUICK_PACKED = (GPT2, FLAN_T5), (BERT, WHISPER), (DEEPSEEK,)
QUICK_UNITS, QUICK_COMPILED = (T5,), (QWEN3_MOE,)


def require_exact(case: Case, process: PlainProcess) -> None:
    report = verify_case(case, process)
    assert report.ok, f"\n{report}"


def test_every_architecture_of_the_zoo_is_covered() -> None:
    known = {entry.model_type for name in zoo_table.names() if (entry := zoo_table.lookup(name))}
    covered = {entry.model_type for name in ARCHITECTURES if (entry := zoo_table.lookup(name))}
    assert known == covered


@pytest.mark.parametrize("name", rows(ARCHITECTURES, QUICK_DROPOUT))
def test_training_with_dropout_and_separate_weight_gradients_is_exact(name: str, plain_process: PlainProcess) -> None:
    require_exact(Case(name, "mb=2,schedule=zb-h1", tiny=True, dropout=0.1), plain_process)


@pytest.mark.parametrize("name", rows(TAKES_PADDING, QUICK_PADDED))
def test_training_on_padded_samples_without_dropout_is_exact(name: str, plain_process: PlainProcess) -> None:
    require_exact(
        Case(name, "mb=3,schedule=gpipe,recompute=light", tiny=True, dropout=0.0, padding=True), plain_process
    )


@pytest.mark.parametrize("name", rows(DECODERS, QUICK_PACKED))
def test_training_on_packed_documents_with_recomputation_is_exact(name: str, plain_process: PlainProcess) -> None:
    require_exact(Case(name, "recompute=unit", tiny=True, dropout=0.1, documents=True), plain_process)


@pytest.mark.parametrize("name", rows([GPT2, LLAMA, WHISPER, QWEN3_MOE], QUICK_COMPILED))
def test_compiled_functions_are_exact(name: str, plain_process: PlainProcess) -> None:
    require_exact(Case(name, "mb=2", tiny=True, dropout=0.1, compile="aot_eager", steps=1), plain_process)


@pytest.mark.parametrize("name", rows(ARCHITECTURES, [LLAMA]))
def test_compiled_functions_that_compute_again_are_exact(name: str, plain_process: PlainProcess) -> None:
    case = Case(name, "mb=2,recompute=light", tiny=True, dropout=0.1, compile="aot_eager", steps=1)
    require_exact(case, plain_process)


@pytest.mark.parametrize("name", rows([*(n for n in ARCHITECTURES if n not in DECODERS), GPTJ, MIXTRAL], QUICK_UNITS))
def test_units_that_are_computed_again_are_exact(name: str, plain_process: PlainProcess) -> None:
    """Layers that attend twice, see later tokens, attend beside the feed-forward or route tokens to experts."""
    require_exact(Case(name, "mb=2,schedule=zb-h1,recompute=unit", tiny=True, dropout=0.1), plain_process)

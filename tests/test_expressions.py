"""Expressions over the dims of a batch: exact, arithmetic only, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.expressions import evaluate

SIZES = st.integers(1, 10**6)


@given(SIZES, SIZES)
def test_polynomials_are_evaluated_exactly_however_large(batch: int, tokens: int) -> None:
    expression = "16384*batch*tokens**2 + 301989888*batch*tokens - 7"
    expected = 16384 * batch * tokens**2 + 301989888 * batch * tokens - 7
    assert evaluate(expression, {"batch": batch, "tokens": tokens}) == expected


@given(SIZES)
def test_a_division_never_goes_through_floating_point(tokens: int) -> None:
    odd = 2 * (tokens * 10**15) + 2
    assert evaluate("size/2", {"size": odd}) == odd // 2


@given(SIZES)
def test_what_sympy_writes_for_integer_functions_is_understood(tokens: int) -> None:
    dims = {"tokens": tokens}
    assert evaluate("FloorDiv(tokens + 1, 2)", dims) == (tokens + 1) // 2
    assert evaluate("((tokens + 1)//2)", dims) == (tokens + 1) // 2
    assert evaluate("floor(tokens/3)", dims) == tokens // 3
    assert evaluate("Min(tokens, 4096) + Max(1, tokens)", dims) == min(tokens, 4096) + tokens
    assert evaluate("Mod(tokens, 7) + PythonMod(tokens, 5)", dims) == tokens % 7 + tokens % 5


@pytest.mark.parametrize("text", ["tokens.__class__", "[tokens]", "(lambda: 1)()", "tokens if tokens else 1"])
def test_nothing_but_arithmetic_is_run(text: str) -> None:
    with pytest.raises(AssertionError, match="not an arithmetic expression"):
        evaluate(text, {"tokens": 1})


@pytest.mark.parametrize(
    ("condition", "holds"), [("batch > 4", [0, 1]), ("Eq(Mod(batch, 2), 1)", [1, 0]), ("Ne((batch//5), 1)", [1, 0])]
)
def test_a_condition_is_one_where_it_holds(condition: str, holds: list[int]) -> None:
    assert [evaluate(condition, {"batch": batch}) for batch in (3, 6)] == holds


def test_a_function_that_is_not_arithmetic_is_unknown() -> None:
    with pytest.raises(NameError):
        evaluate("print(tokens)", {"tokens": 1})


def test_evaluating_imports_no_torch() -> None:
    code = (
        "import sys; from phalanx.expressions import evaluate;"
        "assert evaluate('2*batch', {'batch': 3}) == 6;"
        "assert not {'torch', 'sympy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""Polynomials through measured numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.expressions import Fit, evaluate

COEFFICIENTS = st.integers(-(10**12), 10**12)
DIMS = [("batch",), ("batch", "tokens"), ("batch", "source", "tokens")]


def _values(fit: Fit, expression: str) -> list[int]:
    return [evaluate(expression, point) for point in fit.points]


@given(st.lists(COEFFICIENTS, min_size=6, max_size=6), st.integers(1, 64), st.integers(1, 10**5))
def test_a_polynomial_of_batch_and_tokens_is_found_from_its_values(
    coefficients: list[int], batch: int, tokens: int
) -> None:
    terms = ["1", "tokens", "tokens**2", "batch", "batch*tokens", "batch*tokens**2"]
    text = " + ".join(f"({c})*{term}" for c, term in zip(coefficients, terms, strict=True))
    fit = Fit(("batch", "tokens"))
    found = fit.polynomial(_values(fit, text))
    assert found is not None
    dims = {"batch": batch, "tokens": tokens}
    assert evaluate(found, dims) == evaluate(text, dims)


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        (("batch",), "37*batch + 5"),
        (("batch", "tokens"), "batch*tokens**2 - 3*batch*tokens - tokens"),
        (("batch", "source", "tokens"), "16*batch*source*tokens + batch*source + 4*source**2 + 8"),
        (("batch", "tokens"), "-tokens**2 + 5"),
        (("batch", "tokens"), "0"),
        (("batch", "tokens"), "8192"),
    ],
)
def test_the_text_is_the_polynomial_as_one_would_write_it(dims: tuple[str, ...], text: str) -> None:
    fit = Fit(dims)
    assert fit.polynomial(_values(fit, text)) == text


@pytest.mark.parametrize("dims", DIMS)
def test_there_is_one_point_for_each_coefficient_and_one_to_check(dims: tuple[str, ...]) -> None:
    points = Fit(dims).points
    assert len(points) == {1: 2, 2: 6, 3: 12}[len(dims)] + 1
    assert len({tuple(point.items()) for point in points}) == len(points)
    assert all(size > 1 for point in points for size in point.values())


@pytest.mark.parametrize(
    "text",
    ["FloorDiv(tokens + 1, 2)", "batch*tokens**3", "batch**2*tokens", "Min(tokens, 20)", "FloorDiv(tokens + 15, 16)"],
)
def test_what_is_no_such_polynomial_is_refused(text: str) -> None:
    fit = Fit(("batch", "tokens"))
    assert fit.polynomial(_values(fit, text)) is None


def test_one_wrong_value_is_found_out() -> None:
    fit = Fit(("batch", "tokens"))
    values = _values(fit, "12*batch*tokens")
    for place in range(len(values)):
        wrong = [value + (i == place) for i, value in enumerate(values)]
        assert fit.polynomial(wrong) is None


@pytest.mark.parametrize("text", ["((tokens + 1)//2)", "7*batch*tokens**2 + 12*batch*((tokens + 7)//8) + 3*batch"])
@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_lengths_of_equal_parts_of_a_dim_may_be_in_it(text: str, tokens: int) -> None:
    degree = 2 if "//2" in text else 8
    fit = Fit(("batch", "tokens"), parts=[("tokens", degree), ("source", degree)])
    assert fit.polynomial(_values(fit, text)) == text
    assert Fit(("batch", "tokens")).polynomial(_values(Fit(("batch", "tokens")), text)) is None
    assert evaluate(text, {"batch": 1, "tokens": tokens}) >= -(-tokens // degree)


def test_samples_that_are_divided_make_fractions_of_a_batch() -> None:
    fit = Fit(("batch", "tokens"), multiple=4)
    assert all(point["batch"] % 4 == 0 for point in fit.points)
    found = fit.polynomial(_values(fit, "3*(batch//2) + 8*(batch//4)*tokens"))
    assert found == "2*batch*tokens + 3*batch/2"


def test_slices_are_shorter_than_what_they_are_cut_from() -> None:
    fit = Fit(("batch", "tokens", "whole_tokens"), parts=[("tokens", 2), ("tokens", 4)])
    assert all(point["tokens"] < point["whole_tokens"] for point in fit.points)
    assert fit.polynomial(_values(fit, "batch*tokens*whole_tokens + 5")) == "batch*tokens*whole_tokens + 5"


def test_the_largest_of_several_is_written_with_those_that_can_be() -> None:
    fit = Fit(("batch", "tokens"))
    texts = ["4*batch*tokens + 100", "4*batch*tokens", "9*batch*tokens", "3*batch*tokens + 100", "0"]
    found = fit.largest([_values(fit, text) for text in texts])
    assert found == "Max(9*batch*tokens, 4*batch*tokens + 100)"
    assert evaluate(found, {"batch": 1, "tokens": 1}) == 104
    assert fit.largest([_values(fit, "7*batch"), _values(fit, "batch")]) == "7*batch"
    assert fit.largest([]) == "0" and fit.largest([_values(fit, "batch**3")]) is None


def test_a_polynomial_can_be_divided() -> None:
    fit = Fit(("batch", "tokens"))
    assert fit.scaled(_values(fit, "1999*batch*tokens + batch"), 1000) == "2*batch*tokens"

"""Two sides compared: what counts as equal, what does not, and what is left out."""

from __future__ import annotations

import pytest
import torch

from phalanx.verification.case import Step
from phalanx.verification.verify import Fact, Report, Row, compare


def step(loss: float = 1.0, **changed: torch.Tensor) -> Step:
    gradients = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64), "b": torch.tensor([0.5], dtype=torch.float64)}
    parameters = {name: gradient * 3 for name, gradient in gradients.items()}
    for name, value in changed.items():
        kind, _, tensor = name.partition("_")
        {"gradient": gradients, "parameter": parameters}[kind][tensor] = value
    return Step(loss, gradients, parameters)


def worst(ours: Step, plain: Step, quantity: str) -> Row:
    return next(row for row in compare([ours], [plain]) if row.quantity == quantity)


def report(rows: list[Row], *facts: Fact) -> Report:
    return Report("model", "", "float64", 1e-9, tuple(rows), facts, 0.1)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_equal_sides_have_no_error() -> None:
    rows = compare([step(), step()], [step(), step()])
    assert [row.error for row in rows] == [0.0] * 6
    assert report(rows).ok


def test_a_wrong_gradient_is_named_with_its_relative_error() -> None:
    row = worst(step(gradient_w=double(1.0, -2.002)), step(), "gradient")
    assert (row.tensor, row.step) == ("w", 1)
    assert row.error == pytest.approx(1e-3)
    assert "gradient 'w' is off by 1.00e-03" in report([row]).failures[0]


def test_nan_is_the_worst_error_there_is() -> None:
    assert worst(step(gradient_b=double(float("nan"))), step(), "gradient").error == float("inf")
    assert worst(step(loss=float("nan")), step(), "loss").error == float("inf")


def test_a_gradient_that_one_side_lacks_counts_as_zero() -> None:
    ours = step()
    del ours.gradients["w"]
    row = worst(ours, step(), "gradient")
    assert (row.tensor, row.error) == ("w", 1.0)


def test_a_gradient_that_is_zero_in_theory_is_compared_absolutely() -> None:
    noise = double(3e-17)
    assert worst(step(gradient_b=-noise), step(gradient_b=noise), "gradient").error < 1e-15


def test_a_parameter_of_another_shape_or_missing_fails() -> None:
    assert worst(step(parameter_w=double(1.0)), step(), "parameter").error == float("inf")
    ours = step()
    del ours.parameters["b"]
    assert worst(ours, step(), "parameter").tensor == "b"


def test_elements_with_noise_for_a_gradient_are_left_out_and_counted_but_exact_zeros_are_compared() -> None:
    plain = step(gradient_w=double(1e-16, -2.0), parameter_w=double(3.0, -6.0))
    row = worst(step(gradient_w=double(1e-16, -2.0), parameter_w=double(9.0, -6.0)), plain, "parameter")
    assert (row.error, row.left_out) == (0.0, 1)
    plain = step(gradient_w=double(0.0, -2.0), parameter_w=double(3.0, -6.0))
    row = worst(step(gradient_w=double(0.0, -2.0), parameter_w=double(9.0, -6.0)), plain, "parameter")
    assert (row.error, row.left_out) == (1.0, 0)


def test_a_plan_that_was_not_executed_fails_even_when_the_numbers_agree() -> None:
    rows = compare([step()], [step()])
    found = report(rows, Fact("instructions", {"F": 4}, {"F": 2}))
    assert not found.ok
    assert found.failures == ["instructions: the plan implies {'F': 4}, measured {'F': 2}"]
    assert "NOT EQUAL" in str(found)


def test_the_report_reads_as_text_and_as_data() -> None:
    found = report(compare([step()], [step()]), Fact("parameter bytes", 24, 24))
    assert "exact" in str(found) and "parameter bytes" in str(found)
    assert found.to_dict()["ok"] is True

"""Two sides compared: what counts as equal, what does not, and what rounding excuses."""

from __future__ import annotations

import pytest
import torch

from phalanx.plan.plan import Plan
from phalanx.state.layout import Box
from phalanx.verification.case import Copy, Execution, Noise, Part, Plain, Step, Training
from phalanx.verification.compare import SAFETY, Row, compare
from phalanx.verification.verify import Fact, Report

NOISE = Noise(0.0, {"w": 1e-16, "b": 1e-16}, num_terms=100)
TRAINING = Training()


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def step(loss: float = 1.0, **changed: torch.Tensor) -> Step:
    gradients = {"w": double(1.0, -2.0), "b": double(0.5)}
    parameters = {name: gradient * 3 for name, gradient in gradients.items()}
    for name, value in changed.items():
        kind, _, tensor = name.partition("_")
        {"gradient": gradients, "parameter": parameters}[kind][tensor] = value
    return Step([loss], gradients, parameters)


def plain_side(last: Step, noise: Noise = NOISE) -> Plain:
    return Plain(last.parameters, [last], [noise], {"exp_avg/w": double(0.1, 0.2)}, {"table": double(7.0, 8.0)})


def plan_side(last: Step, copies: list[Copy] | None = None) -> Execution:
    return Execution(Plan(), last.parameters, [last], copies_of(last) if copies is None else copies, {}, {})


def copy(rank: int, quantity: str, name: str, tensor: torch.Tensor) -> Copy:
    return Copy(rank, quantity, Part(name, (Box.whole(tuple(tensor.shape)),), tensor.reshape(-1)))


def copies_of(last: Step, rank: int = 0) -> list[Copy]:
    """All that a rank without partners holds."""
    parameters = [copy(rank, "copy", name, tensor) for name, tensor in last.parameters.items()]
    state = copy(rank, "optimizer", "exp_avg/w", double(0.1, 0.2))
    return [*parameters, state, copy(rank, "buffer", "table", double(7.0, 8.0))]


def rows(ours: Execution, plain: Plain) -> dict[str, Row]:
    return {row.quantity: row for row in compare(ours, plain, 1e-9, TRAINING)}


def worst(ours: Step, plain: Step, quantity: str, noise: Noise = NOISE) -> Row:
    return rows(plan_side(ours), plain_side(plain, noise))[quantity]


def report(found: list[Row], *facts: Fact, **more: tuple[str, ...]) -> Report:
    return Report("model", "", "float64", 1e-9, tuple(found), facts, 0.1, **more)


def test_equal_sides_have_no_error() -> None:
    found = rows(plan_side(step()), plain_side(step()))
    assert list(found) == ["initial", "loss", "gradient", "parameter", "copy", "optimizer", "buffer"]
    assert [row.error for row in found.values()] == [0.0] * 7
    assert report(list(found.values())).ok


def test_a_wrong_gradient_is_named_with_its_relative_error() -> None:
    row = worst(step(gradient_w=double(1.0, -2.002)), step(), "gradient")
    assert (row.tensor, row.step) == ("w", 1)
    assert row.error == pytest.approx(1e-3)
    assert "gradient 'w' is off by 1.00e-03" in report([row]).failures[0]


def test_nan_is_the_worst_error_there_is() -> None:
    assert worst(step(gradient_b=double(float("nan"))), step(), "gradient").error == float("inf")
    assert worst(step(loss=float("nan")), step(), "loss").error == float("inf")


def test_ranks_that_disagree_on_the_loss_are_named() -> None:
    ours = step()
    ours.losses = [1.0, 1.0, 1.5]
    row = worst(ours, step(), "loss")
    assert (row.rank, row.error) == (2, 0.5)
    assert "loss 'loss' on rank 2 is off by 5.00e-01" in report([row]).failures[0]


def test_zeros_are_compared_with_zeros() -> None:
    zeros = step(parameter_b=double(0.0))
    assert worst(zeros, zeros, "initial").error == 0.0
    assert worst(step(parameter_b=double(1e-3)), zeros, "initial").tensor == "b"


def test_a_gradient_that_one_side_lacks_counts_as_zero() -> None:
    ours = step()
    del ours.gradients["w"]
    row = worst(ours, step(), "gradient")
    assert (row.tensor, row.error) == ("w", 1.0)
    row = worst(step(), ours, "gradient", Noise(0.0, {"b": 1e-16}, 100))
    assert row.tensor == "w" and row.error > 1


def test_a_gradient_as_small_as_its_noise_is_compared_with_what_rounding_can_do() -> None:
    """2 is the model's largest gradient: adding 100 terms of that size leaves at most 100 roundings of it."""
    noise = Noise(0.0, {"w": 1e-16, "b": 2e-17}, num_terms=100)
    bound = 100 * 2.0**-53 * 2
    plain = step(gradient_b=double(3e-17))
    assert worst(step(gradient_b=double(-0.9 * bound)), plain, "gradient", noise).error <= 1e-9
    row = worst(step(gradient_b=double(-1.1 * bound)), plain, "gradient", noise)
    assert row.tensor == "b" and row.error > 1e-9


def test_a_small_gradient_that_is_not_noise_is_compared_with_itself() -> None:
    noise = Noise(0.0, {"w": 1e-16, "b": 1e-28}, num_terms=100)
    plain = step(gradient_b=double(3e-17))
    row = worst(step(gradient_b=double(3e-17 * (1 + 1e-6))), plain, "gradient", noise)
    assert (row.tensor, row.error) == ("b", pytest.approx(1e-6, rel=1e-3))


def test_an_element_of_a_gradient_may_be_off_by_its_tensors_noise() -> None:
    noise = Noise(0.0, {"w": 1e-8, "b": 0.0}, num_terms=100)
    assert worst(step(gradient_w=double(1.0 + SAFETY * 0.9e-8, -2.0)), step(), "gradient", noise).error <= 1e-9
    assert worst(step(gradient_w=double(1.0 + SAFETY * 1.1e-8, -2.0)), step(), "gradient", noise).error > 1e-9


def test_a_parameter_of_another_shape_or_missing_fails() -> None:
    assert worst(step(parameter_w=double(1.0)), step(), "parameter").error == float("inf")
    ours = step()
    del ours.parameters["b"]
    assert worst(ours, step(), "parameter").tensor == "b"


def test_rounding_moves_a_parameter_only_where_its_gradient_is_noise_and_not_where_it_is_zero() -> None:
    noise = Noise(0.0, {"w": 1e-8, "b": 0.0}, num_terms=100)
    reach = 2 * TRAINING.lr / TRAINING.eps * SAFETY * 1e-8

    def error(gradient: float, off: float) -> float:
        plain = step(gradient_w=double(gradient, -2.0), parameter_w=double(3.0, -6.0))
        ours = step(gradient_w=double(gradient, -2.0), parameter_w=double(3.0 + off, -6.0))
        return worst(ours, plain, "parameter", noise).error

    assert error(1e-9, 0.9 * reach) <= 1e-9 < error(1e-9, 1.1 * reach)
    assert error(0.0, 0.9 * reach) == pytest.approx(0.9 * reach / 6)
    assert error(1.0, 0.9 * reach) == pytest.approx(0.9 * reach / 6)


def test_initial_values_are_compared() -> None:
    ours, plain = plan_side(step()), plain_side(step())
    ours.initial = {name: value * 1.5 for name, value in ours.initial.items()}
    row = rows(ours, plain)["initial"]
    assert (row.step, row.error) == (0, 0.5)
    assert "step 0: initial 'w' is off by 5.00e-01" in report([row]).failures[0]


@pytest.mark.parametrize(
    ("quantity", "name", "wrong"),
    [("copy", "w", double(3.0, -6.6)), ("optimizer", "exp_avg/w", double(0.1, 0.22)),
     ("buffer", "table", double(7.0, 8.8))],
)  # fmt: skip
def test_a_copy_that_differs_is_named_with_its_rank(quantity: str, name: str, wrong: torch.Tensor) -> None:
    copies = [*copies_of(step()), *copies_of(step(), rank=1), copy(2, quantity, name, wrong)]
    row = rows(plan_side(step(), copies), plain_side(step()))[quantity]
    assert (row.tensor, row.rank, row.error) == (name, 2, pytest.approx(0.1))
    assert f"{quantity} '{name}' on rank 2 is off by 1.00e-01" in report([row]).failures[0]


@pytest.mark.parametrize("quantity", ["copy", "optimizer", "buffer"])
def test_what_no_rank_holds_fails(quantity: str) -> None:
    copies = [each for each in copies_of(step()) if each.quantity != quantity]
    row = rows(plan_side(step(), copies), plain_side(step()))[quantity]
    assert (row.error, row.rank) == (float("inf"), None)


def test_a_plan_that_was_not_executed_fails_even_when_the_numbers_agree() -> None:
    found = report(list(rows(plan_side(step()), plain_side(step())).values()), Fact("instructions", {"F": 4}, {"F": 2}))
    assert not found.ok
    assert found.failures == ["instructions: the plan implies {'F': 4}, measured {'F': 2}"]
    assert "NOT EQUAL" in str(found)


def test_the_report_reads_as_text_and_as_data() -> None:
    all_rows = list(rows(plan_side(step()), plain_side(step())).values())
    found = report(all_rows, Fact("parameter bytes", 24, 24), notes=("layerdrop = 0.1 is 0",))
    said = str(found)
    assert "exact" in said and "parameter bytes" in said and "note: layerdrop = 0.1 is 0" in said
    assert "copy       worst relative error 0.00e+00  step 1  in " in said and "(2 copies)" in said
    assert found.to_dict()["ok"] is True

"""The slice profile finds the numbers behind noisy times, says how well, and where slices stop getting cheaper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.planning.slice_search import ModelledTimes
from phalanx.profile.slice_fit import Fit, Measurement, fit, grid, measure, planned_by_depth

DEVICE = ModelledTimes(start=1e-3, per_token=40e-6, per_pair=5e-9, smallest=200)


def seconds(device: ModelledTimes, tokens: int, past: int) -> float:
    return float(device.seconds(np.array([tokens], float), np.array([past], float))[0])


def measured(device: ModelledTimes, tokens: int = 4096, noise: float = 0.0, seed: int = 0) -> Fit:
    random = np.random.default_rng(seed)
    return fit(measure(lambda n, past: seconds(device, n, past) * (1 + noise * random.standard_normal()), tokens))


@given(
    st.floats(0, 5e-3), st.floats(1e-6, 1e-4), st.floats(1e-10, 1e-7), st.integers(8, 1024), st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_noisy_times_of_any_device_are_fitted_to_about_their_noise(
    start: float, per_token: float, per_pair: float, smallest: int, seed: int
) -> None:
    device = ModelledTimes(start, per_token, per_pair, smallest)
    found = measured(device, noise=0.02, seed=seed)
    assert found.error < 0.02
    for tokens, past in [(8, 0), (300, 1000), (1000, 3000), (4096, 0)]:
        assert seconds(found.times, tokens, past) == pytest.approx(seconds(device, tokens, past), rel=0.06)


def test_exact_times_give_the_numbers_back() -> None:
    found = measured(DEVICE)
    assert found.error < 1e-6 and abs(found.worst_error) < 1e-6
    assert found.times.start == pytest.approx(DEVICE.start)
    assert found.times.per_token == pytest.approx(DEVICE.per_token)
    assert found.times.per_pair == pytest.approx(DEVICE.per_pair)
    assert found.smallest == 200


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_efficient_slice_is_found_through_noise(seed: int) -> None:
    assert measured(DEVICE, noise=0.02, seed=seed).smallest == pytest.approx(200, rel=0.2)


def test_where_every_shorter_slice_is_cheaper_the_shortest_that_was_measured_is_efficient() -> None:
    found = measured(ModelledTimes(0, 40e-6, 5e-9, 1))
    assert found.smallest == 8 and found.error < 1e-6


def test_where_no_shorter_slice_is_cheaper_only_the_longest_is_efficient() -> None:
    found = fit([Measurement(n, past, 1e-3) for n, past in grid(256)])
    assert found.smallest == 256 and found.error < 1e-9
    assert planned_by_depth(found.times.table(256, 8), [16], 8)[16].lengths == (256,)


def test_times_that_fall_with_the_past_are_not_believed() -> None:
    found = fit([Measurement(n, past, 1e-4 * n * (1 - past / 10_000)) for n, past in grid(512)])
    assert found.times.per_pair == 0 and found.error > 0


def test_the_farthest_measurement_is_named() -> None:
    points = [Measurement(n, past, seconds(DEVICE, n, past)) for n, past in grid(4096)]
    odd = next(i for i, point in enumerate(points) if point.tokens == 512 and point.past > 0)
    points[odd] = Measurement(points[odd].tokens, points[odd].past, 2 * points[odd].seconds)
    found = fit(points)
    assert found.worst == points[odd] and found.worst_error == pytest.approx(-0.5, abs=0.05)


def test_a_single_slow_run_does_not_count() -> None:
    calls = iter(range(10**6))
    slow = len(grid(256)) * 2 + 3  # in the second round after the warm-up

    def run(tokens: int, past: int) -> float:
        return 100.0 if next(calls) == slow else seconds(DEVICE, tokens, past)

    assert all(m.seconds == seconds(DEVICE, m.tokens, m.past) for m in measure(run, 256, repeats=3))


def test_the_first_round_warms_up() -> None:
    calls = iter(range(10**6))
    found = measure(lambda tokens, past: 100.0 if next(calls) < len(grid(256)) else 1.0, 256, repeats=1)
    assert {m.seconds for m in found} == {1.0} and next(calls) == 2 * len(grid(256))


@given(st.integers(32, 100_000))
def test_measured_slices_lie_within_the_sequence_and_reach_its_ends(tokens: int) -> None:
    points = grid(tokens)
    assert len(set(points)) == len(points)
    assert all(n >= 8 and past >= 0 and n + past <= tokens for n, past in points)
    assert (8, 0) in points and (8, tokens - 8) in points and (tokens, 0) in points


def test_a_sequence_too_short_to_measure_is_refused_with_the_shortest_that_is_not() -> None:
    with pytest.raises(PlanError, match="a sequence of 31 tokens is too short") as error:
        grid(31)
    assert "use sequences of 32 tokens or more" in str(error.value)


def test_the_best_slice_shrinks_with_the_depth_until_it_is_the_smallest_efficient_one() -> None:
    """The published claim, that it does not depend on the depth, holds for deep pipelines only."""
    planned = planned_by_depth(DEVICE.table(2048, 8), [2, 8, 32, 128, 512, 2048], 8)
    numbers = [len(slicing.lengths) for slicing in planned.values()]
    assert numbers == sorted(numbers) and numbers[0] < numbers[2]
    assert numbers[-1] == numbers[-2]
    assert planned[2048].slowest == pytest.approx(DEVICE.least_seconds, rel=0.02)

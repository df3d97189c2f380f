"""The slice planner finds the best slicing, and the best micro-batches with it, whatever slices take."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.planning.slice_search import (
    ModelledTimes,
    Part,
    Times,
    plan_batch,
    plan_slices,
    slice_seconds,
    step_seconds,
)

MODEL = ModelledTimes(start=2e-3, per_token=45e-6, per_pair=1e-9, smallest=160)


def compositions(total: int, sizes: frozenset[int] | None = None) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write a number as a sum."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        if sizes is None or first in sizes:
            yield from ((first, *rest) for rest in compositions(total - first, sizes))


def least_by_trying(times: dict[int, Times], num_samples: int, num_stages: int) -> float:
    """Over all micro-batches and, for each of them, all slicings."""

    def slicings(parts: tuple[int, ...]) -> Iterator[tuple[float, ...]]:
        if not parts:
            yield ()
            return
        for rest in slicings(parts[1:]):
            for grains in compositions(times[parts[0]].shape[1]):
                yield (*slice_seconds(times[parts[0]], grains), *rest)

    sizes = {tuple(sorted(parts)) for parts in compositions(num_samples, frozenset(times))}
    allowed = (s for parts in sizes for s in slicings(parts) if max(s) < np.inf)
    return min((step_seconds(s, num_stages) for s in allowed), default=np.inf)


@st.composite
def tables(draw: st.DrawFn, num_grains: int) -> Times:
    """Times without any order, some of them equal, some not allowed."""
    value = st.one_of(st.integers(1, 9).map(float), st.floats(0.1, 10), st.just(np.inf))
    row = st.lists(value, min_size=num_grains, max_size=num_grains)
    return np.array(draw(st.lists(row, min_size=num_grains + 1, max_size=num_grains + 1)))


@given(st.integers(1, 7).flatmap(tables), st.integers(1, 60))
def test_no_slicing_is_better_than_the_planned_one(times: Times, num_stages: int) -> None:
    best = least_by_trying({1: times}, 1, num_stages)
    if best == np.inf:
        with pytest.raises(PlanError, match="no such cut has only slices that are allowed"):
            plan_slices(times, num_stages)
        return
    planned = plan_slices(times, num_stages)
    assert planned.seconds == pytest.approx(best, rel=1e-9)
    own = slice_seconds(times, planned.lengths)
    assert sum(planned.lengths) == times.shape[1] and planned.slowest == max(own)
    assert planned.seconds == step_seconds(own, num_stages)


@given(tables(3), tables(3), st.integers(1, 5), st.integers(1, 20))
def test_no_micro_batches_are_better_than_the_planned_ones(
    one: Times, two: Times, num_samples: int, num_stages: int
) -> None:
    best = least_by_trying({1: one, 2: two}, num_samples, num_stages)
    if best == np.inf:
        return
    planned = plan_batch({1: one, 2: two}, num_samples, num_stages)
    assert planned.seconds == pytest.approx(best, rel=1e-9)
    assert sum(part.num_samples for part in planned.parts) == num_samples
    assert all(sum(part.lengths) == 3 for part in planned.parts)


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(1, 100))
def test_at_hundreds_of_grains_no_neighbour_of_the_planned_slicing_is_better(seed: int, num_stages: int) -> None:
    noise = 1 + 0.1 * np.random.default_rng(seed).random((129, 128))
    times = MODEL.table(1024, 8) * noise
    planned = plan_slices(times, num_stages)
    cuts = np.cumsum((0, *planned.lengths)).tolist()
    moved = [[*cuts[:i], cuts[i] + by, *cuts[i + 1 :]] for i in range(1, len(cuts) - 1) for by in (-1, 1)]
    merged = [cuts[:i] + cuts[i + 1 :] for i in range(1, len(cuts) - 1)]
    for other in [*moved, *merged]:
        if all(a < b for a, b in pairwise(other)):
            own = slice_seconds(times, [b - a for a, b in pairwise(other)])
            assert step_seconds(own, num_stages) >= planned.seconds * (1 - 1e-9)


@pytest.mark.parametrize(("tokens", "grain", "num_stages"), [(2048, 8, 48), (32768, 64, 48), (32768, 64, 4)])
def test_long_sequences_at_a_fine_grain_are_planned_better_than_uniformly(
    tokens: int, grain: int, num_stages: int
) -> None:
    times = MODEL.table(tokens, grain)
    planned = plan_slices(times, num_stages, grain)
    assert sum(planned.lengths) == tokens and not any(n % grain for n in planned.lengths)
    for num_slices in (1, 4, 8, 16, 32, 64, 128):
        grains = [tokens // grain // num_slices] * num_slices
        assert planned.seconds <= step_seconds(slice_seconds(times, grains), num_stages)


def test_without_a_pipeline_a_sequence_stays_whole() -> None:
    assert plan_slices(MODEL.table(2048, 8), num_stages=1, grain=8).lengths == (2048,)


def test_later_slices_are_shorter_because_they_have_more_past() -> None:
    lengths = plan_slices(ModelledTimes(0, 1e-5, 1e-7, 32).table(2048, 8), num_stages=24, grain=8).lengths
    assert len(lengths) > 2 and lengths[0] > lengths[-1]


@pytest.mark.parametrize("num_stages", [24, 384, 100_000])
def test_however_deep_the_pipeline_slices_do_not_get_shorter_than_the_smallest_efficient_one(num_stages: int) -> None:
    lengths = plan_slices(ModelledTimes(0, 45e-6, 0, 160).table(1600, 8), num_stages, grain=8).lengths
    assert min(lengths) >= 160


def test_many_micro_batches_fill_the_pipeline_without_slices() -> None:
    times = {1: MODEL.table(512, 64)}
    assert len(plan_batch(times, 1, num_stages=4, grain=64).parts[0].lengths) > 1
    assert set(plan_batch(times, 64, num_stages=4, grain=64).parts) == {Part(1, (512,))}


def test_samples_share_a_slice_where_one_alone_would_be_too_small() -> None:
    short = {size: ModelledTimes(0, size * 1e-5, 0, 256 / size).table(128, 64) for size in (1, 2, 4)}
    planned = plan_batch(short, 6, num_stages=4, grain=64)
    assert all(part.num_samples >= 2 for part in planned.parts) and sum(p.num_samples for p in planned.parts) == 6
    assert planned.seconds == pytest.approx((3 + 3) * 256e-5)


def test_a_modelled_slice_takes_at_least_what_the_smallest_efficient_one_takes() -> None:
    tokens, past = np.array([1.0, 159.0, 160.0, 320.0]), np.zeros(4)
    seconds = MODEL.seconds(tokens, past)
    assert seconds[0] == seconds[1] == pytest.approx(seconds[2]) == pytest.approx(MODEL.least_seconds)
    assert seconds[3] == pytest.approx(2e-3 + 320 * 45e-6 + 1e-9 * 320 * 160)
    assert MODEL.seconds(tokens, past + 1e6)[1] > seconds[1]


def test_a_table_allows_only_slices_that_end_within_the_sequence() -> None:
    times = MODEL.table(64, 16)
    assert times.shape == (5, 4)
    assert np.isfinite(times[1:]).tolist() == [[n + past <= 4 for past in range(4)] for n in range(1, 5)]


def test_a_grain_that_does_not_divide_the_sequence_is_refused_with_what_would() -> None:
    with pytest.raises(PlanError, match="100 tokens are not a multiple of the grain of 64 tokens") as error:
        MODEL.table(100, 64)
    assert "a grain that divides 100, or 64 tokens" in str(error.value)


def test_samples_that_no_micro_batches_add_up_to_are_refused_with_the_sizes() -> None:
    with pytest.raises(
        PlanError, match="3 samples of 64 tokens cannot be cut into micro-batches of 2, 4 samples"
    ) as error:
        plan_batch({2: MODEL.table(64, 16), 4: MODEL.table(64, 16)}, 3, num_stages=2, grain=16)
    assert "a multiple of 16 tokens" in str(error.value) and "other sizes of a micro-batch" in str(error.value)

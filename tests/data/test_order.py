"""The order of samples: a permutation per epoch, and a pure function of (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.order import Order, keys, mix

SEEDS = st.integers(0, 2**63 - 1)


@given(seed=SEEDS, num_samples=st.integers(1, 700), epoch=st.integers(0, 2**31))
def test_every_epoch_visits_every_sample_exactly_once(seed, num_samples, epoch):
    visited = Order(seed, num_samples).indices(epoch * num_samples, num_samples)
    assert sorted(visited.tolist()) == list(range(num_samples))


@given(seed=SEEDS, num_samples=st.integers(1, 10**12), first=st.integers(0, 2**40), count=st.integers(1, 50))
def test_a_range_is_the_same_as_its_positions_one_by_one(seed, num_samples, first, count):
    order = Order(seed, num_samples)
    together = order.indices(first, count)
    assert together.dtype == np.int64
    assert together.tolist() == [Order(seed, num_samples).index(first + i) for i in range(count)]
    assert ((together >= 0) & (together < num_samples)).all()


def test_epochs_and_seeds_have_different_orders():
    order = Order(0, 1000)
    first, second = order.indices(0, 1000), order.indices(1000, 1000)
    assert (first == second).sum() < 20
    assert (first == Order(1, 1000).indices(0, 1000)).sum() < 20
    assert (first == np.arange(1000)).sum() < 20


def test_shuffled_neighbours_are_far_apart():
    steps = np.abs(np.diff(Order(3, 100_000).indices(0, 100_000)))
    # A uniformly random permutation has a mean step of a third of the range.
    assert abs(steps.mean() / 100_000 - 1 / 3) < 0.01


@pytest.mark.heavy
def test_each_place_gets_each_sample_about_equally_often():
    counts = np.zeros((5, 5))
    for seed in range(2000):
        counts[np.arange(5), Order(seed, 5).indices(0, 5)] += 1
    assert (np.abs(counts - 400) < 100).all()


def test_without_shuffling_samples_come_in_their_own_order():
    assert Order(9, 4, shuffle=False).indices(2, 7).tolist() == [2, 3, 0, 1, 2, 3, 0]


def test_resuming_late_costs_no_more_than_starting():
    assert 0 <= Order(1, 10**15).index(7 * 10**17) < 10**15


@given(seed=SEEDS, position=st.integers(0, 2**62))
def test_keys_fit_a_generator_and_depend_on_both_numbers(seed, position):
    (key,) = keys(seed, [position])
    assert 0 <= key < 2**63
    assert key != keys(seed, [position + 1])[0]
    assert key != keys(seed + 1, [position])[0]


def test_mixing_is_the_same_everywhere():
    assert mix(1, 2, 3).tolist() == mix([1], np.asarray([2]), 3).tolist()
    assert mix(1, [2, 3]).tolist() == [mix(1, 2).item(), mix(1, 3).item()]

"""The balance of stages, against all ways there are to cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.complete import balance


def sums(costs: list[int], counts: tuple[int, ...]) -> list[int]:
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    return [sum(costs[start:end]) for start, end in pairwise(ends)]


def every_cut(num_blocks: int, num_stages: int) -> list[tuple[int, ...]]:
    inner = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(end - start for start, end in pairwise((0, *cuts, num_blocks))) for cuts in inner]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    costs = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any))
    return costs, draw(st.integers(1, len(costs)))


@given(problems())
def test_no_way_to_cut_has_a_smaller_largest_stage_nor_is_more_even_or_lighter_in_front(
    problem: tuple[list[int], int],
) -> None:
    costs, num_stages = problem

    def rank(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        totals = sums(costs, counts)
        return max(totals), sum(total * total for total in totals), counts

    assert balance(costs, num_stages) == min(every_cut(len(costs), num_stages), key=rank)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.data())
def test_every_block_is_in_one_stage_and_no_stage_is_empty(costs: list[float], data: st.DataObject) -> None:
    counts = balance(costs, data.draw(st.integers(1, len(costs))))
    assert sum(counts) == len(costs) and min(counts) >= 1


def test_cost_counts_and_not_the_number_of_blocks() -> None:
    assert balance([1, 1, 1, 1, 4], 2) == (4, 1)


def test_equal_blocks_are_spread_evenly_with_fewer_in_front() -> None:
    assert balance([1.0] * 10, 4) == (2, 2, 3, 3)


def test_blocks_without_any_cost_are_balanced_by_number() -> None:
    assert balance([0.0] * 6, 3) == (2, 2, 2)


def test_more_stages_than_blocks_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError) as refused:
        balance([1, 2, 3], 4)
    assert refused.value.message == "plan: 4 stages need at least as many blocks, and the model has 3"
    assert refused.value.hint == "use fewer stages: pp × v of 3 or less"

"""Which plan, batch size and sample length hold at which step, and which samples a step sees."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.complete import usable_ranks
from phalanx.plan.periods import Period, Periods


def test_what_changes_at_different_steps_makes_periods() -> None:
    found = Periods.of("pp=2", 8, None, ["5:dp=2"], ["3:4", "5:16"], ["4:32"])
    assert found == (
        Period(1, 0, "pp=2", 8, None), Period(3, 16, "pp=2", 4, None), Period(4, 20, "pp=2", 4, 32),
        Period(5, 24, "dp=2", 16, 32),
    )  # fmt: skip
    assert [found.at(step).step for step in (1, 2, 3, 4, 5, 99)] == [1, 1, 3, 4, 5, 5]


@given(st.dictionaries(st.integers(2, 30), st.integers(1, 50)), st.integers(1, 50))
def test_steps_see_every_sample_once_in_order(sizes: dict[int, int], first: int) -> None:
    found = Periods.of("", first, None, (), [f"{step}:{size}" for step, size in sizes.items()], ())
    begins = [found.at(step).sample_at(step) for step in range(1, 42)]
    assert begins[0] == 0
    for step, (begin, end) in enumerate(pairwise(begins), start=1):
        assert end - begin == found.at(step).batch_size
        assert found.num_steps(end) == step and found.num_steps(end - 0.5) == step


@pytest.mark.parametrize(
    ("plan", "ranks"), [("", 4), ("pp=2", 4), ("pp=3", 3), ("dp=3,zero=1", 3), ("pp=2,dp=1", 2), ("tp=2", 4)]
)
def test_a_plan_uses_as_many_ranks_as_it_can(plan: str, ranks: int) -> None:
    assert usable_ranks(plan, 4) == ranks


def test_a_plan_for_more_ranks_than_there_are_is_refused() -> None:
    with pytest.raises(PlanError, match="plan: pp=3,dp=2 needs 6 ranks, and there are 4"):
        usable_ranks("pp=3,dp=2", 4)

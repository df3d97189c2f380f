"""A slice report says what was measured, what two layers change, and what would be planned for each depth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.plan import Plan
from phalanx.planning.slice_search import ModelledTimes
from phalanx.profile.slice_fit import DEPTHS, Depth, Run, depths_of, report

LAYER = ModelledTimes(start=1e-4, per_token=4e-5, per_pair=2e-8, smallest=40)


def runs(times: ModelledTimes, layers: int = 1) -> Run:
    return lambda tokens, past: layers * float(times.seconds(np.array([tokens], float), np.array([past], float))[0])


def test_equal_layers_of_a_stage_have_the_same_smallest_efficient_slice() -> None:
    found = report(runs(LAYER), runs(LAYER, 2), 1024, 4)
    assert found.fit_of_two is not None
    assert found.fit.smallest == found.fit_of_two.smallest == 40
    assert found.fit_of_two.times.per_token == pytest.approx(2 * found.fit.times.per_token)


def test_a_part_that_each_stage_pays_once_makes_the_smallest_efficient_slice_depend_on_the_depth() -> None:
    once = 5e-3
    two = lambda tokens, past: max(once, runs(LAYER, 2)(tokens, past))  # noqa: E731
    found = report(lambda tokens, past: max(once, runs(LAYER)(tokens, past)), two, 1024, 4)
    assert found.fit_of_two is not None and found.fit_of_two.smallest < 0.7 * found.fit.smallest


def test_the_number_of_stages_that_was_asked_for_is_among_the_depths() -> None:
    found = report(runs(LAYER), None, 256, 3)
    assert [depth.stages for depth in found.depths] == sorted({*DEPTHS, 3})
    assert found.depth(3).stages == 3 and found.fit_of_two is None


@given(st.integers(32, 5000), st.floats(0, 1e-2), st.integers(1, 100))
def test_what_is_planned_is_a_plan_that_is_never_slower_than_no_slices(tokens: int, start: float, stages: int) -> None:
    (depth,) = depths_of(replace(LAYER, start=start), tokens, [stages])
    assert depth.speed_up >= 1 - 1e-9
    if depth.text:
        bounds = Plan.parse(f"pp=1,{depth.text}").slice_bounds(0, tokens)
        assert len(bounds) == len(depth.lengths) + 1 and bounds[-1] == tokens


def test_deeper_pipelines_gain_more() -> None:
    gains = [depth.speed_up for depth in depths_of(LAYER, 2048, DEPTHS)]
    assert gains == sorted(gains) and gains[0] > 1


def test_slices_that_do_not_help_are_not_written() -> None:
    assert Depth(2, (64,), 1.0).text == "" and Depth(2, (32, 16), 1.2).text == "slices=32-16"

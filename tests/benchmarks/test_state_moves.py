"""The benchmark of planned moves: its layouts are whole, and its table says what was planned."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import state_moves

from phalanx.params.layout_of import StateLayout
from phalanx.plan.plan import Plan
from tests.state.layouts import check_layout


def test_the_layouts_that_are_planned_with_hold_every_element_once() -> None:
    plan = state_moves.staged(Plan.parse("pp=2,dp=2,tp=2,zero=3"))
    check_layout(StateLayout(plan, state_moves.decoder(2)).all_state())


def test_a_change_is_counted_and_timed() -> None:
    result = state_moves.measure("dp=2", "pp=2", repeats=1)
    assert (result["ranks"], result["tensors"], result["shards"], result["moves"]) == (2, 1000, 3000, 1000)
    assert state_moves.row(result)[:6] == ["2", "dp=2", "pp=2", "1,000", "3,000", "1,000"]

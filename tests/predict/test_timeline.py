"""Timelines: their sums, that they read back from JSON, and what is said about a file that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.predict.timeline import Event, Timeline, compare
from phalanx.program.instructions import Op, from_text


def event(rank: int, text: str, start: float, end: float, resource: str = "compute") -> Event:
    (instruction,) = from_text(text)
    return Event(rank, instruction, start, end, resource)


STEP = Timeline(
    (
        event(0, "F0.0/0", 10, 12),
        event(0, "SF0.0>1", 12, 13, "0→1 F"),
        event(0, "STEP", 18, 20),
        event(1, "RF1.0<0", 12, 13, "0→1 F"),
        event(1, "F1.0/1", 13, 18),
    ),
    memory=({"parameters": 5, "activations": 2}, {"parameters": 6}),
)


def test_the_bubble_is_the_share_of_the_step_in_which_nothing_is_computed():
    assert STEP.makespan == 10
    assert (STEP.busy(0), STEP.busy(1)) == (4, 5)
    assert (STEP.bubble(0), STEP.bubble(1), STEP.mean_bubble) == pytest.approx((0.6, 0.5, 0.55))


def test_an_empty_timeline_has_no_bubble():
    empty = Timeline(())
    assert (empty.makespan, empty.mean_bubble, empty.ranks) == (0, 0, ())


def test_the_peak_is_the_sum_of_what_is_held_and_unknown_without_a_record():
    assert [STEP.peak_memory(rank) for rank in (0, 1)] == [7, 6]
    assert Timeline(STEP.events).peak_memory(0) is None


INSTRUCTIONS = from_text("I.0 F0.0/1 BW0.1/2 W1.2/3 SF0.0>1 RB0.1<1 G0.0/2 R0.0/2 T/9 NORM STEP P/3 COUNT")
EVENTS = st.builds(
    Event, st.integers(0, 7), st.sampled_from(INSTRUCTIONS), st.floats(0, 1e6), st.floats(0, 1e6),
    st.sampled_from(["compute", "0→1 F", "ranks 0,1"]),
)  # fmt: skip


HELD = st.dictionaries(st.text(), st.integers(0, 2**60))


@given(st.lists(EVENTS, max_size=9), st.lists(HELD, min_size=8, max_size=8) | st.just([]))
def test_a_timeline_reads_back_from_its_json(events: list[Event], memory: list[dict[str, int]]):
    timeline = Timeline(tuple(events), tuple(memory))
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("F0.0", "Expecting value"),
        ("[]", "list indices"),
        ('{"format": "other"}', "its format is 'other'"),
        ('{"events": []}', "KeyError: 'format'"),
        (Timeline(STEP.events, ({"parameters": 1},)).to_json(), "its memory ends at rank 0"),
        (STEP.to_json().replace("F0.0/0", "Q0"), "'Q0' is not an instruction"),
        (STEP.to_json().replace("F0.0/0", "F0.0 F0.1"), "too many values"),
        (STEP.to_json().replace(", 12.0", "").replace(", 12", ""), "not enough values"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_timeline_is_refused_with_the_reason(text: str, reason: str):
    with pytest.raises(PlanError) as error:
        Timeline.from_json(text)
    assert error.value.message.startswith("not a timeline: ") and reason in error.value.message
    assert "a run writes one that begins with 'phalanx timeline 2'" in error.value.hint


def test_a_comparison_has_the_mean_of_each_kind_the_step_and_the_bubble():
    slow = Timeline((event(0, "F0.0/0", 0, 1), event(0, "F0.1/0", 1, 6), event(0, "NORM", 6, 8, "ranks 0")))
    result = compare(STEP, slow)
    assert list(result.kinds) == [Op.F, Op.SEND_F, Op.RECV_F, Op.NORM, Op.STEP]
    assert (result.kinds[Op.F].predicted, result.kinds[Op.F].measured) == (3.5, 3)
    assert result.kinds[Op.F].error == pytest.approx(1 / 6)
    assert result.kinds[Op.NORM].predicted is None and result.kinds[Op.NORM].error is None
    assert result.kinds[Op.STEP].measured is None and result.kinds[Op.STEP].error is None
    assert (result.makespan.predicted, result.makespan.measured, result.makespan.error) == (10, 8, 0.25)
    assert (result.bubble.predicted, result.bubble.measured) == pytest.approx((0.55, 0.25))

"""The status board that ranks write and the supervisor reads."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.launch.abort import AbortEvent, heartbeat
from phalanx.launch.status_board import SILENCE_ALLOWED, SilenceWatch, StatusBoard


def test_what_one_process_writes_another_reads(tmp_path: Path):
    ours, theirs = StatusBoard.create(tmp_path / "board", 3), StatusBoard.open(tmp_path / "board", 3)
    slot = theirs.slots[1]
    slot.set_place("stage 1")
    slot.enter("step")
    slot.at_step(12)
    slot.at("F1.3")
    view = ours.slots[1].read()
    assert (view.phase, view.step, view.place, view.instruction) == ("step", 12, "stage 1", "F1.3")
    assert view.where() == "in step 12 at F1.3"
    assert ours.slots[0].read().place == ours.slots[2].read().place == ""


def test_a_new_phase_forgets_the_instruction_and_a_reset_everything():
    board = StatusBoard.private(1)
    board.slots[0].enter("step")
    board.slots[0].at("F1.3")
    board.slots[0].enter("save")
    assert board.slots[0].read().where() == "during save"
    board.slots[0].set_place("stage 1")
    board.abort()
    board.reset()
    assert board.slots[0].read().place == "" and board.slots[0].read().where() == "during start"
    assert not board.aborted


@given(st.text(alphabet=st.characters(codec="ascii", exclude_characters="\0")))
def test_any_instruction_leaves_the_neighbours_alone(text: str):
    board = StatusBoard.private(3)
    board.reset()
    before = (board.slots[0].read(), board.slots[2].read())
    board.slots[1].at(text)
    assert board.slots[1].read().instruction == text[:128]
    assert (board.slots[0].read(), board.slots[2].read()) == before


def test_writing_the_instruction_costs_at_most_two_microseconds():
    slot = StatusBoard.private(1).slots[0]

    def cost() -> float:
        began = time.perf_counter()
        for _ in range(2000):
            slot.at("F1.3/12")
        return (time.perf_counter() - began) / 2000

    assert min(cost() for _ in range(20)) < 2e-6


def test_silence_is_reported_only_beyond_what_the_phase_allows(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    board = StatusBoard.private(1)
    board.reset()
    slot, watch = board.slots[0], SilenceWatch()
    for phase, allowed in SILENCE_ALLOWED.items():
        slot.enter(phase)
        slot.beat()
        assert watch.silent_for(slot.read()) is None
        now += allowed - 0.1
        assert watch.silent_for(slot.read()) is None
        now += 0.2
        assert watch.silent_for(slot.read()) == pytest.approx(allowed + 0.1)


def test_a_stopped_process_gets_no_more_time_in_any_phase(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    board = StatusBoard.private(1)
    board.reset()
    board.slots[0].enter("compile")
    watch = SilenceWatch()
    assert watch.silent_for(board.slots[0].read(), stopped=True) is None
    now += 5.1
    assert watch.silent_for(board.slots[0].read(), stopped=True) is not None
    assert watch.silent_for(board.slots[0].read(), stopped=False) is None


def test_the_heartbeat_moves_the_counter_and_rings_when_the_job_is_over():
    board, abort = StatusBoard.private(1), AbortEvent()
    board.reset()
    first = board.slots[0].read().beat
    with heartbeat(board, board.slots[0], abort):
        assert not abort.wait(0.6)
        assert board.slots[0].read().beat > first
        board.abort()
        assert abort.wait(5.0) and abort.reason == "another rank failed"


def test_the_abort_event_calls_each_listener_once_even_one_that_comes_late():
    abort, calls = AbortEvent(), []
    abort.listen(lambda: calls.append("early"))
    abort.set("smoke")
    abort.set("fire")
    abort.listen(lambda: calls.append("late"))
    assert calls == ["early", "late"] and abort.reason == "smoke"

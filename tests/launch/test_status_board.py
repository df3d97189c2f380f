"""The status board that ranks write and the supervisor reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import LinkError
from phalanx.launch.abort import AbortEvent, StackFile, heartbeat, read_stack
from phalanx.launch.handles import Handle
from phalanx.launch.membership import Generation, Membership
from phalanx.launch.rank_main import Failed
from phalanx.launch.status_board import (
    LONG_SILENCE,
    NUM_RECENT,
    PHASES,
    RunningClock,
    SilenceWatch,
    StatusBoard,
    StatusView,
    shown,
)
from phalanx.launch.trouble import Trouble, _rank_error


def test_what_one_process_writes_another_reads(tmp_path: Path):
    ours, theirs = StatusBoard.create(tmp_path / "board", 3), StatusBoard.open(tmp_path / "board")
    slot = theirs.slots[1]
    slot.set_place("stage 1")
    slot.enter("step")
    slot.at_step(12)
    slot.at("F1.3")
    view = ours.slots[1].read()
    assert (view.phase, view.step, view.place, view.instruction) == ("step", 12, "stage 1", "F1.3")
    assert view.where() == "in step 12 at F1.3"
    assert ours.slots[0].read().place == ours.slots[2].read().place == ""


def test_the_newest_instructions_are_remembered_in_order_and_forgotten_with_the_job():
    board = StatusBoard.private(2)
    slot = board.slots[1]
    for number in range(60):
        slot.at(f"F1.{number}")
    slot.enter("save")
    recent = slot.read().recent
    assert recent == tuple(f"F1.{number}" for number in range(60 - NUM_RECENT, 60))
    assert board.slots[0].read().recent == (), "each rank has its own"
    board.reset()
    assert slot.read().recent == ()
    slot.at("F2.0")
    assert slot.read().recent == ("F2.0",)


def test_a_failure_report_has_the_last_instructions_of_every_rank():
    views = {
        rank: StatusView(1, 7, "step", f"stage {rank}", "F1.0", tuple(f"F{rank}.{n}" for n in range(20)))
        for rank in range(20)
    }
    for trouble in (
        Trouble(1, views[1], "was killed by signal SIGKILL"),
        Trouble(1, views[1], failed=Failed(LinkError("rank 1 waits for rank 0"), "late", "")),
    ):
        lines = str(_rank_error(trouble, views)).splitlines()
        assert "    rank 0, step 7: F0.12 F0.13 F0.14 F0.15 F0.16 F0.17 F0.18 F0.19" in lines
        assert "    … and 4 other ranks" in lines
    del views[19], views[18], views[17]
    assert str(_rank_error(Trouble(1, views[1], "left"), views)).endswith("    … and 1 other rank")
    own = Trouble(1, views[1], failed=Failed(None, "ValueError: x", ""))
    assert "last instructions" not in str(_rank_error(own, views)), "an error of a rank's own speaks for itself"


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


def test_writing_an_instruction_does_next_to_nothing():
    """What it takes is measured by benchmarks/dispatch.py; writing a text made before calls one function of C."""
    slot, called = StatusBoard.private(1).slots[0], list[str]()
    text, short = shown("F1.3/12")

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            called.append(argument.__name__)
        elif event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(watch)
    slot.show(text, short)
    sys.setprofile(None)
    assert called == ["show", "pack_into", "setprofile"]
    assert slot.read().instruction == "F1.3/12"


class Looks:
    """Time that passes for one who looks at a rank five times a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, phase: str, silence: float) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        board = StatusBoard.private(1)
        board.reset()
        self.slot = board.slots[0]
        self.slot.enter(phase)
        self._watch = SilenceWatch(RunningClock(), silence)
        assert self.once() is None

    def once(self, suspect: float | None = None) -> float | None:
        return self._watch.silent_for(self.slot.read(), suspect=suspect)

    def until_silent(self, suspect: float | None = None) -> float:
        """Seconds until the rank counts as lost."""
        began = self.now
        while (seconds := self.once(suspect)) is None:
            self.now += 0.2
            assert self.now - began < 1000
        assert seconds == pytest.approx(self.now - began)
        return self.now - began


@pytest.mark.parametrize("silence", [3.0, 90.0])
@pytest.mark.parametrize("phase", PHASES)
def test_silence_is_reported_only_beyond_what_the_phase_allows(
    phase: str, silence: float, monkeypatch: pytest.MonkeyPatch
):
    allowed = silence if phase in ("step", "evaluate") else max(silence, LONG_SILENCE)
    assert Looks(monkeypatch, phase, silence).until_silent() == pytest.approx(allowed, abs=0.3)


def test_a_suspect_gets_no_more_time_in_any_phase(monkeypatch: pytest.MonkeyPatch):
    assert Looks(monkeypatch, "compile", 20.0).until_silent(suspect=5.0) == pytest.approx(5.0, abs=0.3)


def test_time_in_which_nobody_could_look_is_not_silence(monkeypatch: pytest.MonkeyPatch):
    looks = Looks(monkeypatch, "step", silence=5.0)
    looks.now += 3600  # the one who looks was stopped, and the rank with it
    assert looks.once() is None
    looks.slot.beat()
    assert looks.until_silent() == pytest.approx(5.0, abs=0.3)


def test_where_signs_of_life_take_long_so_does_silence(monkeypatch: pytest.MonkeyPatch):
    looks = Looks(monkeypatch, "step", silence=15.0)
    for _ in range(100):  # each look takes 9 s on a slow link, and every second one brings no news
        looks.now += 9
        assert looks.once() is None
        looks.now += 9
        looks.slot.beat()
        assert looks.once() is None


def test_a_rank_whose_heart_stops_leaves_where_it_stands(tmp_path: Path):
    file = StackFile(tmp_path / "stack", 0.2)
    file.beat()
    assert read_stack(tmp_path / "stack") == []
    time.sleep(0.5)
    assert any(
        "test_a_rank_whose_heart_stops_leaves_where_it_stands" in line for line in read_stack(tmp_path / "stack")
    )
    file.beat()
    assert read_stack(tmp_path / "stack") == []
    file.close()
    time.sleep(0.3)
    assert read_stack(tmp_path / "stack") == [] and read_stack(tmp_path / "none") == []


def test_the_heartbeat_moves_the_counter_and_rings_when_the_job_is_over(tmp_path: Path):
    board = StatusBoard.private(1)
    board.reset()
    membership = Membership(board, board.slots[0], 0, Generation(0, (0,)), {})
    first, abort = board.slots[0].read().beat, membership.abort
    with heartbeat(board.slots[0], membership.look, StackFile(tmp_path / "stack", 60.0)):
        assert not abort.wait(0.6)
        assert board.slots[0].read().beat > first
        board.abort()
        assert abort.wait(5.0) and abort.reason == "another rank failed"


@pytest.mark.parametrize(
    ("places", "members", "expected"),
    [
        ({}, (0, 1, 2), 3),
        ({0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}, (0, 1, 2, 3), 2),
        ({0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}, (0, 2, 3), 1),
    ],
    ids=["one machine", "two machines", "a rank less"],
)  # fmt: skip
def test_a_process_knows_how_many_ranks_share_its_machine(
    places: dict[int, tuple[int, int]], members: tuple[int, ...], expected: int
):
    board = StatusBoard.private(4)
    board.reset()
    membership = Membership(board, board.slots[0], 0, Generation(0, members), places)
    assert membership.local_world == expected


def test_a_generation_that_the_store_has_not_is_not_waited_for(tmp_path: Path):
    """It was published in a store that was lost; the next is in the new one."""
    board, texts = StatusBoard.private(1), dict[str, str]()
    membership = Membership(board, board.slots[0], 0, Generation(0, (0,)), {})
    own = SimpleNamespace(check=lambda keys: set(keys) <= texts.keys(), get=texts.__getitem__)
    store: Any = SimpleNamespace(reached_at=lambda address: own)
    board.publish(1)
    assert membership.follow(store, 0.05) is None
    texts["generation/2"] = Generation(2, (0,)).to_json()
    board.publish(2)
    assert membership.follow(store, 5.0) is own and membership.generation.number == 2


def test_where_the_system_refuses_handles_of_processes_their_numbers_do(monkeypatch: pytest.MonkeyPatch):
    def refused(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    process = subprocess.Popen(["sleep", "60"])
    handle = Handle(process.pid)
    assert not handle.gone
    handle.send(signal.SIGKILL)
    process.wait(10)
    assert handle.gone


def test_the_abort_event_calls_each_listener_once_even_one_that_comes_late():
    abort, calls = AbortEvent(), []
    abort.listen(lambda: calls.append("early"))
    abort.set("smoke")
    abort.set("fire")
    abort.listen(lambda: calls.append("late"))
    assert calls == ["early", "late"] and abort.reason == "smoke"

"""Whom the others wait for when nobody goes on is found, and who is only slow is not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from phalanx.launch.laggards import Laggards
from phalanx.launch.status_board import StatusBoard
from phalanx.launch.stillness import Activity, activity_with_children
from tests.launch.test_stillness import Clock

ASLEEP = Activity(5.0, True)


class Ranks:
    """Three ranks in step 7, of which 1 and 2 wait; here it is said how long has passed."""

    def __init__(self, look: Callable[[float], Activity | None] = lambda now: ASLEEP) -> None:
        self.board, self.clock = StatusBoard.private(3), Clock()
        laggards = Laggards(self.clock, 5.0, lambda pid: look(self.clock.now))  # pyright: ignore[reportArgumentType]
        self.look = lambda: laggards.found({rank: (slot, 100 + rank) for rank, slot in enumerate(self.board.slots)})
        for rank, slot in enumerate(self.board.slots):
            slot.enter("step")
            slot.at_step(7)
            slot.wait(rank > 0)

    def found_after(self, seconds: float) -> dict[int, float]:
        """While nothing happens."""
        found = self.look()
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 0.2
            found = self.look()
        return found


def test_a_rank_that_sleeps_while_all_others_wait_is_found_after_a_silence() -> None:
    ranks = Ranks()
    assert not ranks.found_after(4.8) and ranks.board.slots[0].is_asked
    assert list(ranks.found_after(0.4)) == [0]


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda now: Activity(now, True), id="it or its children compute"),
        pytest.param(lambda now: Activity(5.0, True, main_sleeps=not 3.9 < now < 4.1), id="it waited for a disk"),
        pytest.param(lambda now: None, id="the system does not tell"),
    ],
)
def test_one_that_may_be_busy_has_four_times_as_long(look: Callable[[float], Activity | None]) -> None:
    ranks = Ranks(look)
    assert not ranks.found_after(19.8)
    assert list(ranks.found_after(0.4)) == [0]


def test_one_that_has_taken_long_before_has_ten_times_that() -> None:
    ranks = Ranks()
    ranks.found_after(3.0)
    ranks.board.slots[0].at("F0.0")
    assert not ranks.found_after(29.0)
    assert list(ranks.found_after(2.0)) == [0]


def _nobody_waits(ranks: Ranks) -> None:
    for slot in ranks.board.slots:
        slot.wait(False)


def _all_wait(ranks: Ranks) -> None:
    ranks.board.slots[0].wait(True)


@pytest.mark.parametrize("change", [
    _nobody_waits, _all_wait, lambda ranks: ranks.board.slots[0].enter("save"),
    lambda ranks: ranks.board.slots[0].enter("compile"), lambda ranks: ranks.board.slots[0].enter("evaluate"),
], ids=["nobody waits", "all wait", "it saves", "it compiles", "it evaluates"])  # fmt: skip
def test_nobody_is_found_where_it_is_not_certain_who_keeps_the_others_waiting(change: Callable[[Ranks], None]) -> None:
    ranks = Ranks()
    change(ranks)
    assert not ranks.found_after(100.0) and not any(slot.is_asked for slot in ranks.board.slots)


def test_nobody_is_found_while_another_rank_goes_on() -> None:
    """As the stages of a pipeline do for a while."""
    ranks = Ranks()
    for number in range(20):
        ranks.board.slots[1].at(f"F1.{number}")
        assert not ranks.found_after(4.0)


def test_of_several_that_do_not_wait_those_are_found_that_are_behind() -> None:
    ranks = Ranks()
    ranks.board.slots[1].wait(False)
    ranks.board.slots[1].at_step(8)
    assert list(ranks.found_after(6.0)) == [0]
    ranks.board.slots[0].at_step(8)
    assert not ranks.found_after(4.0)


def test_what_a_thread_in_the_background_waits_for_is_not_shown() -> None:
    slot = StatusBoard.private(1).slots[0]
    thread = threading.Thread(target=slot.wait, args=(True,))
    thread.start()
    thread.join()
    assert not slot.waits
    slot.wait(True)
    assert slot.waits


@pytest.mark.skipif(sys.platform != "linux", reason="what processes do is read from /proc")
def test_what_children_compute_counts() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, deadline = activity_with_children(os.getpid()), time.monotonic() + 60.0
        assert before is not None
        while (now := activity_with_children(os.getpid())) is None or now.seconds < before.seconds + 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    assert activity_with_children(child.pid) is None

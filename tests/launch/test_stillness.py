"""A process that stands still is told from one that is starved, busy or waits for a disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from phalanx.launch.status_board import StatusView
from phalanx.launch.stillness import Activity, Stillness, activity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what threads do is read from /proc")


class Clock:
    """As the supervisor's, but here it is said how long has passed."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now


def view(beat: int, phase: str = "step") -> StatusView:
    return StatusView(beat, 3, phase, "", "F0.0")


def still_after(looks: Sequence[tuple[int, Activity | None]], phase: str = "step") -> float:
    """For how long after looks that follow each other by 0.2 s; the first finds a process that has just lived."""
    clock, now = Clock(), list[Activity | None]()
    watch = Stillness(clock, now.pop)  # pyright: ignore[reportArgumentType]
    found = 0.0
    for beat, seen in looks:
        now.append(seen)
        found = watch.seconds(view(beat, phase))
        clock.now += 0.2
    return found


ASLEEP = Activity(5.0, True)
STOPPED = Activity(5.0, True, stopped=True)


@pytest.mark.parametrize(
    ("looks", "seconds"),
    [
        pytest.param([(1, ASLEEP)] * 6, 1.0, id="asleep without a sign of life"),
        pytest.param([(beat, ASLEEP) for beat in range(6)], 0.0, id="its heart beats"),
        pytest.param([(1, Activity(5.0, False))] * 6, 0.0, id="it waits for a core"),
        pytest.param([(1, ASLEEP)] * 3 + [(1, Activity(5.0, False))] + [(1, ASLEEP)] * 2, 0.4, id="it did so once"),
        pytest.param([(1, Activity(5.0 + 0.2 * n, True)) for n in range(6)], 0.0, id="it computes between looks"),
        pytest.param([(1, Activity(5.0 + 0.01 * (n > 3), True)) for n in range(6)], 1.0, id="it asked for the lock"),
        pytest.param([(1, None)] * 6, 0.0, id="the system does not tell"),
    ],
)
def test_still_is_who_could_run_and_does_not(looks: list[tuple[int, Activity | None]], seconds: float) -> None:
    assert still_after(looks) == pytest.approx(seconds)


@pytest.mark.parametrize("phase", ["compile", "save", "start"])
def test_who_is_at_something_that_takes_long_is_still_only_where_it_was_stopped(phase: str) -> None:
    assert still_after([(1, ASLEEP)] * 6, phase) == 0.0
    assert still_after([(1, STOPPED)] * 6, phase) == pytest.approx(1.0)


def test_while_its_heart_beats_the_system_is_not_asked() -> None:
    clock = Clock()
    watch = Stillness(clock, lambda: pytest.fail("was asked"))  # pyright: ignore[reportArgumentType]
    for beat in range(8):
        assert watch.seconds(view(beat // 2)) < 0.25
        clock.now += 0.12


def seen(code: str, wanted: bool, number: int = 0) -> bool:
    """Whether a process that runs this comes to sleep or not to sleep, as is wanted."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    if number:
        os.kill(process.pid, number)
    deadline = time.monotonic() + 30.0
    while (found := activity(process.pid)) is None or (found.sleeps, found.stopped) != (wanted, bool(number)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.communicate()
    return activity(process.pid) is None


SAYS = "import threading, time; print(flush=True); "
SPINS = "threading.Thread(target=lambda: exec('while True: pass'), daemon=True).start(); time.sleep(60)"


def test_the_system_tells_who_sleeps_is_stopped_or_computes() -> None:
    assert seen(SAYS + "time.sleep(60)", True)
    assert seen(SAYS + SPINS, False)
    assert seen(SAYS + SPINS, True, signal.SIGSTOP)

"""Calls on threads that are abandoned, and the end of a process in which one is still under way."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from phalanx.launch.abort import Late, within

# A call of torch's that returns a second after the program's last line; taking the interpreter apart lasts longer.
ENDS_DURING_A_CALL = """
import sys, time, types
from datetime import timedelta
from phalanx.launch.abort import Late, within
from phalanx.launch.store import host_store

class Slow:
    sleep = staticmethod(time.sleep)
    def __del__(self):
        self.sleep(2)

def waits_for_a_second():
    try:
        store.get("a key that nobody sets")
    except RuntimeError:
        pass

sys.modules["slow"] = module = types.ModuleType("slow")
module.slow, store = Slow(), host_store("127.0.0.1", 0, timedelta(seconds=1))
try:
    within(0.1, waits_for_a_second)
except Late:
    print("late")
"""


def test_a_process_does_not_abort_when_it_ends_during_a_call():
    ended = subprocess.run([sys.executable, "-c", ENDS_DURING_A_CALL], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "late\n"), ended.stderr


def test_a_call_that_is_no_longer_wanted_is_abandoned():
    with pytest.raises(Late):
        within(60.0, lambda: __import__("time").sleep(0.3), unless=lambda: True)


class Made:
    """Something that a call makes."""


def test_what_an_abandoned_call_had_made_goes_when_it_fails():
    wanted, made = threading.Event(), list[weakref.ref[Made]]()

    def fails_late() -> None:
        own = Made()
        made.append(weakref.ref(own))
        wanted.wait(10.0)
        raise RuntimeError("nobody came")

    gc.disable()  # which would find it in the end
    try:
        with pytest.raises(Late):
            within(0.1, fails_late)
        wanted.set()
        deadline = time.monotonic() + 10.0
        while made[0]() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made[0]() is None
    finally:
        gc.enable()


def test_what_a_call_raises_is_raised():
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        within(1.0, fails)

"""Phases: seconds by name, in the order they came, from when the run was asked for."""

from __future__ import annotations

import time

import pytest

from phalanx.observe.phases import Phases, process_began


def test_seconds_add_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0, 20.0, 20.01, 30.0, 31.0])
    monkeypatch.setattr(time, "time", lambda: 104.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    phases = Phases(began=100.0)
    for name in ("steps", "save", "steps"):
        with phases.phase(name):
            pass
    assert phases.seconds == pytest.approx({"start": 4.0, "steps": 3.0, "save": 0.01})
    assert phases.describe() == "start 4.0s, steps 3.0s"


def test_a_phase_within_another_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 6.0, 10.0])
    monkeypatch.setattr(time, "time", lambda: 100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    phases = Phases(began=100.0)
    with phases.phase("prepare"):
        with phases.phase("graph"):
            pass
        phases.since("functions", 4.0)
    assert phases.seconds == {"start": 0.0, "graph": 3.0, "functions": 2.0, "prepare": 5.0}


def test_a_process_began_before_now() -> None:
    assert 0 <= time.time() - process_began() < 24 * 3600

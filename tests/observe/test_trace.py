from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.observe.trace import StepProfiler


def run(profiler: StepProfiler, steps: range) -> None:
    for step in steps:
        with profiler.step(step):
            torch.ones(4).add(1)


def traced_steps(path: Path) -> set[str]:
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    assert "aten::add" in names
    return {name for name in names if name.startswith("step ")}


def test_the_trace_holds_exactly_the_chosen_steps_and_is_written_at_the_last(tmp_path: Path):
    profiler = StepProfiler("2:3", tmp_path / "run")
    run(profiler, range(1, 3))
    assert profiler.path is None
    run(profiler, range(3, 6))
    assert profiler.path == tmp_path / "run" / "trace-steps-2-3.json"
    assert traced_steps(profiler.path) == {"step 2", "step 3"}


def test_a_run_that_ends_inside_the_window_is_written_by_close(tmp_path: Path):
    profiler = StepProfiler("2:9", tmp_path)
    run(profiler, range(3, 5))
    profiler.close()
    assert profiler.path == tmp_path / "trace-steps-3-4.json"
    assert traced_steps(profiler.path) == {"step 3", "step 4"}


def test_a_failing_step_can_still_be_written(tmp_path: Path):
    profiler = StepProfiler("1:2", tmp_path)
    with pytest.raises(RuntimeError, match="boom"), profiler.step(1):
        torch.ones(4).add(1)
        raise RuntimeError("boom")
    profiler.close()
    assert profiler.path is not None and traced_steps(profiler.path) == {"step 1"}


def test_without_a_window_nothing_is_traced(tmp_path: Path):
    profiler = StepProfiler(None, tmp_path)
    run(profiler, range(1, 4))
    profiler.close()
    assert profiler.path is None and list(tmp_path.iterdir()) == []


def test_a_malformed_window_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="profile_steps = '3-5' is not of the form A:B"):
        StepProfiler("3-5", tmp_path)

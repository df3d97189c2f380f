"""The scaling benchmark: parts of a start-up add up, trainings run in turn, tables say what was measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import report
import scaling
import scaling_page
import scaling_start
from compare_setting import Setting, Size
from scaling_ranks import run_in_turn, slowest

from phalanx.launch.worker_pool import WorkerPool
from phalanx.program.instructions import Op

TINY = Size(layers=2, width=64, vocabulary=64, samples=4, tokens=8)


def part(seconds: float) -> dict[str, Any]:
    return {"seconds": report.summary([2 * seconds]), "processor_seconds": report.summary([seconds])}


def start(layers: int, cache: str) -> dict[str, Any]:
    parts = {name: part(1.0) for name in scaling_page.START_UP} | {"later step": part(0.1 * layers)}
    return {"kind": "start-up", "layers": layers, "cache": cache, "parts": parts}


def ranks(world: int, pp: int, seconds: float, timed: bool = False) -> dict[str, Any]:
    summary = report.summary([seconds])
    return {"kind": "ranks", "ranks": world, "pp": pp, "dp": world // pp, "mb": 4, "timed": timed, "seconds": summary}


def test_every_second_of_a_start_up_counts_once() -> None:
    found = scaling_start.split({
        "prepare": (10.0, 9.0), "capture": (3.0, 3.0), "prove": (5.0, 4.0), "open_weights": (1.0, 1.0),
        "load_buffers": (0.5, 0.5), "open_member": (2.0, 1.5),
    })  # fmt: skip
    assert found == {
        "data and plan": (2.0, 2.0), "capture": (3.0, 3.0), "check": (5.0, 4.0), "weights": (3.5, 3.0),
    }  # fmt: skip


def test_the_clock_times_what_it_watches_and_the_time_between_steps() -> None:
    import types

    module = types.SimpleNamespace(twice=lambda x, times=2: x * times)
    clock = scaling_start.Clock()
    clock.watch(module, "twice")
    assert (module.twice(3), module.twice(3, times=3)) == (6, 9)
    assert set(clock.parts) == {"twice"} and clock.parts["twice"][0] > 0
    clock.on_start(None)
    clock.on_step({})
    assert len(clock.steps) == 1 and clock.steps[0][0] > 0


def test_trainings_on_some_of_the_ranks_run_in_turn_in_one_pool(pool: WorkerPool) -> None:
    setting = Setting("llama", TINY, "float32", True)
    captured = setting.capture()
    waits = {op: (0.0, 0.005, 0.005, 0.0) for op in (Op.F, Op.B, Op.W, Op.BW)}
    trainings = [
        scaling._training(text, setting, (1.0,) * 4, durations, name)
        for text, durations, name in (("mb=4", waits, "waits"), ("mb=1", None, "computes"), ("pp=2,mb=4", waits, "pp"))
    ]
    found = pool.run(run_in_turn, trainings, 2, captured, world=2)
    assert [set(seconds) for seconds in found] == [{"waits", "computes", "pp"}, {"pp"}]
    assert all(len(slowest(found, training.name)) == 2 for training in trainings)
    assert min(slowest(found, "waits")) >= 4 * 2 * 0.010, "4 micro-batches, 2 layers, forward and backward"


def test_a_step_takes_as_long_as_on_its_slowest_rank() -> None:
    assert slowest([{"a": [1.0, 4.0]}, {"a": [3.0, 2.0]}, {}], "a") == [3.0, 4.0]


def test_speed_up_is_relative_to_the_rank_that_does_the_same_alone() -> None:
    results = [ranks(1, 1, 1.0), ranks(2, 2, 0.8), ranks(1, 1, 4.0, True), ranks(4, 4, 2.0, True)]
    _, rows = scaling_page.tables(results)["ranks"]
    assert rows[1][-3:] == ["1.25×", "62%", "80%"]
    assert rows[3][-3:] == ["2.00×", "50%", "57%"]
    assert [row[4] for row in rows] == ["real", "real", "timed", "timed"]


def test_the_total_of_a_start_up_leaves_later_steps_out() -> None:
    _, rows = scaling_page.tables([start(2, "cold")])["start-up"]
    assert rows[0][-2:] == ["12.00 (6.00)", "0.40 (0.20)"]


def test_the_plot_shows_depth_timed_ranks_and_lengths() -> None:
    tokens = {"kind": "tokens", "tokens": 64, "samples": 32, "seconds": report.summary([0.5])}
    results = [start(2, "cold"), start(4, "cold"), ranks(1, 1, 1.0, True), ranks(2, 1, 0.6, True), tokens]
    depth, timed, lengths = scaling_page.panels(results)
    assert [point.x for point in depth.series["capture, cold"]] == [2, 4]
    assert [point.median for point in timed.series["dp, timed"]] == [1.0, 0.6]
    assert [point.x for point in timed.series["pp, timed"]] == [1]
    assert [point.median for point in lengths.series["one rank"]] == [0.5]


def test_a_process_that_fails_ends_the_benchmark_with_its_words() -> None:
    with pytest.raises(SystemExit, match="no good reason"):
        scaling._python("-c", "raise ValueError('no good reason')")


@pytest.mark.long
def test_the_quick_benchmark_measures_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--quick", "--out", str(tmp_path / "scaling.json")])
    scaling.main()
    page = scaling_page.page(tmp_path)
    assert page.startswith("# Scaling") and "scaling.py --quick" in page
    cold, cached = (next(row for row in page.splitlines() if f"| 2 | {state} |" in row) for state in ("cold", "cached"))
    capture = [float(row.split("|")[5].split()[0]) for row in (cold, cached)]
    assert capture[0] > capture[1], "a cached capture is faster"

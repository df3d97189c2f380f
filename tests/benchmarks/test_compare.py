"""Comparisons with torch: both sides train alike, and ratios say what they should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from compare import OURS, Comparison, Measured, combine, compare, quartiles, verdict
from compare_cli import rows
from compare_setting import Setting, Size
from torch_data_parallel import FSDP2_RESHARD
from torch_pipeline import pipeline

from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.complete import complete

TINY = Size(layers=2, width=64, vocabulary=64, samples=4, tokens=8)


def measured(ours: float, theirs: float, seconds: list[float]) -> Measured:
    times = {OURS: seconds, "torch": [2 * s for s in seconds]}
    return Measured({OURS: [ours], "torch": [theirs]}, times, times, times)


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    found = combine([measured(1.0, 1.0, [1.0, 4.0]), measured(1.0, 1.0, [3.0, 2.0])], "float32")
    assert found["seconds"][OURS]["median"] == pytest.approx(3.5)
    assert found["ratios"]["torch"] == {"median": 2.0, "low": 2.0, "high": 2.0, "repeats": 2}
    assert found["processor_ratios"]["torch"]["median"] == 2.0


def test_sides_that_train_differently_are_not_compared() -> None:
    with pytest.raises(SystemExit, match="phalanx and torch do not train alike"):
        combine([measured(1.0, 1.1, [1.0])], "float32")


def test_a_ratio_counts_as_faster_only_beyond_its_spread() -> None:
    assert verdict({"low": 1.01, "high": 1.2}) == "faster"
    assert verdict({"low": 0.99, "high": 1.2}) == "even"
    assert verdict({"low": 0.8, "high": 0.99}) == "slower"
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0])["low"] == 2.0


def test_a_rival_that_fails_is_shown_as_such() -> None:
    result = {"ranks": 2, "model": "llama", "plan": "pp=2", "against": ["torch"], "error": "cannot"}
    assert rows([result]) == [["2", "llama", "pp=2", "torch", "", "", "", "", "cannot"]]


@pytest.mark.parametrize(
    ("plan", "shape", "rivals"),
    [("pp=2,mb=2,schedule=zb-h1", "gpt2", {"torch": pipeline}), ("dp=2,zero=3", "llama", FSDP2_RESHARD)],
)
def test_both_sides_of_a_comparison_train_alike(
    plan: str, shape: str, rivals: dict, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(shape, TINY, "float32", True)
    captured = setting.capture()
    costs = captured.blocks.flops(captured.dims(setting.batch()))
    completed = complete(plan, world=2, batch_size=TINY.samples, costs=costs).plan
    comparison = Comparison(setting, completed, rivals, rounds=1, steps=1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = combine(pool.run(compare, comparison, captured, world=2), "float32")
    assert len(set(found["losses"])) == len(found["losses"]), "every step changes the loss"
    assert set(found["ratios"]) == set(rivals)

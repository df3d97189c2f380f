"""The dispatch benchmark: both sides compute the same amount, and its table and page say what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import report
import tp_dispatch
from compare import quartiles
from tp_dispatch_rank import Shape, compare

from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.shard.shard import shard
from phalanx.plan.complete import complete

TINY = Shape(layers=1, width=128, samples=2, tokens=8)  # a smaller vocabulary would not be split


def test_the_unsplit_model_is_as_large_as_what_a_rank_of_two_holds() -> None:
    (whole, batch), (half, _) = TINY.capture(1), TINY.capture(2)
    costs = whole.blocks.flops(whole.dims(batch))
    plan = complete("tp=2", world=2, batch_size=TINY.samples, costs=costs).plan
    local = shard(whole, plan, 0, torch.float32).parameters
    held = {name: local[name].local.local_shape if name in local else whole.shapes[name] for name in whole.shapes}
    assert {n: tuple(shape) for n, shape in held.items()} == {n: tuple(shape) for n, shape in half.shapes.items()}


def test_both_sides_are_timed_in_every_round(pool: WorkerPool) -> None:
    found = pool.run(compare, TINY, 2, world=2)[0]
    assert found["ratio"]["repeats"] == 2 and found["ratio"]["median"] > 0
    assert all(seconds["low"] > 0 for seconds in found["seconds"].values())
    assert found["instructions"]["tp=2"] > found["instructions"]["tp=1"]


@pytest.fixture
def result() -> dict[str, object]:
    shape = {"layers": 1, "width": 128, "samples": 2, "tokens": 8}
    seconds = {"tp=1": quartiles([0.1, 0.1]), "tp=2": quartiles([0.105, 0.105])}
    instructions = {"tp=1": 8, "tp=2": 27}
    return {"shape": shape, "seconds": seconds, "ratio": quartiles([1.05, 1.05]), "instructions": instructions}


def test_the_table_shows_both_times_and_their_ratio(result: dict[str, object]) -> None:
    assert tp_dispatch.rows([result]) == [["1", "128", "2 × 8", "100.0", "105.0", "1.050 (1.050–1.050)", "8 and 27"]]


def test_the_page_is_made_from_its_result_file(tmp_path: Path, result: dict[str, object]) -> None:
    report.write(tmp_path / "tp_dispatch.json", "tp_dispatch", {"rounds": 2}, [result])
    page = tp_dispatch.page(tmp_path)
    assert "python benchmarks/tp_dispatch.py --rounds 2" in page and "| 1 | 128 | 2 × 8 | 100.0 | 105.0 |" in page
    assert json.loads((tmp_path / "tp_dispatch.json").read_text())["benchmark"] == "tp_dispatch"

"""What of a model's blocks ranks measure by themselves before one of them chooses a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from phalanx.cli.models import capture_model
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.prepare.blocks_here import measure_blocks, sizes_of
from phalanx.profile.model import Size, Subject, times_here
from phalanx.profile.segments import PARTS
from phalanx.profile.store import Store


def test_sizes_are_micro_batches_of_plans_that_give_every_rank_samples() -> None:
    assert sizes_of(4, 16, heads=8, flops=1.0, rate=1e9) == [Size(1, 4), Size(2, 8), Size(1, 1), Size(2, 2)]
    assert sizes_of(4, 16, heads=0, flops=1.0, rate=1e9) == [Size(1, 4), Size(1, 1)]  # of which nothing is known
    assert sizes_of(3, 6, heads=8, flops=1.0, rate=1e9) == [Size(1, 2), Size(1, 1)]
    assert sizes_of(8, 4, heads=8, flops=1.0, rate=1e9) == [Size(1, 1), Size(2, 1)]


def test_what_would_compute_for_long_is_measured_with_fewer_samples_or_not_at_all() -> None:
    assert sizes_of(2, 16, heads=8, flops=1e9, rate=2e10) == [Size(1, 2), Size(2, 4)]
    assert sizes_of(2, 16, heads=8, flops=1e9, rate=1e9) == []
    assert sizes_of(2, 16, heads=8, flops=0.0, rate=1e9) == []


def measured(context: RankContext, path: Path, sizes: list[Size], compile: str) -> list[str]:
    spec, captured = capture_model("gpt2", None, "float32", tiny=True)
    subject = Subject.synthetic(spec, captured, "float32", torch.device("cpu"), 2, 16, compile)
    store, said = Store(path) if context.rank == 0 else None, list[str]()
    measure_blocks(context, subject, store, sizes, said.append)
    return said


def test_ranks_of_a_job_measure_blocks_together_and_only_what_is_not_known(pool: WorkerPool, tmp_path: Path) -> None:
    path, sizes = tmp_path / "p.sqlite", [Size(1, 2), Size(2, 2)]
    said, _ = pool.run(measured, path, sizes, "auto", world=2)
    assert said == ["measuring the blocks of gpt2-tiny (in 2 sizes), to plan by them"]
    _, captured = capture_model("gpt2", None, "float32", tiny=True)
    known: Any = times_here(Store(path).rows(), captured, "float32", torch.device("cpu"), 2, 16)
    assert known and all(set(own) == {1, 2} for own in known.values())
    rows = Store(path).rows()
    assert pool.run(measured, path, sizes, "auto", world=2) == [[], []] and Store(path).rows() == rows


def test_what_was_measured_with_care_stands_before_what_a_run_measured(pool: WorkerPool, tmp_path: Path) -> None:
    store, size = Store(tmp_path / "p.sqlite"), Size(1, 2)
    spec, captured = capture_model("gpt2", None, "float32", tiny=True)
    careful = Subject.synthetic(spec, captured, "float32", torch.device("cpu"), 2, 16)
    for by, seconds in (("run", 1.0), ("profile", 5.0)):
        for template in careful.first_blocks():
            for part in PARTS:
                store.put(f"block {part}", replace(careful, by=by).key(template, size), seconds)
        known = times_here(store.rows(), captured, "float32", torch.device("cpu"), 2, 16)
        assert {own.forward for by_degree in known.values() for own in by_degree[1]} == {seconds}
    for template in careful.first_blocks():
        for part in PARTS:
            store.forget(f"block {part}", replace(careful, by="run").key(template, size))
    assert pool.run(measured, tmp_path / "p.sqlite", [size], "auto", world=2) == [[], []]


def test_segments_that_are_compiled_are_not_measured_by_a_run(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(measured, tmp_path / "p.sqlite", [Size(1, 1)], "aot_eager", world=2) == [[], []]
    assert not (tmp_path / "p.sqlite").exists() or not Store(tmp_path / "p.sqlite").rows()

"""What ranks that are left, and who started them, keep of those that were lost: nothing, however many there were."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.launch import newcomers
from phalanx.launch.status_board import StatusView
from phalanx.launch.worker_pool import WorkerPool
from phalanx.training.trainer import Trainer
from tests.faults.strike import Wanted
from tests.run_helpers import short_config
from tests.survive.left import Seen
from tests.survive.runs import OPTIONS, Strike, fit, in_step, losses_of_ranks

LOSSES, APART = 5, 4  # steps from one to the next, at least
STEPS, BATCH = 34, 8


class Weighed:
    """A dataset that notes, before each step, what the process that asks for samples has open and in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index and index % BATCH == 0:
            with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps({"step": index // BATCH + 1, **weight()}) + "\n")
        ids = (torch.arange(8) * 7 + index * 13) % 97
        return {"input_ids": ids, "labels": ids}


def weight() -> dict[str, int]:
    """What this process has."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter) and not each.is_meta]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    num_files, num_threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return {"bytes": sum(storages.values()), "files": num_files, "threads": num_threads}


def between(found: list[Mapping[str, int]], first: int, last: int) -> dict[str, float]:
    """What a process usually had in these steps; a busy machine lets go of things later."""
    rows = [row for row in found if first <= row["step"] <= last]
    return {name: statistics.median(row[name] for row in rows) for name in ("bytes", "files", "threads")}


def strikes(process: int) -> list[Strike]:
    """One after the other, in the forward and in the backward."""
    found = [Strike(process, in_step(3, "F"))]
    for turn in range(1, LOSSES):
        found.append(Strike(process, later_than(found[-1], "FB"[turn % 2])))
    return found


def later_than(before: Strike, instruction: str) -> Wanted:
    def wanted(view: StatusView) -> bool:
        return before.view is not None and in_step(before.view.step + APART, instruction)(view)

    return wanted


@pytest.mark.parametrize(
    ("world", "plan", "options"),
    [
        (2, "dp=2", {}),
        pytest.param(4, "dp=4", {}, marks=pytest.mark.long),
        pytest.param(4, "pp=2,dp=2,mb=2", {}, marks=pytest.mark.long),
        pytest.param(2, "pp=2,mb=2", {"mirror_every": 1}, marks=pytest.mark.long),
        pytest.param(2, "dp=2,zero=3", {"mirror_every": 1}, marks=pytest.mark.long),
    ],
)
def test_what_a_rank_that_is_left_has_does_not_grow_with_the_number_of_losses(
    world: int, plan: str, options: dict[str, Any], pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newcomers, "_FIRST_WAIT", 0.0)  # one that is lost again and again comes at once all the same
    given = {**OPTIONS, "steps": STEPS, "shuffle": False, "plan": plan, "on_loss": "replace", **options}
    trainer = Trainer("gpt2", Weighed(tmp_path), short_config(tmp_path / "run", **given))
    fit(pool, tmp_path / "run", world, "replace", strikes=strikes(world - 1), trainer=trainer)
    losses = [record["step"] for record in losses_of_ranks(tmp_path / "run")]
    assert len(losses) == LOSSES
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("*.jsonl")]
    survivors = [rows for rows in found if rows[0]["step"] == 2 and rows[-1]["step"] == STEPS]
    assert survivors
    for rows in survivors:
        early, late = between(rows, losses[1] + 1, losses[2] - 1), between(rows, losses[4] + 1, STEPS)
        assert late["bytes"] <= early["bytes"], (early, late)
        assert late["files"] <= early["files"] + 2 and late["threads"] <= early["threads"] + 1, (early, late)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")
def test_whatever_is_left_behind_is_seen(tmp_path: Path) -> None:
    """Of what every test here is held against."""
    before = Seen.now(None)
    assert before.left_since(before) == []
    with contextlib.ExitStack() as opened:
        child = opened.enter_context(subprocess.Popen(["sleep", "60"]))
        opened.callback(child.kill)
        port = opened.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        piece = Path(f"/dev/shm/torch_{_gone()}_1_0")
        piece.touch()
        opened.callback(piece.unlink)
        for number in range(3):
            opened.enter_context((tmp_path / str(number)).open("w"))
        found = Seen.now(None).left_since(before)
    assert f"process {child.pid} runs on" in found and f"port {port} is open" in found
    assert f"{piece.name} is in shared memory" in found and any("more files are open" in each for each in found)


def _gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    return ended.pid

"""A run that fails says so in its own log, whoever is lost, and says how to go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.errors import LinkError, PhalanxError, RankError
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe.runlog import RunLog, read_log
from phalanx.training.failing import failure_told
from phalanx.training.spikes import RollBack
from tests.faults.strike import Striker, at
from tests.run_helpers import records, short_run
from tests.state.test_lock import other_process

DATA = "synthetic:7"
OPTIONS: dict[str, Any] = {"steps": 100_000, "plan": "pp=2,mb=2", "export": False, "device": "cpu"}


def train(out: Path, **options: Any) -> RankError:
    """What the run ends with."""
    with pytest.raises(RankError) as caught:
        short_run("gpt2", DATA, out, **{**OPTIONS, **options})
    return caught.value


def history(out: Path) -> str:
    return CliRunner().invoke(app, ["history", str(out)]).output


@pytest.mark.parametrize("rank", [0, 1])
def test_the_log_of_a_run_that_lost_a_rank_tells_which_where_and_why(
    pool: WorkerPool, lent_ranks: list[int], tmp_path: Path, rank: int
) -> None:
    def begin() -> Any:
        there = len(pool.pids) >= 2 and all(slot.read().phase == "step" for slot in pool.board.slots[:2])
        return (pool.board, pool.pids) if there else None

    pool.board.reset()  # so that nothing of an earlier run is taken for a moment of this one
    striker = Striker(begin, rank, at("F"), signal.SIGKILL)
    error = train(tmp_path)
    assert striker.view is not None and lent_ranks == [2]
    where = f"rank {rank} (stage {rank}) was killed by signal SIGKILL in step {striker.view.step} at F"
    assert error.message.startswith(where)
    (of_run,) = [record for record in records(tmp_path, "error") if record.get("of_run")]
    assert of_run["message"] == str(error) and read_log(tmp_path / "log-rank0.jsonl")[-1] == of_run
    told = history(tmp_path)
    assert told.count("failed: ") == 1 and f"failed: {where}" in told and error.hint in told


@pytest.mark.parametrize("checkpoint_every", [1, "never"])
def test_a_run_whose_store_was_ended_says_how_to_go_on(
    pool: WorkerPool, lent_ranks: list[int], tmp_path: Path, checkpoint_every: int | str
) -> None:
    def end() -> None:
        wait_for(lambda: len(steps()) >= 3)
        assert pool.processes._store is not None
        os.kill(pool.processes._store.pid, signal.SIGKILL)

    def steps() -> list[Any]:
        return records(tmp_path, "step") if (tmp_path / "log-rank0.jsonl").exists() else []

    ending = threading.Thread(target=end)
    ending.start()
    error = train(tmp_path, checkpoint_every=checkpoint_every)
    ending.join()
    assert error.message == "the process that holds the store of the ranks was ended, and the ranks with it"
    assert f"failed: {error.message}" in history(tmp_path)
    if checkpoint_every == "never":
        assert error.hint == ""
        return
    newest = max((tmp_path / "checkpoints").glob("step-*")).name
    assert error.hint == f"go on from {newest} with --resume auto" and f"  → {error.hint}" in str(error)
    assert error.hint in history(tmp_path)


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def fails_with(error: PhalanxError, folder: Path, *before: tuple[str, str]) -> list[dict[str, Any]]:
    """The log of a run that ends with an error. before: the kinds and messages that rank 0 wrote."""
    with pytest.raises(type(error)) as caught, failure_told(folder):
        if before:
            with RunLog(folder, rank=0) as log:
                for kind, message in before:
                    log.write(kind, message=message)
        raise error
    assert caught.value is error
    return read_log(folder / "log-rank0.jsonl") if (folder / "log-rank0.jsonl").exists() else []


def test_what_rank_0_wrote_itself_is_not_told_twice(tmp_path: Path) -> None:
    error = RankError("sample 3 is broken", "look at it")
    (only,) = fails_with(error, tmp_path, ("error", str(error)))
    assert "of_run" not in only
    told = fails_with(LinkError("rank 1 is gone"), tmp_path, ("error", "rank 0 waits for rank 1"))
    assert [(each["message"], each.get("of_run")) for each in told[1:]] == [
        ("rank 0 waits for rank 1", None),
        ("rank 1 is gone", True),
    ]


def test_a_run_that_goes_back_has_not_failed(tmp_path: Path) -> None:
    assert len(fails_with(RollBack("a spike"), tmp_path, ("rollback", "it is a spike"))) == 1


def test_the_log_of_another_run_is_left_alone(tmp_path: Path) -> None:
    """One that ended before, and one that has the folder now."""
    assert fails_with(RankError("none began"), tmp_path) == []
    with RunLog(tmp_path, rank=0) as log:
        log.write("finish")
    time.sleep(0.01)
    assert len(fails_with(RankError("not begun"), tmp_path)) == 1
    other = other_process(tmp_path)
    try:
        assert len(fails_with(RankError("the folder is in use"), tmp_path, ("step", "of the other"))) == 2
    finally:
        other.kill()
        other.wait()
    assert len(fails_with(RankError("the other one is gone"), tmp_path, ("step", "own"))) == 4


def test_a_folder_that_cannot_be_read_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "unmounted")
    fails_with(RankError("rank 1 is gone"), tmp_path, ("step", "own"))

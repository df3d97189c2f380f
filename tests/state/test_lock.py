"""One run, one folder: who holds a lock, when it is taken over, and that a run which lost its folder knows it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.errors import CheckpointError, ConfigError
from phalanx.state import lock
from phalanx.state.lock import LOCK_FILE, Holder, RunLock, read_holder, refuse_second_run

HOLD = "import sys, time; from pathlib import Path; from phalanx.state.lock import RunLock\n" \
       "with RunLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT", 0.05), ("SILENT", 0.5), ("REQUEUE", 1.0), ("LOOK", 0.02)):
        monkeypatch.setattr(lock, f"_{name}_SECONDS", seconds)


def other_process(folder: Path, **variables: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, env={**os.environ, **variables}
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def leave_lock(folder: Path, **changes: object) -> Holder:
    """A lock as a run elsewhere left it."""
    folder.mkdir(exist_ok=True)
    holder = dataclasses.replace(Holder.here(), **changes)
    (folder / LOCK_FILE).write_text(json.dumps(dataclasses.asdict(holder)))
    return holder


def test_a_second_run_is_refused_by_name_and_a_killed_one_taken_over(tmp_path: Path):
    process = other_process(tmp_path)
    try:
        for attempt in (lambda: RunLock(tmp_path).__enter__(), lambda: refuse_second_run(tmp_path)):
            with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on .*, since 20.*\n.*--out"):
                attempt()
    finally:
        process.kill()
        process.wait()
    said: list[str] = []
    refuse_second_run(tmp_path)
    with RunLock(tmp_path, said.append):
        assert read_holder(tmp_path) and f"from process {process.pid} on" in said[0] and "is gone" in said[0]
    assert not list(tmp_path.iterdir())


def test_of_many_that_come_at_once_one_gets_the_folder(tmp_path: Path):
    leave_lock(tmp_path, pid=2**22 + 1)  # a number that no process has
    got: list[bool] = []
    leave = threading.Barrier(8)

    def come() -> None:
        try:
            with RunLock(tmp_path):
                got.append(True)
                leave.wait(30)
        except ConfigError:
            got.append(False)
            leave.wait(30)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 7 + [True]


def test_a_process_number_that_another_process_has_by_now_is_not_the_holder(tmp_path: Path):
    leave_lock(tmp_path, started=1)
    with RunLock(tmp_path):
        pass


def test_a_lock_from_before_the_machine_was_started_is_taken_over(tmp_path: Path):
    leave_lock(tmp_path, machine="another-boot pid:[1]")
    with RunLock(tmp_path):
        pass


def test_a_silent_holder_on_another_machine_is_waited_for_then_taken_over(tmp_path: Path, quick: None):
    leave_lock(tmp_path, host="elsewhere", pid=7)
    said: list[str] = []
    began = time.monotonic()
    with RunLock(tmp_path, said.append):
        assert time.monotonic() - began >= 0.5
    assert "held by process 7 on elsewhere" in said[0] and "waiting" in said[0]
    assert "taking over" in said[1] and "no sign of life" in said[1]


def test_a_living_holder_on_another_machine_is_not_taken_over(tmp_path: Path, quick: None):
    holder = leave_lock(tmp_path, host="elsewhere")
    ended = threading.Event()

    def beat() -> None:
        for number in range(1, 1000):
            if ended.wait(0.05):
                return
            (tmp_path / LOCK_FILE).write_text(json.dumps({**dataclasses.asdict(holder), "beat": number}))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match=r"in use by process .* on elsewhere"):
            RunLock(tmp_path).__enter__()
    finally:
        ended.set()
        thread.join()


def test_a_requeued_job_waits_for_its_earlier_self(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "_REQUEUE_SECONDS", 30.0)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    process = other_process(tmp_path)
    threading.Timer(0.3, process.terminate).start()
    refuse_second_run(tmp_path)
    said: list[str] = []
    with RunLock(tmp_path, said.append):
        process.wait(10)
    assert "job 4711" in said[0] and "waiting" in said[0] and "is gone" in said[-1]


def test_a_requeued_job_does_not_wait_for_ever(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with RunLock(tmp_path), pytest.raises(ConfigError, match=r"in use by .* job 4711"):
        RunLock(tmp_path).__enter__()


def test_who_lost_the_folder_while_it_slept_is_told_and_leaves_the_lock_alone(tmp_path: Path, quick: None):
    with RunLock(tmp_path) as mine:
        mine.still_ours()
        other = leave_lock(tmp_path, host="elsewhere", pid=7)
        time.sleep(0.2)  # several beats
        with pytest.raises(CheckpointError, match=r"no longer this run's: process 7 on elsewhere.* has taken it over"):
            mine.still_ours()
    assert read_holder(tmp_path) == other
    (tmp_path / LOCK_FILE).unlink()
    with RunLock(tmp_path) as mine:
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(CheckpointError, match="its lock was removed"):
            mine.still_ours()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": 3}', "\0" * 100])
def test_a_damaged_lock_is_nobodys(tmp_path: Path, text: str):
    (tmp_path / LOCK_FILE).write_text(text)
    refuse_second_run(tmp_path)
    with RunLock(tmp_path) as mine:
        mine.still_ours()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run folder .*file/run cannot be used: .*\n.*--out"):
        RunLock(tmp_path / "file" / "run").__enter__()


def test_the_holder_shows_that_it_lives(tmp_path: Path, quick: None):
    with RunLock(tmp_path):
        time.sleep(0.3)
        holder = read_holder(tmp_path)
        assert holder is not None and holder.beat >= 2 and holder.pid == os.getpid()

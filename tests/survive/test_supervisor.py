"""The death of the supervisor, the process that was started: its ranks save, say how to go on, and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.launch import orphans
from phalanx.launch.handles import Handle
from phalanx.launch.status_board import StatusBoard
from phalanx.state.folders import latest
from tests.children import ROOT, Popen, environment
from tests.faults.strike import is_alive


def start(out: Path, scratch: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "phalanx", "train", "--model", "gpt2", "--tiny", "--data", "synthetic", "--seq-len", "8",
        "--batch-size", "4", "--steps", "100000", "--device", "cpu", "--compile", "off", "--plan", "dp=2",
        "--no-export", "--progress", "plain", "--log-every", "100000", "--out", str(out), *options,
    ]  # fmt: skip
    scratch.mkdir()
    return Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment(OMP_NUM_THREADS="1", TMPDIR=str(scratch)),
    )  # fmt: skip


def steps(out: Path) -> list[int]:
    log = out / "log-rank0.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [record["step"] for record in records if record["kind"] == "step"]


def until_step(number: int, process: subprocess.Popen[str], out: Path) -> None:
    deadline = time.monotonic() + 120
    while max(steps(out), default=0) < number:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def said_after_the_supervisor_was_killed(process: subprocess.Popen[str], out: Path) -> str:
    """All that its ranks write until the last of them has ended: only then the pipe closes."""
    until_step(3, process, out)
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    return said


def servers(process: subprocess.Popen[str]) -> list[int]:
    """Fork servers lead sessions of their own."""
    return [pid for pid in children_of(process.pid) if os.getsid(pid) == pid]


def children_of(pid: int) -> list[int]:
    return [int(found) for path in Path(f"/proc/{pid}/task").glob("*/children") for found in path.read_text().split()]


def test_ranks_whose_supervisor_is_killed_save_and_say_how_to_go_on(tmp_path: Path) -> None:
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    said = said_after_the_supervisor_was_killed(start(out, scratch, "--checkpoint-every", "0"), out)
    saved, step = latest(out / "checkpoints"), max(steps(out))
    assert saved is not None and saved.name == f"step-{step:08}"
    assert "the process that started this run is gone: its ranks finish their step, save and end" in said
    assert f"stopped by SIGTERM after step {step} of 100000, saved in {saved}; go on with --resume auto" in said
    assert "Traceback" not in said and not list(scratch.glob("phalanx*"))


@pytest.mark.long
def test_ranks_whose_supervisor_is_killed_and_that_are_not_to_save_say_so(tmp_path: Path) -> None:
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    options = ("--checkpoint-every", "never", "--on-loss", "shrink")
    said = said_after_the_supervisor_was_killed(start(out, scratch, *options), out)
    assert f"after step {max(steps(out))} of 100000, not saved (checkpoint_every = never)" in said
    assert latest(out / "checkpoints") is None and "Traceback" not in said and not list(scratch.glob("phalanx*"))


@pytest.mark.long
def test_ranks_whose_fork_server_and_then_supervisor_are_killed_save_as_well(tmp_path: Path) -> None:
    """The server that took the place of the first looks after ranks that it did not fork."""
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    process = start(out, scratch, "--checkpoint-every", "0")
    until_step(1, process, out)
    (first,) = servers(process)
    others = children_of(first)
    os.kill(first, signal.SIGKILL)
    while not (found := servers(process)) or found == [first]:
        time.sleep(0.01)
    said = said_after_the_supervisor_was_killed(process, out)
    assert "the process that starts ranks was killed by signal SIGKILL; another takes its place" in said
    saved, step = latest(out / "checkpoints"), max(steps(out))
    assert f"stopped by SIGTERM after step {step} of 100000, saved in {saved}; go on with --resume auto" in said
    assert "Traceback" not in said and not list(scratch.glob("phalanx*"))
    assert len(others) == 3 and not any(is_alive(pid) for pid in others)


def test_ranks_whose_fork_server_and_supervisor_are_killed_at_once_end(tmp_path: Path) -> None:
    out, scratch = tmp_path / "run", tmp_path / "scratch"
    process = start(out, scratch, "--checkpoint-every", "0")
    until_step(1, process, out)
    (server,) = servers(process)
    others = children_of(server)
    for pid in (server, process.pid):
        os.kill(pid, signal.SIGSTOP)
    for pid in (server, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in others) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(others) == 3 and not any(is_alive(pid) for pid in others)


def test_a_rank_that_does_not_follow_the_others_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "_FOLLOW_SECONDS", 0.2)
    board = StatusBoard.create(tmp_path / "board", 2)
    for slot in board.slots:
        slot.enter("step")
    pids = [os.posix_spawn("/bin/sh", ["sh", "-c", f"{trap}; {wait}"], os.environ) for trap, wait in SHELLS]
    time.sleep(0.3)
    assert wards(*pids).let_go(tmp_path) == 1
    assert not tmp_path.exists()
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_a_process_that_comes_to_a_run_keeps_no_rank_from_saving(tmp_path: Path) -> None:
    """It holds nothing, would leave at once when it was asked to, and ends with the others."""
    board = StatusBoard.create(tmp_path / "board", 3)
    for slot in board.slots[:2]:
        slot.enter("step")
        slot.guard(True)
    marks = [tmp_path.with_name(f"left{rank}") for rank in range(3)]
    shells = [f"trap 'touch {mark}; exit 0' TERM; while true; do sleep 0.05; done" for mark in marks]
    pids = [os.posix_spawn("/bin/sh", ["sh", "-c", shell], os.environ) for shell in shells]
    time.sleep(0.3)
    assert wards(*pids).let_go(tmp_path) == 1
    assert [mark.exists() for mark in marks] == [True, True, False] and not any(map(is_alive, pids))


def test_ranks_of_a_pool_that_have_nothing_to_do_keep_no_others_from_saving(tmp_path: Path) -> None:
    board = StatusBoard.create(tmp_path / "board", 3)
    board.reset()
    for slot in board.slots[:2]:
        slot.enter("step")
    assert orphans._training(range(3), tmp_path) == [0, 1]
    board.slots[1].enter("capture")
    assert orphans._training(range(3), tmp_path) == []


def wards(*pids: int) -> orphans.Wards:
    found = orphans.Wards()
    for rank, pid in enumerate(pids):
        found.add(pid, rank)
    return found


SHELLS = [
    ("trap 'exit 0' TERM", "while true; do sleep 0.05; done"),
    ("trap '' TERM", "while true; do sleep 0.05; done"),
]


def test_ranks_that_do_not_train_are_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans.Wards, "_wait", pytest.fail)
    StatusBoard.create(tmp_path / "board", 2)
    pid, other = (os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ) for _ in range(2))
    found = orphans.Wards({1: Handle(other)})
    found.add(pid, 0)
    assert found.let_go(tmp_path) == 0
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == -signal.SIGKILL

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
from phalanx.launch.status_board import StatusBoard
from phalanx.state.folders import latest
from tests.children import ROOT, Popen, environment


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


def said_after_the_supervisor_was_killed(process: subprocess.Popen[str], out: Path) -> str:
    """All that its ranks write until the last of them has ended: only then the pipe closes."""
    deadline = time.monotonic() + 120
    while max(steps(out), default=0) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=120)
    return said


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


def test_a_rank_that_does_not_follow_the_others_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "_FOLLOW_SECONDS", 0.2)
    board = StatusBoard.create(tmp_path / "board", 2)
    for slot in board.slots:
        slot.enter("step")
    pids = [os.posix_spawn("/bin/sh", ["sh", "-c", f"{trap}; {wait}"], os.environ) for trap, wait in SHELLS]
    time.sleep(0.3)
    assert orphans.let_go({pid: rank for rank, pid in enumerate(pids)}, tmp_path) == 1
    assert not tmp_path.exists()
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


SHELLS = [
    ("trap 'exit 0' TERM", "while true; do sleep 0.05; done"),
    ("trap '' TERM", "while true; do sleep 0.05; done"),
]


def test_ranks_that_do_not_train_are_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "_wait", pytest.fail)
    StatusBoard.create(tmp_path / "board", 1)
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ)
    assert orphans.let_go({pid: 0}, tmp_path) == 0

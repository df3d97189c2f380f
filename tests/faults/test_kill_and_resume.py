"""Real processes that are killed or told to stop, and go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.state import checkpoint
from tests import children
from tests.run_helpers import losses, records, short_run

# Dropout (GPT-2 has it), accumulation, and batches that end inside an epoch.
OPTIONS = {
    "model": "gpt2", "data": "synthetic:7", "steps": 28, "seq_len": 16, "batch_size": 4, "plan": "mb=3", "lr": 0.01,
    "checkpoint_every": 3, "warmup_steps": 5,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def captured_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The capture is made here, unchecked, instead of in every process."""
    short_run("gpt2", "synthetic:7", tmp_path_factory.mktemp("first"), steps=1, export=False)


def started(out: Path, **options: object) -> subprocess.Popen[str]:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**OPTIONS, **options, "out": out}.items()]
    return children.Popen(
        [sys.executable, "-m", "phalanx", "train", "--tiny", "--json", "--resume=auto", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip


def finished(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return out, err


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        record = json.loads(line)
        if record["kind"] == "step" and record["step"] == step:
            return
    raise AssertionError(f"the run ended before step {step}: {process.communicate()[1]}")


def test_a_killed_run_goes_on_with_the_losses_of_one_that_never_stopped(tmp_path: Path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    victim = started(cut)
    step = random.randrange(6, 16)
    wait_for_step(victim, step)
    victim.send_signal(signal.SIGKILL)
    finished(victim, -signal.SIGKILL)
    assert max(losses(cut)) < 28, "killed too late to mean anything"
    options = {name: value for name, value in OPTIONS.items() if name not in ("model", "data")}
    for folder in (whole, cut):
        short_run("gpt2", OPTIONS["data"], folder, **options, resume="auto")

    first, second = records(cut, "start")
    assert first["first_step"] == 0 and second["first_step"] > 0, f"killed at {step}, nothing resumed"
    assert sorted(losses(cut)) == list(range(1, 29))
    assert losses(cut) == losses(whole)
    weights = "export/model.safetensors"
    assert (cut / weights).read_bytes() == (whole / weights).read_bytes()


def test_sigterm_lets_the_run_save_and_leave_with_143(tmp_path: Path):
    process = started(tmp_path, steps=5000, checkpoint_every=0)
    wait_for_step(process, 3)
    process.send_signal(signal.SIGTERM)
    out, err = finished(process, 143)
    last = json.loads(out.splitlines()[-1])
    saved = checkpoint.latest(tmp_path / "checkpoints")
    assert saved is not None and "stopped by SIGTERM after step" in last["text"] and str(saved) in last["text"]
    assert "SIGTERM: finishing this step and saving" in err
    assert records(tmp_path, "stop")[0]["step"] == max(losses(tmp_path)) == checkpoint.open(saved).step
    assert not (tmp_path / "export").exists()


class Interrupt:
    """Presses Ctrl-C during the third step."""

    def __init__(self, times: int) -> None:
        self.times = times

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.5)


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """As in a terminal; whoever starts tests in the background has Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals reach main threads only")
@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_saves_what_was_trained_and_a_second_one_stops_at_once(tmp_path: Path):
    for times, folder in ((1, tmp_path / "once"), (2, tmp_path / "twice")):
        with pytest.raises(KeyboardInterrupt):
            short_run("gpt2", "synthetic:7", folder, steps=9, callbacks=[Interrupt(times)])
    saved = checkpoint.latest(tmp_path / "once" / "checkpoints")
    assert saved is not None and checkpoint.open(saved).step == 3
    assert checkpoint.latest(tmp_path / "twice" / "checkpoints") is None
    resumed = short_run("gpt2", "synthetic:7", tmp_path / "once", steps=9, resume="auto", export=False)
    assert len(resumed.losses) == 6

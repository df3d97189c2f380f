"""Training whose ranks are killed, stopped or fail at chosen moments: it ends in seconds, says who, where and why,
and goes on from the last checkpoint as if nothing had happened."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.errors import RankError
from phalanx.launch.status_board import StatusBoard
from phalanx.launch.worker_pool import WorkerPool
from phalanx.state import checkpoint
from tests.children import Popen
from tests.faults import strike
from tests.faults.ranks import Breaks, fit
from tests.faults.strike import Striker, Wanted, is_alive
from tests.run_helpers import SHORT, losses, records, short_run

ROOT = Path(__file__).parents[2]
DATA = "synthetic:7"
ENDLESS = 100_000
OPTIONS = {
    "batch_size": 4, "lr": 3e-3, "lr_schedule": "constant", "warmup_steps": 2, "checkpoint_every": 2, "export": False,
    "resume": "auto", "device": "cpu",
}  # fmt: skip
PIPELINE, REPLICAS, SPLIT = "pp=2,mb=2", "dp=2,zero=1", "tp=2"
PLACES = {
    PIPELINE: "rank 1 (stage 1)",
    REPLICAS: "rank 1 (stage 0, replica 1)",
    SPLIT: "rank 1 (stage 0, tensor part 1)",
}


@pytest.fixture(scope="module", autouse=True)
def captured_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The capture is made here, unchecked, instead of by the ranks."""
    short_run("gpt2", DATA, tmp_path_factory.mktemp("first"), **{**OPTIONS, "steps": 2})


@pytest.fixture(scope="module")
def undisturbed(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(plan, steps) → step → loss of a run that nothing happened to; it goes on where it was when more is asked for."""
    folders = {plan: tmp_path_factory.mktemp("undisturbed") for plan in PLACES}

    def run(plan: str, steps: int) -> dict[int, float]:
        if not (folders[plan] / "log-rank0.jsonl").exists() or max(losses(folders[plan])) < steps:
            fit(pool, folders[plan], "gpt2", DATA, **{**OPTIONS, "plan": plan, "steps": steps, "checkpoint_every": 0})
        return {step: loss for step, loss in losses(folders[plan]).items() if step <= steps}

    return run


def at_work(pool: WorkerPool) -> tuple[StatusBoard, dict[int, int]] | None:
    """The pool's board and processes, once both ranks train."""
    started = len(pool.pids) >= 2 and all(slot.read().phase == "step" for slot in pool._board.slots[:2])
    return (pool._board, pool.pids) if started else None


def require_intact(out: Path) -> int:
    """The step of the newest checkpoint, every byte of which is checked."""
    newest = checkpoint.latest(out / "checkpoints")
    assert newest is not None
    return checkpoint.open(newest).step


def hit(pool: WorkerPool, out: Path, plan: str, wanted: Wanted, number: int) -> tuple[str, Striker]:
    """Trains until rank 1 is hit; the message, and how it was hit."""
    striker = Striker(lambda: at_work(pool), 1, wanted, number)
    with pytest.raises(RankError) as caught:
        fit(pool, out, "gpt2", DATA, **{**OPTIONS, "plan": plan, "steps": ENDLESS})
    seconds = time.monotonic() - striker.at
    assert striker.view is not None, caught.value
    assert seconds < (15 if number == signal.SIGSTOP else 10)
    assert not any(is_alive(pid) for pid in striker.pids.values())
    return caught.value.message, striker


def require_as_if_nothing_happened(pool: WorkerPool, out: Path, plan: str, undisturbed: Any) -> None:
    saved = require_intact(out)
    steps = saved + 3
    assert saved % 2 == 0
    fit(pool, out, "gpt2", DATA, **{**OPTIONS, "plan": plan, "steps": steps})
    assert records(out, "start")[-1]["first_step"] == saved
    found = {step: loss for step, loss in losses(out).items() if step <= steps}
    assert found == undisturbed(plan, steps)


long = pytest.mark.long
MOMENTS = [
    (PIPELINE, "STEP", signal.SIGKILL), (REPLICAS, "B", signal.SIGSTOP),
    pytest.param(SPLIT, "F", signal.SIGKILL, marks=long),
    pytest.param(SPLIT, "B", signal.SIGSTOP, marks=long),
    pytest.param(PIPELINE, "F", signal.SIGKILL, marks=long),
    pytest.param(PIPELINE, "B", signal.SIGSTOP, marks=long),
    pytest.param(REPLICAS, "B", signal.SIGKILL, marks=long),
    pytest.param(PIPELINE, "B", signal.SIGKILL, marks=long),
    pytest.param(PIPELINE, "F", signal.SIGSTOP, marks=long),
    pytest.param(PIPELINE, "STEP", signal.SIGSTOP, marks=long),
    pytest.param(REPLICAS, "F", signal.SIGKILL, marks=long),
    pytest.param(REPLICAS, "F", signal.SIGSTOP, marks=long),
    pytest.param(REPLICAS, "STEP", signal.SIGKILL, marks=long),
    pytest.param(REPLICAS, "STEP", signal.SIGSTOP, marks=long),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "instruction", "number"), MOMENTS)
def test_a_rank_lost_in_a_step_is_named_with_its_stage_and_instruction_and_the_run_goes_on(
    plan: str, instruction: str, number: signal.Signals, pool: WorkerPool, tmp_path: Path, undisturbed: Any
):
    message, striker = hit(pool, tmp_path, plan, strike.at(instruction), number)
    how = "stopped answering for 5 s" if number == signal.SIGSTOP else "was killed by signal SIGKILL"
    seen = striker.view
    assert seen is not None and seen.instruction.startswith(instruction)
    said, title, *ranks = message.splitlines()
    assert said == f"{PLACES[plan]} {how} in step {seen.step} at {seen.instruction}"
    assert title.strip() == "the last instructions of every rank, the newest last:"
    assert len(ranks) == 2 and ranks[1].strip().startswith(f"rank 1, step {seen.step}: ")
    assert ranks[1].endswith(f" {seen.instruction}")
    require_as_if_nothing_happened(pool, tmp_path, plan, undisturbed)


@pytest.mark.parametrize(
    ("plan", "number"),
    [
        (PIPELINE, signal.SIGKILL),
        pytest.param(REPLICAS, signal.SIGKILL, marks=long),
        pytest.param(PIPELINE, signal.SIGSTOP, marks=long),
        pytest.param(REPLICAS, signal.SIGSTOP, marks=long),
    ],
)
def test_a_rank_lost_while_it_writes_a_checkpoint_leaves_the_one_before_intact(
    plan: str, number: signal.Signals, pool: WorkerPool, tmp_path: Path, undisturbed: Any
):
    message, striker = hit(pool, tmp_path, plan, strike.saving(tmp_path, rank=1), number)
    assert striker.view is not None
    how = "stopped answering for" if number == signal.SIGSTOP else "was killed by signal SIGKILL"
    assert message.startswith(f"{PLACES[plan]} {how}") and f" step {striker.view.step}" in message
    # Writing goes on behind the next steps, so the one that was interrupted is of this step or the one before.
    assert require_intact(tmp_path) < striker.view.step
    require_as_if_nothing_happened(pool, tmp_path, plan, undisturbed)


def test_an_error_of_one_rank_ends_all_and_is_told_with_its_place(pool: WorkerPool, tmp_path: Path):
    options = {**OPTIONS, "plan": REPLICAS, "steps": 9, "shuffle": False}
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        # Samples 18 and 19 are the second replica's part of step 5.
        fit(pool, tmp_path, "gpt2", Breaks(40, broken=18), **options)
    assert time.monotonic() - began < 30
    first = caught.value.message.splitlines()[0]
    assert first == "rank 1 (stage 0, replica 1) failed in step 5: OSError: sample 18 cannot be read"
    assert require_intact(tmp_path) == 4


class Signals:
    """Presses Ctrl-C, or what `number` stands for, when step 3 is reported."""

    def __init__(self, number: signal.Signals, times: int) -> None:
        self._number, self._times = number, times

    def __call__(self, hook: str, given: Any) -> None:
        if hook == "on_step" and given[0]["step"] == 3:
            for _ in range(self._times):
                signal.raise_signal(self._number)
                signal.raise_signal(self._number)  # as one who tells every process of a job does
                time.sleep(0.5)


@pytest.mark.parametrize("plan", PLACES)
def test_ctrl_c_stops_all_ranks_after_the_same_step_and_saves_it(plan: str, pool: WorkerPool, tmp_path: Path):
    options = {**OPTIONS, "plan": plan, "steps": ENDLESS, "checkpoint_every": 0}
    with pytest.raises(KeyboardInterrupt):
        fit(pool, tmp_path, "gpt2", DATA, on_event=Signals(signal.SIGINT, 1), **options)
    (stopped,) = records(tmp_path, "stop")
    assert stopped["signal"] == "SIGINT" and stopped["step"] >= 3
    assert require_intact(tmp_path) == stopped["step"] == max(losses(tmp_path)) == max(losses(tmp_path, rank=1))


def test_a_second_ctrl_c_ends_the_ranks_at_once(pool: WorkerPool, tmp_path: Path):
    options = {**OPTIONS, "plan": PIPELINE, "steps": ENDLESS, "checkpoint_every": 0}
    with pytest.raises(KeyboardInterrupt):
        fit(pool, tmp_path, "gpt2", DATA, on_event=Signals(signal.SIGINT, 2), **options)
    assert pool.pids == {} and checkpoint.latest(tmp_path / "checkpoints") is None


def test_sigterm_while_the_run_is_prepared_ends_it_with_143(pool: WorkerPool, tmp_path: Path):
    def interrupt() -> None:
        while pool._board.slots[0].read().phase != "capture":
            time.sleep(1e-4)
        os.kill(os.getpid(), signal.SIGTERM)

    pool._board.reset()  # of the run before
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(SystemExit) as caught:
        fit(pool, tmp_path, "gpt2", DATA, **{**OPTIONS, "plan": PIPELINE, "steps": ENDLESS})
    assert caught.value.code == 143 and pool.pids == {}


class Command:
    """`phalanx train` in a process of its own, with the board and the ranks it started."""

    def __init__(self, out: Path, **options: object) -> None:
        self._scratch = out.parent / f"{out.name}-scratch"
        self._scratch.mkdir(exist_ok=True)
        given = {**SHORT, **OPTIONS, "model": "gpt2", "data": DATA, "plan": PIPELINE, **options, "out": out}
        given |= {"progress": "plain", "log_every": 10 * ENDLESS}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if not isinstance(value, bool)]
        flags += [f"--{'' if value else 'no-'}{name}" for name, value in given.items() if isinstance(value, bool)]
        self.process = Popen(
            [sys.executable, "-m", "phalanx", "train", *flags], cwd=ROOT, text=True, stderr=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._scratch)},
        )  # fmt: skip

    def at_work(self) -> tuple[StatusBoard, dict[int, int]] | None:
        """Rank 0 writes to our pipe and rank 1 to a file of its own, which tells them apart."""
        boards = list(self._scratch.glob("phalanx-pool-*/board"))
        if not boards or boards[0].stat().st_size == 0:
            return None
        board = StatusBoard.open(boards[0])
        if any(slot.read().phase != "step" for slot in board.slots[:2]):
            return None
        (server,) = children(self.process.pid)
        outputs = {pid: os.readlink(f"/proc/{pid}/fd/1") for pid in children(server)}
        ranks = {1 if said.endswith("rank-1.log") else 0: pid for pid, said in outputs.items() if said != os.devnull}
        return board, {**ranks, -1: server}

    def ended(self, code: int) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == code, err
        assert not list(self._scratch.iterdir()), "files were left behind"
        return out, err


@pytest.mark.parametrize("plan", ["mb=1", pytest.param(PIPELINE, marks=long)])
def test_a_terminal_that_is_closed_lets_the_step_finish_and_saves_it(plan: str, tmp_path: Path):
    ours, theirs = pty.openpty()
    given = {**SHORT, **OPTIONS, "model": "gpt2", "data": DATA, "plan": plan, "steps": ENDLESS, "out": tmp_path / "run"}
    given |= {"progress": "rich", "checkpoint_every": 0}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if not isinstance(value, bool)]
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", "train", *flags, "--tiny", "--no-export"], cwd=ROOT, stdin=theirs,
        stdout=theirs, stderr=theirs, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=get_a_terminal,
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    log, deadline = tmp_path / "run" / "log-rank0.jsonl", time.monotonic() + 120
    while not (log.exists() and '"step": 3,' in log.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 65536)  # a terminal that nobody reads holds its writers up
        time.sleep(0.05)
    os.close(ours)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    (stopped,) = records(tmp_path / "run", "stop")
    assert stopped["signal"] == "SIGHUP" and require_intact(tmp_path / "run") == stopped["step"] >= 3


def get_a_terminal() -> None:
    """Standard input becomes the terminal of this process's session, whose end it hears of, also under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def under_way(command: Command) -> tuple[StatusBoard, dict[int, int]]:
    deadline = time.monotonic() + 120
    while (found := command.at_work()) is None:
        assert command.process.poll() is None, command.process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_the_command_tells_of_a_killed_rank_in_one_sentence_and_goes_on_until_it_is_told_to_stop(
    pool: WorkerPool, tmp_path: Path, undisturbed: Any
):
    out = tmp_path / "run"
    command = Command(out, steps=ENDLESS)
    board, pids = under_way(command)
    seen = strike.strike(board, 1, pids[1], strike.at("F"), signal.SIGKILL)
    began = time.monotonic()
    _, err = command.ended(2)
    assert time.monotonic() - began < 15
    assert not any(is_alive(pid) for pid in pids.values())
    said, title, *ranks, advice = err.splitlines()
    assert said == f"error: rank 1 (stage 1) was killed by signal SIGKILL in step {seen.step} at {seen.instruction}"
    assert title.strip() == "the last instructions of every rank, the newest last:" and len(ranks) == 2
    assert advice == (
        "  → not for lack of memory, by the kernel's count of such kills: a person, a scheduler or a program sent it"
    )
    require_intact(out)

    command = Command(out, steps=ENDLESS)
    _, pids = under_way(command)
    command.process.send_signal(signal.SIGTERM)
    said, err = command.ended(143)
    assert not any(is_alive(pid) for pid in pids.values())
    step = require_intact(out)
    assert re.search(rf"stopped by SIGTERM after step {step} of {ENDLESS}, saved in \S+step-{step:08}", said)
    assert err == "\nSIGTERM: finishing this step and saving; once more stops at once\n"
    assert step == max(losses(out, rank=1)) and losses(out) == undisturbed(PIPELINE, step)

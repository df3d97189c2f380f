"""Ranks that are killed, stopped or fail: the job ends in seconds, the culprit is named, nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.errors import RankError
from phalanx.launch.memory_kills import memory_kills
from phalanx.launch.worker_pool import WorkerPool
from tests import children
from tests.faults.strike import is_alive
from tests.launch import jobs
from tests.launch.test_worker_pool import main_thread_only, signal_when_under_way

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(3, threads_per_rank=1, device="cpu", preload=jobs.LIGHT, silence=5.0) as pool:
        yield pool


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


class Blow(threading.Thread):
    """Sends a signal to one rank as soon as all are on their way, and notes when."""

    def __init__(self, pool: WorkerPool, folder: Path, rank: int, number: int) -> None:
        super().__init__()
        self.pool, self.folder, self.rank, self.number = pool, folder, rank, number
        self.pids: dict[int, int] = {}
        self.at = 0.0

    def run(self) -> None:
        wait_for(lambda: len(list(self.folder.iterdir())) == 3)
        self.pids = self.pool.pids
        self.at = time.monotonic()
        os.kill(self.pids[self.rank], self.number)


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("collective", signal.SIGKILL), ("messages", signal.SIGSTOP), ("collective", signal.SIGSEGV),
        pytest.param("collective", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("messages", signal.SIGKILL, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_lost_rank_is_named_and_the_others_end(pool: WorkerPool, tmp_path: Path, how: str, number: signal.Signals):
    blow = Blow(pool, tmp_path, 1, number)
    blow.start()
    with pytest.raises(RankError) as caught:
        pool.run(jobs.forever, str(tmp_path), how)
    seconds = time.monotonic() - blow.at
    blow.join()
    what = "stopped answering for 5 s" if number == signal.SIGSTOP else f"was killed by signal {number.name}"
    message = caught.value.message
    assert message.startswith(f"rank 1 (stage 1) {what} in step ") and "F1." in message, message
    assert seconds < (10 if number == signal.SIGSTOP else 5)
    assert blow.pids
    wait_for(lambda: not any(alive(pid) for pid in blow.pids.values()), 5.0)
    if number == signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in message
    if number == signal.SIGKILL:
        assert caught.value.hint.startswith("not for lack of memory, by the kernel's count")
    if number == signal.SIGSTOP:
        assert caught.value.hint.startswith("its process was stopped by a signal (kill -CONT ")


@pytest.mark.parametrize(
    ("before", "after", "hint"),
    [
        ({"control group": 2, "machine": 5}, {"control group": 3, "machine": 6}, "memory ran out: the kernel counts"),
        ({"control group": 2, "machine": 5}, {"control group": 2, "machine": 6}, "memory may have run out: the kernel"),
        ({"machine": 5}, {"machine": 5}, "not for lack of memory"),
        ({}, {}, "the kernel does not say here whether memory ran out"),
    ],
)
def test_a_kill_is_called_lack_of_memory_only_where_the_kernel_counted_one(
    before: dict[str, int], after: dict[str, int], hint: str, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
):
    counts = iter((before, after))
    monkeypatch.setattr("phalanx.launch.watch.memory_kills", lambda: next(counts))
    with pytest.raises(RankError, match="was killed by signal SIGKILL") as caught:
        pool.run(jobs.kills_itself, world=1)
    assert caught.value.hint.startswith(hint)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts them")
def test_the_kernel_says_how_many_processes_it_ended_for_lack_of_memory():
    assert memory_kills()["machine"] >= 0


def test_a_silent_rank_is_told_with_where_it_stands(tmp_path: Path):
    with (
        WorkerPool(2, threads_per_rank=1, device="cpu", preload=jobs.LIGHT, silence=1.5) as pool,
        pytest.raises(RankError) as caught,
    ):
        pool.run(jobs.keeps_all_threads_waiting, 1)
    first, second, *stack = caught.value.message.splitlines()
    assert first == "rank 1 stopped answering for 2 s in step 4"
    assert second == "  where it stands, the innermost call first:"
    assert "in keeps_all_threads_waiting" in stack[0] and "a larger silence waits longer" in caught.value.hint


SUSPENDED = """
from phalanx.launch.memory_kills import memory_kills
from phalanx.launch.worker_pool import WorkerPool
from tests.launch import jobs
from tests.launch.test_worker_pool import main_thread_only, signal_when_under_way
with WorkerPool(2, threads_per_rank=1, device="cpu", preload=jobs.LIGHT, silence=1.0) as pool:
    pool.run(jobs.describe)
    print(*pool.pids.values(), pool._processes._server.pid, flush=True)
    print(pool.run(jobs.steps, {folder!r}, 100), flush=True)
"""


def test_a_job_that_is_suspended_and_continued_lives(tmp_path: Path):
    parent = children.Popen(
        [sys.executable, "-c", SUSPENDED.format(folder=str(tmp_path))], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=children.environment(),
    )  # fmt: skip
    assert parent.stdout is not None
    pids = [parent.pid, *map(int, parent.stdout.readline().split())]
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    for number, seconds in ((signal.SIGSTOP, 4.0), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds)
    out, _ = parent.communicate(timeout=60)
    assert (parent.returncode, out) == (0, "[100, 100]\n")


@main_thread_only
def test_signals_reach_ranks_whose_fork_server_is_stopped(tmp_path: Path):
    with WorkerPool(2, threads_per_rank=1, device="cpu", preload=jobs.LIGHT) as pool:
        pool.run(jobs.describe)
        pids, server = list(pool.pids.values()), pool._processes._server.pid
        os.kill(server, signal.SIGSTOP)
        sender = signal_when_under_way(tmp_path, 2, signal.SIGTERM)
        assert pool.run(jobs.waits_for_signal, str(tmp_path), 0) == ["SIGTERM", "SIGTERM"]
        sender.join()
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert not any(alive(pid) for pid in [*pids, server])


def test_a_rank_that_ends_while_the_fork_server_is_stopped_is_named(tmp_path: Path):
    with WorkerPool(2, threads_per_rank=1, device="cpu", preload=jobs.LIGHT) as pool:
        pool.run(jobs.describe)
        os.kill(pool._processes._server.pid, signal.SIGSTOP)
        with pytest.raises(RankError, match="rank 1 left with exit code 7 during start"):
            pool.run(jobs.leaves_by_exit)


def test_an_exception_is_told_with_its_place_and_the_last_output(pool: WorkerPool):
    with pytest.raises(RankError) as caught:
        pool.run(jobs.one_raises, 1)
    assert caught.value.message.splitlines() == [
        "rank 1 (stage 1) failed in step 2 at B1.2: ZeroDivisionError: integer division or modulo by zero",
        "  the last it wrote (rank 1):",
        "    about to divide",
    ]
    assert caught.value.hint == "PHALANX_DEBUG=1 shows the traceback"


def test_debugging_shows_the_traceback_of_the_rank(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PHALANX_DEBUG", "1")
    with pytest.raises(RankError) as caught:
        pool.run(jobs.one_raises, 0)
    assert "_ = 1 // 0" in caught.value.message and caught.value.hint == ""


def test_a_rank_that_leaves_by_itself_is_named(pool: WorkerPool):
    with pytest.raises(RankError, match="rank 1 left with exit code 7 during start"):
        pool.run(jobs.leaves_by_exit, world=2)


def test_an_error_about_a_rank_keeps_its_words(pool: WorkerPool):
    with pytest.raises(RankError, match="rank 0 failed during start: rank 0 gave up"):
        pool.run(jobs.rank_error, world=1)


def test_after_a_failure_the_pool_goes_on_with_fresh_ranks(pool: WorkerPool):
    before = pool.run(jobs.describe)
    with pytest.raises(RankError):
        pool.run(jobs.one_raises, 2)
    after = pool.run(jobs.describe)
    assert not {result[5] for result in before} & {result[5] for result in after}


def test_the_end_of_the_process_that_holds_the_store_is_told(tmp_path: Path):
    with WorkerPool(2, threads_per_rank=1, device="cpu", preload=jobs.LIGHT) as pool:
        pool.run(jobs.describe)
        killer = threading.Thread(target=kill_when_under_way, args=(tmp_path, pool._processes._store.pid))
        killer.start()
        with pytest.raises(RankError, match="the process that holds the store of the ranks was ended, and the ranks"):
            pool.run(jobs.ignores_signals, str(tmp_path))
        killer.join()
        assert [result[0] for result in pool.run(jobs.describe)] == [0, 1], "the next job has another store"


def kill_when_under_way(folder: Path, pid: int) -> None:
    wait_for(lambda: len(list(folder.iterdir())) == 2)
    os.kill(pid, signal.SIGKILL)


def children_of(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(line) for line in listing.stdout.split()]


def test_ranks_outlive_their_fork_server_and_end_with_the_pool():
    with WorkerPool(2, threads_per_rank=1, device="cpu", preload=jobs.LIGHT) as pool:
        pool.run(jobs.describe)
        pids, server = list(pool.pids.values()), pool._processes._server.pid
        assert sorted(children_of(server)) == sorted([*pids, pool._processes._store.pid])
        os.kill(server, signal.SIGKILL)
        assert [result[5] for result in pool.run(jobs.describe)] == pids
        store, folder, server = pool._processes._store.pid, pool._folder, pool._processes._server.pid
    assert not any(is_alive(pid) for pid in [*pids, store, server]) and not folder.exists()


def test_a_fork_server_that_ends_when_it_is_needed_is_tried_again_a_few_times(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """One that cannot import what ranks need, and then one that can."""
    with WorkerPool(1, threads_per_rank=1, device="cpu", preload=("no_such_module",)) as pool:
        with pytest.raises(RankError, match="the process that starts ranks ended or does not answer"):
            pool.run(jobs.describe)
        assert capfd.readouterr().err.count("left with exit code 1; another takes its place") == 2
        monkeypatch.setattr(pool._processes, "_preload", jobs.LIGHT)
        assert len(pool.run(jobs.describe)) == 1


def test_ranks_do_not_outlive_the_process_that_started_them(tmp_path: Path):
    code = (
        "from phalanx.launch.worker_pool import WorkerPool\nfrom tests.launch import jobs\n"
        "with WorkerPool(2, threads_per_rank=1, device='cpu', preload=jobs.LIGHT) as pool:\n"
        "    print(*(result[5] for result in pool.run(jobs.describe)), pool._processes._server.pid, flush=True)\n"
        f"    pool.run(jobs.ignores_signals, {str(tmp_path)!r})\n"
    )
    parent = children.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=children.environment(),
    )  # fmt: skip
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    parent.kill()
    parent.communicate()
    wait_for(lambda: not any(alive(pid) for pid in pids), 5)


def test_a_rank_that_lives_and_does_not_come_to_meet_the_others_after_a_loss_is_lost_too():
    with WorkerPool(3, threads_per_rank=1, device="cpu", preload=jobs.LIGHT, silence=3.0) as pool:
        ((first, told),) = pool.run(jobs.alone_at_last, on_loss="shrink")
    words = r"rank 0 did not leave what it was at in \d+ s, to go on with the others, in step 1"
    assert re.fullmatch(words, told), told
    assert first == "rank 0 was killed by signal SIGKILL in step 1"  # which nobody had told of by then

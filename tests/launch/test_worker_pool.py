"""A worker pool of real processes: jobs, results, events, signals."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.errors import ConfigError, RankError
from phalanx.launch.process import Process
from phalanx.launch.signals import stop_request
from phalanx.launch.wire import Wire
from phalanx.launch.worker_pool import WorkerPool
from tests.launch import jobs


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(3, threads_per_rank=1, device="cpu", preload=jobs.LIGHT) as pool:
        yield pool


def test_every_rank_gets_its_context_and_the_arguments(pool: WorkerPool):
    argument = {"a": torch.arange(3)}
    results = pool.run(jobs.describe, argument)
    assert [result[:4] for result in results] == [(rank, 3, rank, "cpu") for rank in range(3)]
    assert len({result[5] for result in results}) == 3
    assert all(torch.equal(result[6][0]["a"], argument["a"]) for result in results)


def test_ranks_stay_for_the_next_job_which_has_a_generation_of_its_own(pool: WorkerPool):
    first, second = pool.run(jobs.describe), pool.run(jobs.describe)
    assert [result[5] for result in first] == [result[5] for result in second]
    assert {result[4] for result in second} == {first[0][4] + 1}


def test_a_job_may_use_fewer_ranks(pool: WorkerPool):
    assert [result[:2] for result in pool.run(jobs.describe, world=2)] == [(0, 2), (1, 2)]


def test_ranks_see_the_environment_and_folder_as_they_are_when_the_job_starts(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("PHALANX_TEST_WORD", "first")
    assert pool.run(jobs.environment, "PHALANX_TEST_WORD", world=1)[0][0] == "first"
    monkeypatch.delenv("PHALANX_TEST_WORD")
    monkeypatch.chdir(tmp_path)
    assert pool.run(jobs.environment, "PHALANX_TEST_WORD", world=1) == [(None, str(tmp_path), 1)]


def test_events_reach_the_caller_in_order(pool: WorkerPool):
    came: list[tuple[str, int, int]] = []
    pool.run(
        jobs.emits, 20, on_event=lambda name, value: came.append((name, value["number"], len(value["payload"])))
    )  # fmt: skip
    assert came == [("step", number, 100_000) for number in range(20)]


def test_an_error_in_an_event_handler_ends_the_job(pool: WorkerPool):
    def refuse(name: str, value: Any) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError, match="step"):
        pool.run(jobs.emits, 1, on_event=refuse)
    assert pool.pids == {}


def test_a_users_mistake_is_raised_as_it_would_be_without_ranks(pool: WorkerPool):
    with pytest.raises(ConfigError) as caught:
        pool.run(jobs.misconfigured, (0, 1), world=2)
    assert str(caught.value) == "option lr = -1 is negative\n  → use a positive number"
    assert caught.value.hint == "use a positive number"


def test_a_mistake_that_only_another_rank_saw_names_it(pool: WorkerPool):
    with pytest.raises(ConfigError) as caught:
        pool.run(jobs.misconfigured, (1,), world=2)
    assert str(caught.value) == "rank 1: option lr = -1 is negative\n  → use a positive number"


def test_a_result_that_cannot_be_handed_back_is_named(pool: WorkerPool):
    with pytest.raises(RankError, match=r"rank [012] failed during start: .*pickle"):
        pool.run(jobs.unpicklable)


def signal_when_under_way(folder: Path, world: int, *numbers: int) -> threading.Thread:
    def send() -> None:
        while len(list(folder.iterdir())) < world:
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_process_that_ended_between_two_jobs_is_another_in_the_next(pool: WorkerPool):
    pool.run(jobs.describe, world=2)
    os.kill(pool.pids[1], signal.SIGKILL)
    time.sleep(0.2)
    assert [result[0] for result in pool.run(jobs.describe, world=2)] == [0, 1]


def test_a_job_for_a_process_that_has_just_ended_is_no_error_of_who_hands_it():
    """That it ended is noticed as ever."""
    ours, theirs = socket.socketpair()
    theirs.close()
    process = Process(0, os.getpid(), Wire(ours), None)
    process.hand("a job", (ours.fileno(),))
    process.close()


main_thread_only = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach main threads only"
)


@main_thread_only
def test_ctrl_c_is_passed_on_and_ranks_leave_in_their_own_time(pool: WorkerPool, tmp_path: Path):
    sender = signal_when_under_way(tmp_path, 2, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pool.run(jobs.waits_for_signal, str(tmp_path), 1, world=2)
    sender.join()


@main_thread_only
def test_sigterm_is_passed_on_with_the_exit_code_of_the_ranks(pool: WorkerPool, tmp_path: Path):
    sender = signal_when_under_way(tmp_path, 2, signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        pool.run(jobs.waits_for_signal, str(tmp_path), 143, world=2)
    assert caught.value.code == 143
    sender.join()


@main_thread_only
def test_ranks_that_handle_the_signal_themselves_return_their_results(pool: WorkerPool, tmp_path: Path):
    sender = signal_when_under_way(tmp_path, 2, signal.SIGINT)
    assert pool.run(jobs.waits_for_signal, str(tmp_path), 0, world=2) == ["SIGINT", "SIGINT"]
    sender.join()


@pytest.fixture
def hang_up() -> Iterator[Any]:
    """Sets what a hang-up does here until the test is over."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda does: signal.signal(signal.SIGHUP, does)
    signal.signal(signal.SIGHUP, before)


@main_thread_only
def test_a_hang_up_is_passed_on_as_well(pool: WorkerPool, hang_up: Any, tmp_path: Path):
    hang_up(signal.SIG_DFL)
    sender = signal_when_under_way(tmp_path, 2, signal.SIGHUP)
    assert pool.run(jobs.waits_for_signal, str(tmp_path), 0, world=2) == ["SIGHUP", "SIGHUP"]
    sender.join()


@main_thread_only
def test_a_hang_up_that_nohup_has_ignored_stays_so(hang_up: Any):
    hang_up(signal.SIG_IGN)
    with stop_request() as request:
        signal.raise_signal(signal.SIGHUP)
    assert request.signal is None


@main_thread_only
def test_a_second_ctrl_c_ends_ranks_that_do_not_listen_and_says_what_is_lost(
    pool: WorkerPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    sender = signal_when_under_way(tmp_path, 2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        pool.run(jobs.ignores_signals, str(tmp_path), world=2)
    sender.join()
    assert pool.pids == {}
    lost = "SIGINT: once more: stopping at once; the steps since the newest checkpoint are lost"
    assert capfd.readouterr().err.strip() == lost

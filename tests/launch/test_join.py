"""Joining ranks that torchrun, SLURM or MPI started: real processes, real stores."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.launch import monitor
from phalanx.launch.join import find_place, join
from tests import children

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
SLURM = {
    "SLURM_PROCID": "{rank}", "SLURM_NTASKS": "{world}", "SLURM_LOCALID": "{rank}", "SLURM_NODEID": "0",
    "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid()),
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "{world}", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{world}",
}  # fmt: skip


def clean_environment() -> dict[str, str]:
    return children.environment(OMP_NUM_THREADS="1", PHALANX_DEBUG="0")


def start(template: dict[str, str], world: int, *job: object) -> list[subprocess.Popen[str]]:
    arguments = [job[0], *(json.dumps(argument) for argument in job[1:])]
    return [
        children.Popen(
            [sys.executable, "-m", "tests.launch.joiner", *map(str, arguments)], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**clean_environment(), **{key: text.format(rank=rank, world=world) for key, text in template.items()}},
        )
        for rank in range(world)
    ]  # fmt: skip


def torchrun(port: int, *job: object) -> subprocess.CompletedProcess[str]:
    arguments = [str(job[0]), *(json.dumps(argument) for argument in job[1:])]
    line = [*TORCHRUN, str(port), "-m", "tests.launch.joiner", *arguments]
    return children.run(line, cwd=ROOT, env=clean_environment(), timeout=60)


def port_for(test: int) -> int:
    return 33000 + (os.getpid() * 7 + test) % 20000


def test_ranks_started_by_torchrun_meet_and_compute_together():
    done = torchrun(port_for(1), "relay", 3)
    assert done.returncode == 0, done.stderr
    results = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert results == [[0, 0, [[100.0, 101.0, 102.0], 36, 36]], [1, 0, [[0.0, 1.0, 2.0], 36, 36]]]


def test_under_torchrun_the_failure_of_one_rank_is_printed_once_by_rank_0():
    began = time.monotonic()
    done = torchrun(port_for(2), "one_raises", 1)
    assert done.returncode != 0
    text = "error: rank 1 (stage 1) failed in step 2 at B1.2: ZeroDivisionError"
    assert done.stderr.count(text) == 1, done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("template", [SLURM, OPEN_MPI], ids=["SLURM", "Open MPI"])
def test_ranks_meet_under_other_launchers(template: dict[str, str]):
    ranks = start(template, 2, "relay", 2)
    outputs = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert [json.loads(out)[2] for out, _ in outputs] == [[[100.0, 101.0], 24, 24], [[0.0, 1.0], 24, 24]]


def wait_until_under_way(folder: Path, world: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < world:
        assert time.monotonic() < deadline, "the ranks did not get under way"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_without_a_supervisor_a_lost_rank_is_named_by_rank_0(number: signal.Signals, tmp_path: Path):
    job = {**SLURM, "SLURM_JOB_ID": f"{os.getpid()}{number.value}"}
    ranks = start(job, 3, "forever", str(tmp_path), "collective")
    wait_until_under_way(tmp_path, 3)
    time.sleep(1.5)  # ranks show what they do once a second
    ranks[1].send_signal(number)
    began = time.monotonic()
    try:
        _, err = ranks[0].communicate(timeout=30)
        assert ranks[2].wait(timeout=30) == 1
        assert time.monotonic() - began < 20
        assert ranks[0].returncode == 2 and "error: rank 1 (stage 1) stopped answering for" in err, err
    finally:
        ranks[1].kill()
        for process in ranks:
            process.communicate(timeout=10)


def test_a_host_that_takes_connections_but_never_answers_stands_still(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(monitor, "_TICK_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "_PROMPT_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as listener, monitor.Host(listener.getsockname(), 0.05) as host:
        while not host.stands_still():  # until pytest's own timeout
            time.sleep(0.01)


def test_a_host_whose_connections_come_late_may_be_behind_a_slow_link(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(monitor, "_TICK_SECONDS", 0.0)
    monkeypatch.setattr(monitor, "_PROMPT_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with monitor.Host(address, 0.0) as host:  # nobody listens there any more
        for _ in range(10):
            assert not host.stands_still()
            time.sleep(0.01)
    assert not monitor.Host(None, 0.0).stands_still()


def test_a_host_has_as_long_again_as_its_link_was_slow():
    host = monitor.Host(("127.0.0.1", 1), 2.0)
    host._clock = Clock([3.0, 8.0, 14.9, 15.1])  # pyright: ignore[reportAttributeAccessIssue]
    host._began, host._thread = 0.0, threading.current_thread()
    assert not host.stands_still()  # at 3, and connections come late
    host._prompt, host._since = True, 6.5
    assert [host.stands_still() for _ in range(3)] == [False, False, True]  # 6.5 + 2 + 6.5 = 15


class Clock:
    def __init__(self, times: list[float]) -> None:
        self._times = iter(times)

    def read(self) -> float:
        return next(self._times)


@pytest.mark.long
def test_a_rank_that_hosts_the_store_and_stands_still_is_noticed_as_soon_as_another(tmp_path: Path):
    job = {**SLURM, "SLURM_JOB_ID": f"{os.getpid()}9", "SILENCE": "2"}
    ranks = start(job, 2, "forever", str(tmp_path), "collective")
    wait_until_under_way(tmp_path, 2)
    ranks[0].send_signal(signal.SIGSTOP)
    try:
        _, err = ranks[1].communicate(timeout=40)  # less than LONG_SILENCE
        assert "error: the store of this job does not answer: rank 0 or its launcher is gone or stands still" in err
    finally:
        ranks[0].kill()
        for process in ranks:
            process.communicate(timeout=10)


def test_joined_ranks_that_are_suspended_and_continued_live(tmp_path: Path):
    job = {**SLURM, "SLURM_JOB_ID": f"{os.getpid()}7", "SILENCE": "3"}
    ranks = start(job, 2, "steps", str(tmp_path), 100)
    wait_until_under_way(tmp_path, 2)
    for number, seconds in ((signal.SIGSTOP, 6.0), (signal.SIGCONT, 0.0)):
        for process in ranks:
            process.send_signal(number)
        time.sleep(seconds)
    outputs = [process.communicate(timeout=60) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert [json.loads(out)[2] for out, _ in outputs] == [100, 100]


def test_without_a_supervisor_a_silent_rank_is_told_with_where_it_stands():
    job = {**SLURM, "SLURM_JOB_ID": f"{os.getpid()}8", "SILENCE": "3"}
    ranks = start(job, 2, "keeps_all_threads_waiting", 1)
    try:
        _, err = ranks[0].communicate(timeout=40)
        assert "error: rank 1 stopped answering for" in err and "(seen from rank 0 in step 4)" in err, err
        assert "where it stands, the innermost call first:" in err and "in keeps_all_threads_waiting" in err, err
    finally:
        for process in ranks:
            process.kill()
            process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}, 2),
        ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "MASTER_ADDR": "a"}, 6),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
          "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "a"}, 2),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_JOB_ID": "7",
          "SLURM_STEP_NODELIST": "a[1-3]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, 1),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_JOB_ID": "7",
          "SLURM_STEP_NODELIST": "a[1-3]"}, 6),
    ],
    ids=["torchrun", "by hand", "Open MPI", "SLURM", "SLURM without counts"],
)  # fmt: skip
def test_a_launcher_says_how_many_ranks_share_a_machine(variables: dict[str, str], expected: int):
    place = find_place({**variables, "MASTER_PORT": "29500"})
    assert place is not None and place.local_world == expected


def test_without_a_launcher_nothing_is_joined():
    assert join("cpu", variables={"PATH": "/bin"}) is None

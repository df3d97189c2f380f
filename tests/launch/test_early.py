"""A fork server made of the process itself: the first pool uses it, later ones start their own, and none is left."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from phalanx.launch import early
from phalanx.launch.context import RankContext
from phalanx.launch.early import ForkedServer, early_server

POOLS = """
import sys
from phalanx.launch.early import early_server
from phalanx.launch.worker_pool import WorkerPool
from tests.launch.test_early import inherited

if __name__ == "__main__":
    sys.inherited = "from the process that opened the pool"
    with early_server():
        for _ in range(int(sys.argv[1])):
            with WorkerPool(2, device="cpu", threads_per_rank=1) as pool:
                print(*pool.run(inherited), sep=", ")
"""


def inherited(context: RankContext) -> str:
    return getattr(sys, "inherited", "nothing")


@pytest.mark.parametrize("pools", [1, pytest.param(2, marks=pytest.mark.long)])
def test_ranks_of_the_first_pool_are_forks_of_the_process_itself(pools: int) -> None:
    ended = subprocess.run([sys.executable, "-c", POOLS, str(pools)], capture_output=True, text=True)
    known = "from the process that opened the pool"
    assert ended.stdout.splitlines() == [f"{known}, {known}", "nothing, nothing"][:pools], ended.stderr


def test_a_server_that_no_pool_needs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with early_server():
        ((server, _),) = early._waiting
        assert isinstance(server, ForkedServer) and server.poll() is None
        early.drop()
        assert server.poll() == 0 and early.take() is None


def test_a_process_with_threads_is_not_forked() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    with early_server():
        assert early.take() is None
    ended.set()
    thread.join()


def test_a_server_that_is_gone_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with early_server():
        early._waiting[0][0].kill()
        assert early._waiting[0][0].wait(10) == -9
        assert early.take() is None

"""What ranks need besides each other is killed while a run trains, the process that holds their store and the one that
forks them, or their connection to the store is cut: the run goes on, and is the one that nothing happened to."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from phalanx.launch.renewal import OnLoss
from phalanx.launch.worker_pool import WorkerPool
from tests.faults.strike import Wanted, is_alive
from tests.run_helpers import short_run
from tests.survive.runs import (
    DATA,
    OPTIONS,
    Strike,
    fit,
    in_phase,
    in_step,
    losses_of_ranks,
    require_same_run,
)

LEFT = "the ranks that were left"
MET = "the process that held the store of the ranks ended; they met at another"
LONGER = {**OPTIONS, "steps": 12}
Kill = Callable[[WorkerPool], None]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, which nobody leaves."""
    out = tmp_path_factory.mktemp("alone")
    short_run("gpt2", DATA, out, **LONGER)
    return out


class Blow(Strike):
    """What else may happen when a rank is seen at something; nothing happens to the rank."""

    def __init__(self, process: int, wanted: Wanted, kill: Kill) -> None:
        super().__init__(process, wanted)
        self._kill = kill

    def strike(self, pool: WorkerPool, ended: threading.Event) -> None:
        slot = pool.board.slots[self._process]
        while not ended.is_set():
            if self._wanted(view := slot.read()):
                self._kill(pool)
                self.view = view
                return
            time.sleep(1e-4)


def store(pool: WorkerPool) -> None:
    assert pool.processes._store is not None
    os.kill(pool.processes._store.pid, signal.SIGKILL)


def server(pool: WorkerPool) -> None:
    os.kill(pool.processes._server.pid, signal.SIGKILL)  # type: ignore[union-attr]


def rank(number: int) -> Kill:
    return lambda pool: os.kill(pool.pids[number], signal.SIGKILL)


def all_of(*kills: Kill) -> Kill:
    def kill(pool: WorkerPool) -> None:
        for each in kills:
            each(pool)

    return kill


def struck(
    pool: WorkerPool, out: Path, on_loss: OnLoss, *blows: Blow, world: int = 2, **options: Any
) -> list[dict[str, Any]]:
    """What the log tells of losses."""
    fit(pool, out, world, on_loss, strikes=blows, **{**LONGER, "plan": "dp=2", **options})
    return losses_of_ranks(out)


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("pp=2,mb=2", marks=pytest.mark.long)])
def test_ranks_whose_store_is_lost_meet_at_another_and_stay_who_they_are(
    plan: str, pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    before = list[dict[int, int]]()
    blow = Blow(1, in_step(3, "B"), all_of(lambda pool: before.append(pool.pids), store))
    (loss,) = struck(pool, tmp_path, "shrink", blow, plan=plan)
    require_same_run(tmp_path, alone)
    assert (loss["lost"], loss["ranks"], loss["plan"], loss["repeated"]) == ([MET], 2, plan, 0)
    assert before == [pool.pids]


@pytest.mark.long
def test_a_store_that_is_lost_while_a_checkpoint_is_saved(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    (loss,) = struck(pool, tmp_path, "shrink", Blow(0, in_phase("save"), store), checkpoint_every=2)
    require_same_run(tmp_path, alone)
    assert (loss["lost"], loss["repeated"]) == ([MET], 0)


@pytest.mark.long
def test_a_store_that_is_lost_together_with_a_rank(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    """In either order the ranks meet at the new store, and the replacement, too."""
    losses = struck(pool, tmp_path, "replace", Blow(0, in_step(3, "BW"), all_of(rank(1), store)))
    require_same_run(tmp_path, alone)
    said = [words for loss in losses for words in loss["lost"]]
    assert MET in said and any("was killed by signal SIGKILL in step" in words for words in said), said
    assert losses[-1]["ranks"] == 2 and sum(loss["repeated"] for loss in losses) == 0


def test_ranks_outlive_the_process_that_forked_them_and_are_replaced_by_another(
    pool: WorkerPool, tmp_path: Path, alone: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = list[list[int]]()
    first = Blow(0, in_step(2, "BW"), all_of(server, lambda pool: seen.append(list(pool.pids.values()))))
    (loss,) = struck(pool, tmp_path, "replace", first, Blow(0, in_step(5, "BW"), rank(1)))
    require_same_run(tmp_path, alone)
    assert (loss["source"], loss["ranks"], loss["repeated"]) == (LEFT, 2, 0)
    assert loss["lost"][0].startswith("rank 1 (stage 0, replica 1) ")
    assert (
        "the process that starts ranks was killed by signal SIGKILL; another takes its place" in capfd.readouterr().err
    )
    (pids,) = seen
    assert pool.pids[0] == pids[0] and not is_alive(pids[1])
    pool.processes.end()
    assert not is_alive(pids[0])


def test_the_server_the_store_and_a_rank_lost_at_once(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    losses = struck(pool, tmp_path, "shrink", Blow(0, in_step(3, "BW"), all_of(server, store, rank(1))))
    require_same_run(tmp_path, alone)
    assert losses[-1]["ranks"] == 1 and MET in [words for loss in losses for words in loss["lost"]]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="sockets of others are taken by pidfd")
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_whose_connection_to_the_store_is_cut_opens_another(
    number: int, pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    blow = Blow(0, in_step(2, "BW"), lambda pool: cut(pool.pids[number], pool.processes._store_port))
    losses = struck(pool, tmp_path, "shrink", blow, checkpoint_every=4)
    require_same_run(tmp_path, alone)
    assert [loss["ranks"] for loss in losses] == [2], losses


def cut(pid: int, port: int) -> None:
    """The connections of a process to this port."""
    ends = list(sockets_to(pid, port))
    assert ends
    for end in ends:
        end.shutdown(socket.SHUT_RDWR)
        end.close()


def sockets_to(pid: int, port: int) -> Iterator[socket.socket]:
    handle = os.pidfd_open(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                taken = ctypes.CDLL(None, use_errno=True).syscall(438, handle, int(name), 0)  # pidfd_getfd
                assert taken >= 0, os.strerror(ctypes.get_errno())
                own = socket.socket(fileno=taken)
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.getpeername()[1] == port:
                    yield own
                else:
                    own.close()
    os.close(handle)

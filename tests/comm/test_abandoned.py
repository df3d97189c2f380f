"""What is left of operations that were under way when links were given up."""

from __future__ import annotations

import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from phalanx.comm.abandoned import keep_until_over, let_go_of_ended
from phalanx.comm.links import Group, Links
from phalanx.comm.nccl import give_up, until_given_up
from phalanx.comm.pending import Deadline, Pending
from phalanx.errors import LinkError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from tests.launch import jobs


class Work:
    """As torch has it: over, under way, or of a device that cannot be asked."""

    def __init__(self, *, over: bool = False) -> None:
        self.over, self.is_lost = over, False

    def is_completed(self) -> bool:
        if self.is_lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.over


@pytest.fixture
def deadline() -> Iterator[Deadline]:
    made = Deadline(60.0, lambda: None)
    yield made
    made.close()


def abandoned(deadline: Deadline, work: Any, backend: Any, on_cuda: bool = False) -> weakref.ref[torch.Tensor]:
    """The tensor of an operation of which nobody else knows any more."""
    tensor = torch.ones(3)
    pending = Pending(
        RankContext.alone(), work, (tensor,), deadline=deadline, subject="all_reduce", partners="", backend=backend
    )
    pending.on_cuda = on_cuda
    keep_until_over([pending], [])
    return weakref.ref(tensor)


class Backend:
    """One whose end can be seen."""


def test_tensors_are_kept_until_their_operation_is_over_and_a_communicator_until_all_of_its_are(
    deadline: Deadline,
) -> None:
    backend, works = Backend(), (Work(), Work())
    of_backend = weakref.ref(backend)
    one, other = [abandoned(deadline, work, backend) for work in works]
    del backend
    assert let_go_of_ended() == 2 and one() is not None and other() is not None
    works[0].over = True
    assert let_go_of_ended() == 1 and one() is None and other() is not None and of_backend() is not None
    works[1].over = True
    assert let_go_of_ended() == 0 and other() is None and of_backend() is None


def test_what_ends_a_moment_later_is_let_go_of_in_the_background(deadline: Deadline) -> None:
    work = Work()
    kept = abandoned(deadline, work, None)
    work.over = True
    until = time.monotonic() + 10.0
    while kept() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert kept() is None


class Communicator:
    """As NCCL's: giving it up takes as long as somebody lets it."""

    def __init__(self) -> None:
        self.ends = threading.Event()

    def abort(self) -> None:
        self.ends.wait(10.0)


def test_what_nccl_had_under_way_is_kept_until_its_communicators_were_given_up(deadline: Deadline) -> None:
    """An operation says that it is over when it has failed, which its kernel need not have noticed yet."""
    communicator = Communicator()
    give_up([communicator])
    kept = abandoned(deadline, Work(over=True), None, on_cuda=True)
    assert let_go_of_ended() == 1 and kept() is not None
    communicator.ends.set()
    assert until_given_up(10.0)
    assert let_go_of_ended() == 0 and kept() is None


def test_what_nobody_can_say_of_whether_it_is_over_is_kept(deadline: Deadline) -> None:
    work = Work(over=True)
    work.is_lost = True
    kept = abandoned(deadline, work, None)
    assert let_go_of_ended() == 1 and kept() is not None
    work.is_lost = False
    assert let_go_of_ended() == 0 and kept() is None


def test_a_group_whose_links_were_given_up_says_that_it_lost_the_connection() -> None:
    links = Links(RankContext.alone("cpu"))
    group = Group(links, (0, 1), Backend())
    links._groups[(0, 1), ""] = group
    links.abort()
    until = time.monotonic() + 10.0
    while isinstance(group.backend, Backend) and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(
        LinkError, match=r"lost the connection at all_reduce with rank 1 \(Connection closed: these links"
    ):
        group.all_reduce(torch.ones(1))


def test_links_that_are_given_up_leave_the_groups_of_others_that_they_only_use() -> None:
    links = Links(RankContext.alone("cpu"))
    backend = Backend()
    group = Group(links, (0, 1), backend)
    beside = Links(RankContext.alone("cpu"), name="ahead")
    beside._groups[(0, 1), ""] = group
    beside.abort()
    wait_for_drops()
    assert group.backend is backend


def test_an_operation_that_takes_long_to_fail_is_let_go_of_too(deadline: Deadline) -> None:
    """Nobody may make links any more in a rank that is idle, and its port would stay open."""
    work = Work()
    tensor = abandoned(deadline, work, Backend())
    wait_for_drops()
    assert tensor() is not None
    work.over = True
    until = time.monotonic() + 20.0
    while tensor() is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert tensor() is None


def wait_for_drops() -> None:
    for thread in threading.enumerate():
        if thread.name == "phalanx-drop":
            thread.join(10.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, threads_per_rank=1, device="cpu", preload=jobs.LIGHT) as pool:
        yield pool


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_links_that_are_given_up_again_and_again_leave_no_files_threads_or_tensors(pool: WorkerPool) -> None:
    for found in pool.run(jobs.given_up_again_and_again, 5):
        assert found == [found[0]] * 5


def test_who_waits_for_a_lost_rank_to_connect_is_gone_after_the_timeout(pool: WorkerPool) -> None:
    """gloo would wait for a year."""
    assert 2.0 < pool.run(jobs.gives_up_to_connect)[0] < 30.0


def test_what_a_job_left_in_a_rank_has_no_connections_any_more(pool: WorkerPool) -> None:
    for port in pool.run(jobs.goes_round):
        until, is_open = time.monotonic() + 10.0, True
        while is_open and time.monotonic() < until:
            with socket.socket() as one:
                is_open = one.connect_ex(("127.0.0.1", port)) == 0
        assert not is_open

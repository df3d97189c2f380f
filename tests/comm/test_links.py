"""Groups and channels between real processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from phalanx.comm.links import Group, Links
from phalanx.comm.nccl import end_open_group, give_up, until_given_up
from phalanx.comm.pending import cause, open_sockets, opened_since, shut
from phalanx.errors import LinkError, RankError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from tests.launch import jobs


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, threads_per_rank=1, device="cpu", preload=jobs.LIGHT) as pool:
        yield pool


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_collectives_give_what_their_names_say(pool: WorkerPool, world: int, dtype: str):
    for rank, found in enumerate(pool.run(jobs.collectives, dtype, world=world)):
        ranks, weights = range(world), sum(range(1, world + 1))
        assert found["total"] == [world * item + sum(ranks) for item in range(6)]
        assert found["most"] == [world - 1] * 3
        assert found["part"] == [weights * (5 * rank + item) for item in range(5)]
        assert found["gathered"] == [[float(other)] * 4 for other in ranks]
        assert found["message"] == [world - 1] * 7
        size = getattr(torch, dtype).itemsize
        assert found["traffic"] == {
            "all_reduce": (2, 9 * size), "reduce_scatter": (1, 5 * world * size), "all_gather": (1, 4 * world * size),
            "broadcast": (1, 7 * size), "barrier": (1, 4),
        }  # fmt: skip


def test_groups_are_any_set_of_ranks_and_kept_by_purpose(pool: WorkerPool):
    assert pool.run(jobs.sub_groups) == [(1.0, 2.0, True), (1.0, 4.0, True), (5.0, 2.0, True), (5.0, 4.0, True)]


def test_ranks_send_each_other_different_amounts_and_texts_and_leave_groups(pool: WorkerPool):
    for rank, (into, said, silence, total) in enumerate(pool.run(jobs.all_to_all_and_texts)):
        assert into == [other for other in range(4) for _ in range(rank + 1)]
        assert said == ["", "é", "éé", "ééé"] and silence == [""] * 4
        assert total == [4]


def test_groups_that_are_made_beside_others_keep_nobody_from_the_store(pool: WorkerPool):
    assert pool.run(jobs.store_while_groups_are_made, world=2) == [True, True]


def test_a_group_of_one_communicates_nothing(pool: WorkerPool):
    assert pool.run(jobs.alone_in_a_group, world=1) == [([1.0, 1.0], [2.0, 2.0], [3.0, 3.0])]


def test_a_single_rank_needs_no_pool():
    assert jobs.alone_in_a_group(RankContext.alone()) == ([1.0, 1.0], [2.0, 2.0], [3.0, 3.0])


def test_messages_arrive_in_order_on_channels_of_both_directions(pool: WorkerPool):
    results = pool.run(jobs.relay, 4)
    for rank, (values, sent, received) in enumerate(results):
        expected = [100.0 * (rank + 1) + number for number in range(4)] if rank < 3 else []
        expected += [100.0 * (rank - 1) + number for number in range(4)] if rank > 0 else []
        assert values == expected
        assert sent == received == (24 if 0 < rank < 3 else 12) * 4


def test_a_wait_that_takes_too_long_says_who_waited_for_what_and_what_the_others_did(pool: WorkerPool):
    with pytest.raises(RankError) as caught:
        pool.run(jobs.wait_too_long, world=2)
    message = caught.value.message
    assert message.startswith("rank 1 (stage 1) waited 1 s for RF1.3 from rank 0\n"), message
    assert "meanwhile rank 0 was in step 7 at F0.3" in message
    assert "timeout" in caught.value.hint


@pytest.mark.parametrize("kind", ["message", "collective"])
def test_a_wait_lets_go_of_a_message_whose_connection_broke_in_the_middle(pool: WorkerPool, kind: str):
    """gloo never ends such a wait, on either side. On a busy machine a message may have come whole before."""
    for said in pool.run(jobs.broken_in_the_middle, kind, 3, world=2):
        assert any("waiting for a large message" in text for text in said), said


def test_a_wait_takes_no_processor_time(pool: WorkerPool):
    spent = pool.run(jobs.waits_for_a_late_rank, 1.0, world=2)[1]
    assert all(seconds < 0.01 for seconds in spent.values()), spent


def test_a_rank_that_never_joins_a_group_is_named(pool: WorkerPool):
    with pytest.raises(RankError, match="rank 0 could not connect to rank 1: no answer for 1 s"):
        pool.run(jobs.never_connected, world=2)


@pytest.mark.parametrize(
    ("job", "text"), [(jobs.not_contiguous, "not contiguous"), (jobs.left_unawaited, "1 operations were never awaited")]
)
def test_our_own_mistakes_are_asserted(pool: WorkerPool, job: object, text: str):
    with pytest.raises(RankError, match=f"AssertionError: .*{text}"):
        pool.run(job, world=2)  # type: ignore[arg-type]


def test_links_refuse_a_group_this_rank_is_not_in():
    with Links(RankContext.alone()) as links, pytest.raises(AssertionError):
        links.group((1,))


def connected() -> tuple[socket.socket, socket.socket, int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0], listener.getsockname()[1]


def test_an_abort_shuts_the_sockets_opened_since_and_spares_the_store():
    early, early_end, _ = connected()
    before = open_sockets()
    late, late_end, _ = connected()
    store, store_end, port = connected()
    with early, early_end, late, late_end, store, store_end:
        shut(opened_since(before), spare_port=port)
        assert late_end.recv(1) == b""
        for one, other in ((early, early_end), (store, store_end)):
            one.sendall(b"x")
            assert other.recv(1) == b"x"


class Communicator:
    """As NCCL's: it is given up only when all others on the device are being given up, too."""

    def __init__(self, others: threading.Barrier) -> None:
        self._others, self.is_given_up = others, False

    def abort(self) -> None:
        self._others.wait(5.0)
        self.is_given_up = True


def test_communicators_of_one_device_are_given_up_all_at_once():
    others = threading.Barrier(3)
    communicators = [Communicator(others) for _ in range(3)]
    give_up(communicators)
    assert until_given_up()
    assert all(each.is_given_up for each in communicators)


def test_whoever_waits_for_old_communicators_learns_that_one_has_not_ended():
    others = threading.Barrier(2)
    give_up([Communicator(others)])
    assert not until_given_up(0.01)
    others.wait(5.0)
    assert until_given_up()


class Library:
    """As NCCL's, with so many groups of calls begun."""

    def __init__(self, depth: int, result: int) -> None:
        self.depth, self._result = depth, result

    def ncclGroupEnd(self) -> int:
        if self.depth == 0:
            return 5  # invalid usage
        self.depth -= 1
        return self._result if self.depth == 0 else 0


@pytest.mark.parametrize(("depth", "result"), [(0, 0), (1, 0), (1, 6), (2, 0), (2, 6)])
def test_groups_that_a_failed_call_left_open_are_ended(
    depth: int, result: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(depth, result)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    end_open_group()
    assert library.depth == 0


def test_ranks_that_heard_nobody_do_not_take_that_for_what_others_said() -> None:
    with Links(RankContext.alone("cpu")) as links:
        group = Group(links, (0, 1), None)  # whose sums exchange nothing
        with pytest.raises(LinkError, match="rank 0 was told by 1 of 2 ranks what they say"):
            group.texts("hello")


def test_without_the_library_there_is_no_group_to_end():
    end_open_group("libnothing.so.0")


def test_an_operation_that_fails_because_links_were_given_up_says_why():
    context = RankContext.alone("cpu")
    with Links(context) as links:
        context.abort.set("rank 2 was lost")

        def aborted() -> None:
            raise RuntimeError("NCCL communicator was aborted on rank 0.")

        with pytest.raises(LinkError, match=r"rank 0 stopped at all_reduce with rank 1: rank 2 was lost"):
            links.start("all_reduce", aborted, (torch.zeros(1),), "with rank 1")


def test_library_errors_are_told_without_their_sources():
    error = RuntimeError(
        "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by …"
    )
    assert cause(error) == "Connection closed by peer [127.0.0.1]:1"
    assert cause(ValueError()) == "ValueError"

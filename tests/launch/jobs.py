"""What ranks are asked to do in tests of launching and of links."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import torch

from phalanx.comm.abandoned import let_go_of_ended
from phalanx.comm.links import Links
from phalanx.comm.pending import Pending
from phalanx.errors import BeginAnew, ConfigError, LinkError, RankError
from phalanx.launch.abort import AbortEvent, within
from phalanx.launch.context import RankContext

LIGHT = ("phalanx.comm.links",)  # what ranks of these tests need imported


def describe(context: RankContext, *arguments: Any) -> tuple[Any, ...]:
    return context.rank, context.world, context.local_rank, context.device, context.generation, os.getpid(), arguments


def hungry(context: RankContext, attempt: int) -> tuple[int, int, int]:
    """Rank 1 fails in attempts 0 and 1 in a way after which all may begin anew; the others wait for it."""
    if context.rank == 1 and attempt < 2:
        raise BeginAnew("memory did not suffice", "use less", f"attempt {attempt} did not fit")
    total = torch.ones(1)
    with Links(context, timeout=20) as links:
        links.group(tuple(range(context.world))).all_reduce(total).wait()
    return context.rank, attempt, int(total)


def environment(context: RankContext, name: str) -> tuple[str | None, str, int]:
    return os.environ.get(name), os.getcwd(), torch.get_num_threads()


def collectives(context: RankContext, dtype_name: str) -> dict[str, Any]:
    dtype, rank, world = getattr(torch, dtype_name), context.rank, context.world
    everyone = tuple(range(world))
    with Links(context, timeout=20) as links:
        group = links.group(everyone)
        total = torch.arange(6, dtype=dtype) + rank
        most = torch.full((3,), float(rank), dtype=dtype)
        part = torch.empty(5, dtype=dtype)
        gathered = torch.empty(world, 4, dtype=dtype)
        message = torch.full((7,), float(rank), dtype=dtype)
        started = [
            group.all_reduce(total),
            group.all_reduce(most, "max"),
            group.reduce_scatter(part, torch.arange(5 * world, dtype=dtype) * (rank + 1)),
            group.all_gather(gathered, torch.full((4,), float(rank), dtype=dtype)),
            group.broadcast(message, root=world - 1),
            group.barrier(),
        ]
        for pending in started:
            pending.wait()
            assert pending.done()
        traffic = {kind: (seen.calls, seen.bytes) for kind, seen in links.traffic.items()}
    found = {"total": total, "most": most, "part": part, "gathered": gathered, "message": message}
    return {"traffic": traffic, **{name: tensor.double().tolist() for name, tensor in found.items()}}


def sub_groups(context: RankContext) -> tuple[float, float, bool]:
    """Pairs of neighbours and every other rank of four; the same ranks for another purpose are another group."""
    with Links(context, timeout=20) as links:
        pair = (context.rank // 2 * 2, context.rank // 2 * 2 + 1)
        across = (context.rank % 2, context.rank % 2 + 2)
        one, two = torch.tensor([float(context.rank)]), torch.tensor([float(context.rank)])
        links.group(pair).all_reduce(one).wait()
        links.group(across).all_reduce(two).wait()
        same = links.group(pair) is links.group(pair) and links.group(pair) is not links.group(pair, "other")
    return one.item(), two.item(), same


def alone_in_a_group(context: RankContext) -> tuple[list[float], list[float], list[float]]:
    with Links(context, timeout=20) as links:
        group = links.group((context.rank,))
        same, part, whole = torch.ones(2), torch.empty(2), torch.empty(2)
        for pending in (
            group.all_reduce(same), group.reduce_scatter(part, same * 2), group.all_gather(whole, same * 3),
            group.broadcast(same, context.rank), group.barrier(),
        ):  # fmt: skip
            assert pending.done()
            pending.wait()
        assert links.traffic == {}
    return same.tolist(), part.tolist(), whole.tolist()


def relay(context: RankContext, count: int) -> tuple[list[float], int, int]:
    """Forward messages run down the line and backward ones up, all posted before any is awaited."""
    rank, last = context.rank, context.world - 1
    line = [(left, left + 1) for left in range(last)]
    with Links(context, timeout=20) as links:
        links.open_channels([(a, b, "f") for a, b in line] + [(b, a, "b") for a, b in line])
        came = [torch.empty(3) for _ in range(2 * count)]
        started = []
        for number in range(count):
            value = torch.full((3,), 100.0 * rank + number)
            if rank < last:
                started.append(links.channel(rank + 1, "f", "out").send(value))
                started.append(links.channel(rank + 1, "b", "in").recv(came[number]))
            if rank > 0:
                started.append(links.channel(rank - 1, "f", "in").recv(came[count + number]))
                started.append(links.channel(rank - 1, "b", "out").send(value))
        for pending in started:
            pending.wait("a message")
        sent, received = links.sent_bytes, links.traffic["recv"].bytes
    backward = came[:count] if rank < last else []
    forward = came[count:] if rank > 0 else []
    return [tensor[0].item() for tensor in backward + forward], sent, received


def wait_too_long(context: RankContext) -> None:
    context.slot.set_place(f"stage {context.rank}")
    with Links(context, timeout=1.0) as links:
        context.slot.enter("step")
        context.slot.at_step(7)
        if context.rank == 1:
            channel = links.channel(0, "f", "in")
            context.slot.at("RF1.3<0")
            channel.recv(torch.empty(4)).wait("RF1.3")
        links.channel(1, "f", "out")
        context.slot.at("F0.3")
        time.sleep(30)


def broken_in_the_middle(context: RankContext, kind: str, tries: int) -> list[str]:
    """What waits for a large message say whose connection breaks while it is under way: each time rank 0 gives up its
    links when the first byte has come, and rank 1 a moment later."""
    return [_broken_in_the_middle(context, kind, f"{kind}{number}") for number in range(tries)]


def _broken_in_the_middle(context: RankContext, kind: str, name: str) -> str:
    receives, size = context.rank == 0, 1 << 28
    own, data = replace(context, abort=AbortEvent()), torch.full((size,), context.rank, dtype=torch.uint8)

    def give_up() -> None:
        while receives and not data[0]:
            pass
        if not receives:
            context.store.get(name)
        own.abort.set("a rank was lost")
        if receives:
            context.store.set(name, "given up")

    links = Links(own, timeout=120.0, name=name)
    pending = _message(links, data) if kind == "message" else _collective(links, data)
    threading.Thread(target=give_up, daemon=True).start()
    try:
        within(30.0, lambda: pending.wait("a large message"))
    except LinkError as error:
        return error.message
    finally:
        links.abort()
    return "all of it had come"


def given_up_again_and_again(context: RankContext, times: int) -> list[tuple[int, int]]:
    """Rank 0 waits for what rank 1 never begins, and links are given up: each time, how many files and threads this
    process has once nothing is left of the operation. Whoever waits for that longer than ten seconds fails, and what is
    more than the first time may go in as long: a thread is no longer Python's before it is gone."""
    found = list[tuple[int, int]]()
    for number in range(times):
        tensor = torch.ones(1 << 16)
        alive = weakref.ref(tensor)
        links = Links(replace(context, abort=AbortEvent()), timeout=60.0, name=f"number{number}")
        group = links.group((0, 1))
        if context.rank == 0:
            group.all_reduce(tensor)
        _together(context, f"given up {number}")
        links.abort()
        del links, group, tensor
        deadline = time.monotonic() + 10.0
        while alive() is not None or let_go_of_ended() or _in_background():
            assert time.monotonic() < deadline, "tensors of an operation that was given up are still kept"
            time.sleep(0.01)
        while found and _files_and_threads() != found[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(_files_and_threads())
    return found


def _files_and_threads() -> tuple[int, int]:
    return len(os.listdir("/dev/fd")), len(os.listdir("/proc/self/task"))


def _together(context: RankContext, when: str) -> None:
    """Returns once all ranks have come here, without any links."""
    context.store.set(f"{when} {context.rank}", "yes")
    for rank in range(context.world):
        context.store.get(f"{when} {rank}")


def _in_background() -> bool:
    return any(thread.name in ("phalanx-drop", "phalanx-deadline") for thread in threading.enumerate())


def _message(links: Links, data: torch.Tensor) -> Pending:
    """From rank 1 to rank 0."""
    if links.context.rank == 0:
        return links.channel(1, "f", "in").recv(data)
    return links.channel(0, "f", "out").send(data)


def _collective(links: Links, data: torch.Tensor) -> Pending:
    """That carries the same."""
    group, size, none = links.group((0, 1)), len(data), data[:0]
    if links.context.rank == 0:
        return group.all_to_all(data, none, [0, size], [0, 0])
    return group.all_to_all(none, data, [0, 0], [size, 0])


def waits_for_a_late_rank(context: RankContext, seconds: float) -> dict[str, float]:
    """Processor time of this rank's thread while it waits for rank 0, which is late, by what it waits for."""
    value, spent = torch.ones(4), {}
    with Links(context, timeout=30) as links:
        group = links.group((0, 1))
        channel = links.channel(1 - context.rank, "f", "out" if context.rank == 0 else "in")
        for kind in ("message", "collective"):
            group.barrier().wait()
            began = time.thread_time()
            if context.rank == 0:
                time.sleep(seconds)
            message = channel.send if context.rank == 0 else channel.recv
            (message(value) if kind == "message" else group.all_reduce(value)).wait()
            spent[kind] = time.thread_time() - began
    return spent


def never_connected(context: RankContext) -> None:
    if context.rank == 0:
        Links(context, timeout=1.0).group((0, 1))
    time.sleep(30)


def gives_up_to_connect(context: RankContext) -> float:
    """Rank 1 never comes; the seconds after which nothing is left of what waited for it."""
    if context.rank == 1:
        context.store.get("nothing is left")
        return 0.0
    before, began = len(os.listdir("/dev/fd")), time.monotonic()
    own = replace(context, abort=AbortEvent())
    threading.Timer(0.5, own.abort.set, ("rank 1 was lost",)).start()
    try:
        Links(own, timeout=3.0).group((0, 1))
    except LinkError as error:
        assert "rank 1 was lost" in error.message
    while len(os.listdir("/dev/fd")) > before or any(it.name == "phalanx-call" for it in threading.enumerate()):
        assert time.monotonic() - began < 30.0, "somebody still waits for a rank that was lost"
        time.sleep(0.01)
    context.store.set("nothing is left", "yes")
    return time.monotonic() - began


def goes_round(context: RankContext) -> int:
    """What this makes listens on the port that it returns, and refers to itself."""

    class Listens:
        def __init__(self) -> None:
            self.socket, self.itself = socket.create_server(("127.0.0.1", 0)), self

    return Listens().socket.getsockname()[1]


def not_contiguous(context: RankContext) -> None:
    with Links(context, timeout=5.0) as links:
        links.group((0, 1)).all_reduce(torch.zeros(4, 4).T)


def left_unawaited(context: RankContext) -> None:
    with Links(context, timeout=5.0) as links:
        links.group((0, 1)).all_reduce(torch.zeros(4))


def forever(context: RankContext, folder: str, how: str) -> None:
    """Steps in lockstep until something happens; says in `folder` that it is on its way."""
    context.slot.set_place(f"stage {context.rank}")
    others = tuple(range(context.world))
    with Links(context, timeout=60) as links:
        group = links.group(others)
        left, right = (context.rank - 1) % context.world, (context.rank + 1) % context.world
        links.open_channels([(rank, (rank + 1) % context.world, "f") for rank in others])
        context.slot.enter("step")
        for step in range(1_000_000):
            context.slot.at_step(step)
            context.slot.at(f"F{context.rank}.{step % 8}")
            if step == 3:
                open(os.path.join(folder, f"rank-{context.rank}"), "w").close()
            if how == "collective":
                group.all_reduce(torch.ones(1000)).wait("NORM")
            else:
                sent = links.channel(right, "f", "out").send(torch.ones(1000))
                links.channel(left, "f", "in").recv(torch.empty(1000)).wait("RF")
                sent.wait()


def steps(context: RankContext, folder: str, count: int) -> int:
    """In lockstep, some milliseconds each; a wait that takes longer than four seconds is too long."""
    with Links(context, timeout=4.0) as links:
        group = links.group(tuple(range(context.world)))
        context.slot.enter("step")
        for step in range(1, count + 1):
            context.slot.at_step(step)
            group.all_reduce(torch.ones(1000)).wait("NORM")
            time.sleep(0.01)
            if step == 3:
                open(os.path.join(folder, f"rank-{context.rank}"), "w").close()
    return count


def sends_much(context: RankContext, num_bytes: int, culprit: int) -> float:
    """One all-reduce, in the middle of which a rank fails; the seconds that it took."""
    with Links(context, timeout=100) as links:
        group = links.group(tuple(range(context.world)))
        context.slot.enter("step")
        context.slot.at_step(1)
        began = time.monotonic()
        pending = group.all_reduce(torch.ones(num_bytes // 4))
        if context.rank == culprit:
            time.sleep(3)
            print(f"fails at {time.monotonic()}", flush=True)
            raise ValueError("enough")
        pending.wait("NORM")
    return time.monotonic() - began


def keeps_all_threads_waiting(context: RankContext, culprit: int) -> None:
    with Links(context, timeout=60) as links:
        group = links.group(tuple(range(context.world)))
        context.slot.enter("step")
        context.slot.at_step(4)
        if context.rank == culprit:
            time.sleep(1.5)  # joined ranks show what they do once a second
            ctypes.PyDLL(None).sleep(60)  # without letting go of Python's lock
        group.all_reduce(torch.ones(10)).wait("NORM")


def one_raises(context: RankContext, culprit: int) -> None:
    context.slot.set_place(f"stage {context.rank}")
    with Links(context, timeout=60) as links:
        group = links.group(tuple(range(context.world)))
        context.slot.enter("step")
        context.slot.at_step(2)
        if context.rank == culprit:
            print("about to divide", file=sys.stderr)
            context.slot.at("B1.2")
            _ = 1 // 0
        group.all_reduce(torch.ones(10)).wait("R1.2/3")


def misconfigured(context: RankContext, culprits: tuple[int, ...]) -> None:
    if context.rank in culprits:
        raise ConfigError("option lr = -1 is negative", "use a positive number")
    with Links(context, timeout=60) as links:
        links.group((0, 1))


def leaves_by_exit(context: RankContext) -> None:
    if context.rank == 1:
        os._exit(7)
    time.sleep(30)


def kills_itself(context: RankContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def unpicklable(context: RankContext) -> Any:
    return lambda: None


def emits(context: RankContext, count: int) -> None:
    for number in range(count if context.rank == 0 else 0):
        context.emit("step", {"number": number, "payload": b"x" * 100_000})


def waits_for_signal(context: RankContext, folder: str, code: int) -> str:
    """Stops as a trainer does: notes the signal, then leaves or returns."""
    came = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: came.append(number))
    open(os.path.join(folder, f"rank-{context.rank}"), "w").close()
    while not came:
        time.sleep(0.01)
    if code == 0:
        return signal.Signals(came[0]).name
    raise KeyboardInterrupt if came[0] == signal.SIGINT else SystemExit(code)


def ignores_signals(context: RankContext, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    open(os.path.join(folder, f"rank-{context.rank}"), "w").close()
    time.sleep(60)


def rank_error(context: RankContext) -> None:
    raise RankError(f"rank {context.rank} gave up")


def all_to_all_and_texts(context: RankContext) -> tuple[list[int], list[str], list[str], list[int]]:
    """Rank r sends s + 1 numbers r to rank s; everybody says something but rank 0; a group is left and made again."""
    world = context.world
    with Links(context, timeout=20) as links:
        group = links.group(tuple(range(world)))
        sent = [other + 1 for other in range(world)]
        received = [context.rank + 1] * world
        into = torch.zeros(sum(received), dtype=torch.uint8)
        out = torch.full((sum(sent),), context.rank, dtype=torch.uint8)
        group.all_to_all(into, out, received, sent).wait()
        said, silence = group.texts("é" * context.rank), group.texts("")
        pair = (context.rank // 2 * 2, context.rank // 2 * 2 + 1)
        total = torch.ones(1)
        for _ in range(2):
            own = links.group(pair, "again")
            own.all_reduce(total).wait()
            group.barrier().wait()
            links.drop_others([group])
            assert links.group(pair, "again") is not own
            group.barrier().wait()
            links.drop_others([group])
        return into.tolist(), said, silence, total.int().tolist()


def store_while_groups_are_made(context: RankContext) -> bool:
    """Rank 0 begins to make a group that nobody else makes yet; whether its store answers meanwhile."""
    with Links(context, timeout=20) as links:
        world = links.group(tuple(range(context.world)))
        beside = links.beside("ahead")
        made = threading.Thread(target=lambda: beside.group(tuple(range(context.world)), "ahead"), daemon=True)
        if context.rank == 0:
            made.start()
            time.sleep(0.5)
            began = time.monotonic()
            context.store.set("word", "said")
            assert context.store.get("word") == "said"
            answered = time.monotonic() - began < 5.0 and made.is_alive()
        world.barrier().wait()
        if context.rank > 0:
            answered = True
            made.start()
        made.join(20)
        return answered and not made.is_alive()


def alone_at_last(context: RankContext) -> tuple[str, ...]:
    """Rank 0 dies, rank 1 does not leave what it is at, and rank 2 comes late, to whom is told what happened."""
    context.slot.at_step(1)
    context.slot.enter("step")
    context.slot.guard(True)
    while not all(slot.guarded for slot in context.board.slots[: context.world]):
        time.sleep(0.01)
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if context.rank == 1:
        time.sleep(60)
    while context.board.generation < 2:
        time.sleep(0.01)
    time.sleep(1.0)  # it has as long to come to this generation as rank 1 had to come to the one before
    found = context.renewed(30.0)
    assert found is not None and found.world == 1
    context = found
    assert context.membership is not None
    return context.membership.generation.lost

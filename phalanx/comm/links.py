"""Links between ranks: groups for collectives and one-way channels for messages between neighbours.

Nothing outside this package touches torch.distributed. A group is made from (store, generation, ranks), never from
process-wide defaults; everything is asynchronous and returns a Pending. Order is all that matches messages: there are
no tags and no headers, so both sides must know the shapes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import count
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.comm import nccl
from phalanx.comm.abandoned import keep_for_ever, keep_until_over, let_go_of_ended
from phalanx.comm.pending import (
    NEVER,
    Deadline,
    Pending,
    Sockets,
    cause,
    is_lost_connection,
    late,
    open_sockets,
    opened_since,
    shut,
)
from phalanx.errors import LinkError
from phalanx.launch.abort import Late, within
from phalanx.launch.context import RankContext
from phalanx.launch.store import JobStore

Direction = Literal["f", "b", "m"]  # forward, gradients of activations, gradients for mirrors
Flow = tuple[int, int, Direction]  # sender, receiver, direction


_FROM_THE_SENDER: Any = dist.BroadcastOptions()
_FROM_THE_SENDER.rootRank, _FROM_THE_SENDER.rootTensor = 0, 0


@dataclass
class Traffic:
    """What went over the links in one kind of operation: bytes of the whole tensor, as the plan counts them."""

    calls: int = 0
    bytes: int = 0


_open: weakref.WeakSet[Links] = weakref.WeakSet()


def abort_all(context: RankContext) -> None:
    """Leaves all links of a rank's job at once, whoever made them."""
    for links in list(_open):
        if links.context.abort is context.abort:
            links.abort()
    nccl.until_given_up()
    let_go_of_ended()


class OthersStopped(LinkError):
    """Another rank could not make its part of links that all ranks were making: `Links.fail`."""


class Links:
    """All links of one rank in one generation. Close them when all is done, abort them when something failed.

    name: tells these links from others of the same generation.
    """

    def __init__(self, context: RankContext, *, timeout: float = 60.0, name: str = "") -> None:
        let_go_of_ended()
        self._name = name
        self.context, self.device, self.timeout = context, torch.device(context.device), timedelta(seconds=timeout)
        self.traffic: dict[str, Traffic] = {}
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        self._channels: dict[Flow, Channel] = {}
        self._made: Counter[str] = Counter()  # how often a communicator of this name was made: some are made again
        self._pending: set[Pending] = set()
        self._sockets: Sockets = {}
        self._given_up: list[Any] = []  # communicators of NCCL
        self._numbers = count(1)
        self._asked: JobStore | None = None  # whether others failed; nobody waits there
        self._lock = threading.Lock()
        self.deadline = Deadline(timeout, self.let_go)
        context.abort.listen(self.let_go)
        _open.add(self)

    def group(self, ranks: tuple[int, ...], purpose: str = "") -> Group:
        """The group of these ranks, made on the first call, which all of them must make in the same order."""
        assert self.context.rank in ranks and len(set(ranks)) == len(ranks), ranks
        key = (ranks, purpose)
        if key not in self._groups:
            backend = self._connect(ranks, f"group/{purpose}") if len(ranks) > 1 else None
            self._groups[key] = Group(self, ranks, backend)
        return self._groups[key]

    def channel(self, peer: int, direction: Direction, way: Literal["out", "in"]) -> Channel:
        """The channel that carries tensors of a direction to or from a neighbour."""
        rank = self.context.rank
        flow: Flow = (rank, peer, direction) if way == "out" else (peer, rank, direction)
        if flow not in self._channels:
            sender, receiver, _ = flow
            backend = self._connect((sender, receiver), f"channel/{direction}", one_way=True)
            self._channels[flow] = Channel(self, peer, way, backend)
        return self._channels[flow]

    def open_channels(self, flows: Iterable[Flow]) -> None:
        """Open this rank's part of all the world's channels, in an order that cannot deadlock."""
        for sender, receiver, direction in sorted(flows):
            if sender == self.context.rank:
                self.channel(receiver, direction, "out")
            elif receiver == self.context.rank:
                self.channel(sender, direction, "in")

    def drop_others(self, ends: Iterable[Group | Channel]) -> None:
        """Leaves all groups and channels but these; every rank leaves the same. Asked for again, one is made anew."""
        kept = {id(end) for end in ends}
        left = [end for end in self._ends() if id(end) not in kept]
        if self.device.type == "cuda":
            for end in left:
                if end.backend is not None:
                    end.backend.shutdown()
        self._groups = {key: group for key, group in self._groups.items() if id(group) in kept}
        self._channels = {flow: channel for flow, channel in self._channels.items() if id(channel) in kept}

    def beside(self, name: str) -> Links:
        """Links of the same ranks that have what these have: what they lack is made there, on another thread, while
        these are in use; then it is `take`n, or they `leave`. Not for NCCL, whose communicators would be made in the
        middle of what others do on the device."""
        # Over a connection of its own: whoever waits in a store keeps others from asking it.
        context = replace(self.context, store=self.context.store.clone())
        found = Links(context, timeout=self.timeout.total_seconds(), name=f"{self._name}/{name}")
        found._asked = self.context.store
        found._groups, found._channels = dict(self._groups), dict(self._channels)
        return found

    def next_number(self) -> int:
        """For the name of links beside these that all ranks make at once."""
        return next(self._numbers)

    def take(self, other: Links) -> None:
        """Has from now on what links made `beside` these have."""
        for end in other._ends():
            end.links = self
        self._groups |= other._groups
        self._channels |= other._channels
        with self._lock:
            self._sockets |= other._sockets
        other.leave()

    def fail(self) -> None:
        """Of links made `beside` others: this rank cannot make its part of them, and nobody is to wait for it."""
        if self._asked is not None and self.context.abort.reason is None:
            with suppress(LinkError):
                self._asked.set(self._failed, "yes")

    @property
    def _failed(self) -> str:
        return f"generation{self.context.generation}/{self._name}/failed"

    def _others_failed(self) -> bool:
        return self._asked is not None and self._asked.check([self._failed])

    def leave(self) -> None:
        """Without closing what others use."""
        self.context.abort.forget(self.let_go)
        self.deadline.close()
        self._groups, self._channels = {}, {}

    @property
    def sent_bytes(self) -> int:
        """Bytes of messages sent to neighbours."""
        return self.traffic["send"].bytes if "send" in self.traffic else 0

    def close(self) -> None:
        """Leave in good order. Everything that was started must have been awaited."""
        assert not self._pending, f"{len(self._pending)} operations were never awaited"
        self.context.abort.forget(self.let_go)
        self.deadline.close()
        if self.device.type == "cuda":
            for backend in self._backends():
                backend.shutdown()
        self._groups.clear()
        self._channels.clear()

    def abort(self) -> None:
        """Leave at once. Buffers of unfinished operations must not be used again."""
        self.context.abort.forget(self.let_go)
        self.deadline.close()
        self.let_go()
        own = [end for end in self._ends() if end.links is self and end.backend is not None]
        if self.device.type == "cuda":
            for end in own:
                keep_for_ever(end.backend)
        keep_until_over(list(self._pending), own if self.device.type == "cpu" else ())
        self._groups, self._channels = {}, {}

    def __enter__(self) -> Links:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def start(
        self, kind: str, call: Callable[[], Any], tensors: tuple[Tensor, ...], partners: str,
        finish: Callable[[], None] | None = None, backend: Any = None,
    ) -> Pending:  # fmt: skip
        """Start an operation of a backend and count it; `tensors[0]` is the one whose bytes count."""
        assert all(tensor.is_contiguous() for tensor in tensors), f"{kind} of a tensor that is not contiguous"
        try:
            work = call()
        except RuntimeError as error:
            if self.device.type == "cuda":
                nccl.end_open_group()
            if (reason := self.context.abort.reason) is not None:
                raise LinkError(f"{self.context.name} stopped at {kind} {partners}: {reason}") from error
            if not is_lost_connection(error):
                raise
            raise LinkError(f"{self.context.name} lost the connection at {kind} {partners} ({cause(error)})") from error
        traffic = self.traffic.setdefault(kind, Traffic())
        traffic.calls += 1
        traffic.bytes += tensors[0].nbytes
        pending = Pending(
            self.context, work, tensors, deadline=self.deadline, subject=kind, partners=partners, finish=finish,
            ended=self._pending.discard, backend=backend,
        )  # fmt: skip
        self._pending.add(pending)
        return pending

    def _connect(self, ranks: tuple[int, ...], purpose: str, one_way: bool = False) -> Any:
        """The communicator of these ranks. Made on another thread: a peer that dies meanwhile can block it for ever."""
        name = f"{purpose}/{'-'.join(map(str, ranks))}"
        self._made[name] += 1
        again = f"/{self._made[name]}" if self._made[name] > 1 else ""
        prefix = f"generation{self.context.generation}/{self._name}/{name}{again}"
        store = dist.PrefixStore(prefix, self.context.store.for_torch)
        index = ranks.index(self.context.rank)

        def make() -> Any:
            if self.device.type == "cuda":
                return nccl.connect(store, index, ranks, name, self.timeout, self.device, one_way)
            return _make_gloo(store, index, len(ranks), self.context.address, self.timeout)

        before, began, seconds = open_sockets(), time.monotonic(), self.timeout.total_seconds()
        try:
            backend = within(seconds, make, unless=self._is_in_vain)
        except (Late, RuntimeError) as error:
            if self.context.abort.reason is None and self._others_failed():
                raise OthersStopped(f"{self.context.name} was told that others do not connect") from None
            late = time.monotonic() - began >= 0.95 * seconds  # the library's own deadline may come first
            reason = self.context.abort.reason or (f"no answer for {seconds:.0f} s" if late else cause(error))
            others = _named(rank for rank in ranks if rank != self.context.rank)
            raise LinkError(f"{self.context.name} could not connect to {others}: {reason}") from error
        with self._lock:
            self._sockets |= opened_since(before)
        if self.context.abort.reason is not None:
            self.let_go()
        return backend

    def _is_in_vain(self) -> bool:
        """Whether a communicator that is being made will not come to be."""
        return self.context.abort.reason is not None or self._others_failed()

    def _backends(self) -> list[Any]:
        return [end.backend for end in self._ends() if end.backend is not None]

    def _ends(self) -> list[Group | Channel]:
        return [*self._groups.values(), *self._channels.values()]

    def let_go(self) -> None:
        """Make every wait of this rank end, and those of its peers too. Any thread may call it."""
        with self._lock:
            shut(self._sockets, spare_port=self.context.store_port)
            backends = self._backends() if self.device.type == "cuda" else []
            left = [backend for backend in backends if backend not in self._given_up]
            self._given_up += left
            nccl.give_up(left)


class Group:
    """Collectives over some ranks; with one rank they do what is left of them."""

    def __init__(self, links: Links, ranks: tuple[int, ...], backend: Any) -> None:
        self.ranks, self.backend, self.index = ranks, backend, ranks.index(links.context.rank)
        self.links, self._partners = links, "with " + _named(rank for rank in ranks if rank != links.context.rank)
        self._scratch: list[Tensor] = []

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> Pending:
        """In place."""
        if self.backend is None:
            return self._nothing()
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return self._start("all_reduce", lambda: self.backend.allreduce([tensor], options), (tensor,))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Pending:
        """`output` becomes this rank's part (by its index) of the sum of all `input`s."""
        assert input.numel() == output.numel() * len(self.ranks), (output.shape, input.shape, self.ranks)
        if self.backend is None:
            output.view(-1).copy_(input.view(-1))
            return self._nothing()
        if output.is_cuda:
            call = lambda: self.backend._reduce_scatter_base(output.view(-1), input.view(-1))  # noqa: E731
            return self._start("reduce_scatter", call, (input, output))
        return self._exchange_and_sum(output, input)

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        """`output` becomes all `input`s one after the other."""
        assert output.numel() == input.numel() * len(self.ranks), (output.shape, input.shape, self.ranks)
        if self.backend is None:
            output.view(-1).copy_(input.view(-1))
            return self._nothing()
        call = lambda: self.backend._allgather_base(output.view(-1), input.view(-1))  # noqa: E731
        return self._start("all_gather", call, (output, input))

    def all_to_all(self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
        """Rows of `input` go to the ranks of the group in turn, `sent` of them to each; `output` gets what they send
        here, `received` of each."""
        assert (sum(received), sum(sent)) == (output.shape[0], input.shape[0]), (received, sent)
        if self.backend is None:
            output.copy_(input)
            return self._nothing()
        call = lambda: self.backend.alltoall_base(output, input, list(received), list(sent))  # noqa: E731
        return self._start("all_to_all", call, (input, output))

    def confirm(self, tensor: Tensor, what: str) -> None:
        """Returns, on the host, once what was awaited is really there; raises if links were given up instead. On CPUs a
        wait says as much."""
        if not tensor.is_cuda:
            return
        arrived, context, began = torch.cuda.Event(), self.links.context, time.monotonic()
        arrived.record()
        context.slot.wait(True)
        while not arrived.query() and context.abort.reason is None:
            if (seconds := time.monotonic() - began) > self.links.timeout.total_seconds():
                self.links.let_go()
                raise late(context.name, seconds, what, self._partners)
            time.sleep(1e-5)
        context.slot.wait(False)
        if context.abort.reason is not None:
            raise LinkError(f"{context.name} stopped waiting for {what}: {context.abort.reason}")

    def texts(self, text: str) -> list[str]:
        """The texts of all ranks of the group, in its order."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.links.device)
        sizes = torch.zeros(len(self.ranks) + 1, dtype=torch.int64, device=self.links.device)
        sizes[self.index], sizes[-1] = len(own), 1
        self.all_reduce(sizes).wait("the lengths of what ranks say")
        self.confirm(sizes, "the lengths of what ranks say")
        *lengths, told = sizes.tolist()
        if told != len(self.ranks):
            raise LinkError(f"{self.links.context.name} was told by {told} of {len(self.ranks)} ranks what they say")
        if not any(lengths):
            return [""] * len(lengths)
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.links.device)
        padded[: len(own)] = own
        found = torch.zeros(len(lengths) * len(padded), dtype=torch.uint8, device=self.links.device)
        self.all_gather(found, padded).wait("what ranks say")
        self.confirm(found, "what ranks say")
        rows = found.view(len(lengths), -1).cpu()
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def broadcast(self, tensor: Tensor, root: int) -> Pending:
        """`root` is a rank of the world."""
        if self.backend is None:
            return self._nothing()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ranks.index(root), 0
        return self._start("broadcast", lambda: self.backend.broadcast([tensor], options), (tensor,))

    def barrier(self) -> Pending:
        """Its wait returns, on the host, when every rank of the group has come here."""
        if self.backend is None:
            return self._nothing()
        tensor = torch.zeros(1, device=self.links.device)
        finish = partial(self.confirm, tensor, "all ranks")
        call = lambda: self.backend.allreduce([tensor], dist.AllreduceOptions())  # noqa: E731
        return self._start("barrier", call, (tensor,), finish)

    def _exchange_and_sum(self, output: Tensor, input: Tensor) -> Pending:
        # gloo's own reduce_scatter copies its input on the calling thread and takes twice as long; and torch's sum
        # adds half-precision numbers in full precision.
        scratch = self._borrow(input)

        def finish() -> None:
            torch.sum(scratch.view(len(self.ranks), -1), 0, out=output.view(-1))
            self._scratch.append(scratch)

        call = lambda: self.backend.alltoall_base(scratch, input.view(-1), [], [])  # noqa: E731
        return self._start("reduce_scatter", call, (input, output, scratch), finish)

    def _borrow(self, like: Tensor) -> Tensor:
        for place, tensor in enumerate(self._scratch):
            if tensor.numel() == like.numel() and tensor.dtype == like.dtype:
                return self._scratch.pop(place)
        return torch.empty(like.numel(), dtype=like.dtype, device=like.device)

    def _start(
        self, kind: str, call: Callable[[], Any], tensors: tuple[Tensor, ...], finish: Callable[[], None] | None = None
    ) -> Pending:
        return self.links.start(kind, call, tensors, self._partners, finish, self.backend)

    def _nothing(self) -> Pending:
        links = self.links
        return Pending(links.context, None, (), deadline=links.deadline, subject="nothing", partners=self._partners)


class Channel:
    """Tensors to or from one neighbour, in order. Between CPU ranks each is a broadcast: a wait for one of gloo's own
    messages cannot be made in slices."""

    def __init__(self, links: Links, peer: int, way: Literal["out", "in"], backend: Any) -> None:
        self.peer, self.way, self.backend, self.links = peer, way, backend, links

    def send(self, tensor: Tensor) -> Pending:
        assert self.way == "out"
        call = lambda: self.backend.send([tensor], 1, 0) if tensor.is_cuda else self._broadcast(tensor)  # noqa: E731
        return self.links.start("send", call, (tensor,), f"to rank {self.peer}", backend=self.backend)

    def recv(self, tensor: Tensor) -> Pending:
        assert self.way == "in"
        call = lambda: self.backend.recv([tensor], 0, 0) if tensor.is_cuda else self._broadcast(tensor)  # noqa: E731
        return self.links.start("recv", call, (tensor,), f"from rank {self.peer}", backend=self.backend)

    def _broadcast(self, tensor: Tensor) -> Any:
        return self.backend.broadcast([tensor.view(-1).view(torch.uint8)], _FROM_THE_SENDER)  # of any dtype


def _named(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _make_gloo(store: Any, index: int, size: int, address: str, timeout: timedelta) -> Any:
    """A gloo communicator that listens on `address`. Nobody may wait for it any more when one of its ranks is lost:
    then it is given up after `timeout`."""
    made: Any = None
    if address:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs name it otherwise
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        made = dist.ProcessGroupGloo(store, index, size, options)
    else:  # only so does gloo look at GLOO_SOCKET_IFNAME
        made = dist.ProcessGroupGloo(store, index, size, timeout)
    made._set_default_timeout(NEVER)  # of operations
    return made

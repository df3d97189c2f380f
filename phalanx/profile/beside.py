"""What ranks do to each other: how fast each computes beside others, how long transfers take idle and beneath
computation, and what that loses to them. Measured by all ranks of a job together, for `predict/contention.py`.

Ranks that have nothing to do wait for the others without using a core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from phalanx.comm.links import Direction, Flow, Group, Links
from phalanx.comm.pending import Pending
from phalanx.predict.contention import Speeds, Work
from phalanx.predict.costs import Curve

Run = Callable[[], Any]
_WARM_UP, _ROUNDS, _SECONDS, _MOST = 2, 3, 0.04, 200
_MEETINGS = 16  # sums in a round after computations
_BENEATH = 6  # transfers in a round beneath computation
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


class Together:
    """All ranks of these links, or these members of them, which call the same methods in the same order. Messages are
    those of all ranks."""

    def __init__(self, links: Links, members: Sequence[int] = ()) -> None:
        self.links, self.device = links, links.device
        self.members = tuple(members) or tuple(range(links.context.world))
        self.rank, self.size = self.members.index(links.context.rank), len(self.members)
        self.world = links.group(self.members, "profile")

    def most(self, number: float) -> float:
        """Of what all ranks say; none goes on before all have."""
        said = torch.tensor([number], dtype=torch.float64, device=self.device)
        self.world.all_reduce(said, "max").wait("the other ranks")
        return float(said.item())

    def group(self, size: int) -> Group:
        """The one of this rank, where consecutive ranks form groups of this size."""
        first = self.rank - self.rank % size
        return self.links.group(self.members[first : first + size], "profile")

    def seconds(self, run: Run, busy: bool = True, times: int | None = None) -> float:
        """Of one run, of the slowest rank of those that are busy; the median of a few rounds. times: runs of a round;
        None: as many as take a while."""

        def timed(times: int) -> float:
            self.most(0.0)
            begin = time.perf_counter()
            if busy:
                for _ in range(times):
                    run()
                self.synchronize()
            return self.most((time.perf_counter() - begin) / times if busy else 0.0)

        timed(_WARM_UP)
        count = times or max(1, min(_MOST, int(_SECONDS / max(timed(1), 1e-7))))
        return statistics.median(timed(count) for _ in range(_ROUNDS))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def computing(ranks: Together, run: Run) -> Speeds:
    """How fast a rank gets on with its work beside one other that does the same, beside two, …"""
    alone, *others = [ranks.seconds(run, ranks.rank < busy) for busy in range(1, ranks.size + 1)]
    return tuple(min(1.0, alone / seconds) for seconds in others)


def collective(ranks: Together, kind: str, size: int, group_size: int, num_groups: int = 1) -> float:
    """Seconds of one over `size` bytes, while so many groups have one at the same time."""
    group = ranks.group(group_size)
    busy = ranks.rank < num_groups * group_size
    return ranks.seconds(lambda: _start(group, kind, size, ranks.device).wait("a collective"), busy)


def _start(group: Group, kind: str, size: int, device: torch.device) -> Any:
    count = max(1, size // 4 // len(group.ranks)) * len(group.ranks)
    whole, part = _buffers(count, len(group.ranks), device)
    if kind == "all_reduce":
        return group.all_reduce(whole)
    return group.all_gather(whole, part) if kind == "all_gather" else group.reduce_scatter(part, whole)


_kept: dict[tuple[int, int, str], tuple[torch.Tensor, torch.Tensor]] = {}


def _buffers(count: int, parts: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    key = (count, parts, str(device))
    if key not in _kept:
        _kept.clear()
        _kept[key] = torch.zeros(count, device=device), torch.zeros(count // parts, device=device)
    return _kept[key]


def message(ranks: Together, size: int, peer: int = 1) -> float:
    """Seconds of one from rank 0 to another, half of those there and back."""
    if ranks.rank not in (0, peer):
        return ranks.seconds(lambda: None, busy=False) / 2
    return ranks.seconds(_to_and_fro(ranks, size, peer)) / 2


def issuing(ranks: Together, size: int) -> float:
    """Seconds that starting a message takes of a rank's own time."""
    if ranks.rank > 1:
        return ranks.most(0.0)
    exchange, found = _to_and_fro(ranks, size, 1), list[float]()
    for _ in range(10):
        exchange(found)
    return ranks.most(statistics.median(found))


def _to_and_fro(ranks: Together, size: int, peer: int) -> Callable[..., None]:
    links, other = ranks.links, peer if ranks.rank == 0 else 0
    links.open_channels([(0, peer, "f"), (peer, 0, "b")])
    there, back = ("f", "b") if ranks.rank == 0 else ("b", "f")
    sent, come = (torch.zeros(max(1, size // 4), device=ranks.device) for _ in range(2))
    out, into = links.channel(other, there, "out"), links.channel(other, back, "in")

    def send(issued: list[float] | None) -> None:
        begin = time.perf_counter()
        pending = out.send(sent)
        if issued is not None:
            issued.append(time.perf_counter() - begin)
        pending.wait("a message to leave")

    def exchange(issued: list[float] | None = None) -> None:
        if ranks.rank == 0:
            send(issued)
        into.recv(come).wait("a message")
        if ranks.rank != 0:
            send(issued)

    return exchange


class Meeting(NamedTuple):
    """What a sum over ranks takes after a computation of each. start: of a rank's own time, until it is on its way;
    lost: beyond that, the computation and a sum of ranks that have nothing else to do."""

    start: float
    lost: float


def meeting(ranks: Together, run: Run, size: int, group_size: int) -> Meeting:
    """Where ranks are more than cores, each comes to the sum when it had one. size: bytes."""
    group, started = ranks.group(group_size), list[float]()

    def summed() -> None:
        begin = time.perf_counter()
        pending = _start(group, "all_reduce", size, ranks.device)
        started.append(time.perf_counter() - begin)
        pending.wait("a sum")

    def both() -> None:
        run()
        summed()

    computed, only = ranks.seconds(run, times=_MEETINGS), ranks.seconds(summed, times=_MEETINGS)
    started.clear()
    together = ranks.seconds(both, times=_MEETINGS)
    start = ranks.most(statistics.fmean(started))
    return Meeting(start, max(0.0, together - computed - only - start))


@dataclass(frozen=True)
class Beneath:
    """transfer: speeds of a collective of all ranks beneath the computation of one rank, of two, …; compute: the speed
    of computation of all ranks with a collective beneath it."""

    transfer: Speeds
    compute: float


def beneath(ranks: Together, run: Run, size: int, counts: Sequence[int] = ()) -> Beneath:
    """size: bytes that are summed over all ranks. run: takes much less time than that. counts: of ranks that compute;
    all there can be, where none are given. The last is that of all ranks."""

    def synchronized() -> None:
        run()
        ranks.synchronize()

    crowded = ranks.seconds(synchronized)
    idle = _rounds(ranks, None, size)[0]
    speeds: list[float] = []
    done = 1.0
    for busy in counts or range(1, ranks.size + 1):
        seconds, count = _rounds(ranks, synchronized if ranks.rank < busy else None, size)
        speeds.append(min(1.0, idle / seconds))
        done = count * crowded / seconds
    return Beneath(tuple(speeds), min(1.0, -ranks.most(-done)))


def _rounds(ranks: Together, run: Run | None, size: int) -> tuple[float, float]:
    """(seconds of a transfer, how often this rank ran meanwhile), with transfers one after the other."""
    found: list[tuple[float, float]] = []
    for number in range(_ROUNDS + 1):
        ranks.most(0.0)
        begin, count = time.perf_counter(), 0
        for _ in range(_BENEATH):
            pending = _start(ranks.world, "all_reduce", size, ranks.device)
            while run is not None and not pending.done():
                run()
                count += 1
            pending.wait("a sum")
            ranks.synchronize()
        seconds = ranks.most(time.perf_counter() - begin)
        if number:  # the first warms up
            found.append((seconds / _BENEATH, count / _BENEATH))
    return statistics.median(own for own, _ in found), statistics.median(own for _, own in found)


def product(device: torch.device, side: int | None = None) -> Run:
    """Of square matrices; without their side, one that takes about a millisecond."""
    side = side or (2048 if device.type == "cuda" else 192)
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    return lambda: torch.mm(a, b)


@dataclass(frozen=True)
class Seen:
    """What ranks saw of transfers and of each other."""

    transfers: dict[tuple[str, int], Curve]
    beside: dict[tuple[Work, Work], Speeds]
    issue: float
    start: float
    meeting: dict[int, float]


def measure(ranks: Together, run: Run, small: Run, sizes: Sequence[int]) -> Seen:
    """run: a computation as those of training; small: one that takes about a millisecond. sizes: bytes of transfers,
    rising."""
    groups = [size for size in range(2, ranks.size + 1) if ranks.size % size == 0]
    curves = {
        (kind, size): tuple((float(own), collective(ranks, kind, own, size)) for own in sizes)
        for size in groups
        for kind in KINDS
    }
    curves["send", 2] = tuple((float(own), message(ranks, own)) for own in sizes)
    below = beneath(ranks, small, sizes[-1])
    beside: dict[tuple[Work, Work], Speeds] = {
        (Work.COMPUTE, Work.COMPUTE): computing(ranks, run),
        (Work.TRANSFER, Work.COMPUTE): below.transfer,
        (Work.COMPUTE, Work.TRANSFER): tuple(
            1 - (1 - below.compute) * number / ranks.size for number in range(1, ranks.size + 1)
        ),
    }
    beside[Work.TRANSFER, Work.TRANSFER] = transferring(ranks, sizes[-1])
    beside[Work.COMPUTE, Work.LISTEN] = listening(ranks, run)
    met = {size: meeting(ranks, run, sizes[len(sizes) // 2], size) for size in groups}
    _kept.clear()
    start = statistics.median(own.start for own in met.values())
    return Seen(curves, beside, issuing(ranks, sizes[0]), start, {size: own.lost for size, own in met.items()})


def transferring(ranks: Together, size: int) -> Speeds:
    """How fast a transfer gets on beside one other rank that communicates, beside two, …: sums of two ranks beside each
    other, then messages round all ranks, then such both ways."""
    sums = [collective(ranks, "all_reduce", size, 2, number) for number in range(1, ranks.size // 2 + 1)]
    one_way: list[Flow] = [(rank, (rank + 1) % ranks.size, "f") for rank in range(ranks.size)]
    both_ways: list[Flow] = [*one_way, *((receiver, sender, "b") for sender, receiver, _ in one_way)]
    alone, *crowded = [messages(ranks, size, flows) for flows in (one_way[:1], one_way, both_ways)]
    found = [sums[0] / seconds for seconds in sums[1:] for _ in range(2)]
    for flows, seconds in zip((one_way, both_ways), crowded, strict=True):
        found += [alone / seconds] * (2 * (len(flows) - 1) - len(found))
    return tuple(accumulate((min(1.0, speed) for speed in found), min))


def listening(ranks: Together, run: Run) -> Speeds:
    """How fast a rank gets on with its work beside one message that a rank asked for and that has not come, beside two,
    …: measured while all ranks wait for as many, from their neighbours on both sides, and between these numbers on a
    straight line."""
    before, after = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    ways: list[tuple[int, int, Direction]] = [(before, after, "f"), (after, before, "b"), (after, before, "f"),
                                              (before, after, "b")]  # fmt: skip
    both: tuple[Direction, ...] = ("f", "b")
    every: list[Flow] = [
        (rank, (rank + step) % ranks.size, way) for way in both for step in (1, -1) for rank in range(ranks.size)
    ]
    ranks.links.open_channels(dict.fromkeys(every))
    alone, speeds = ranks.seconds(run), [1.0]
    for number in range(1, len(ways) + 1):
        held = _Held(ranks, ways[:number])
        speeds.append(min(speeds[-1], alone / ranks.seconds(run)))
        held.let_come()
    return tuple(
        low + (high - low) * part / ranks.size for low, high in pairwise(speeds) for part in range(1, ranks.size + 1)
    )


def waiting(ranks: Together, run: Run, peer: int | None) -> float:
    """The same beside one message, where ranks wait for each other in pairs. peer: None of one that has none."""
    if peer is not None:
        low, high = sorted((ranks.links.context.rank, peer))
        ranks.links.open_channels([(low, high, "f"), (high, low, "f")])
    alone = ranks.seconds(run)
    held = _Held(ranks, [(peer, peer, "f")] if peer is not None else [])
    beside = ranks.seconds(run)
    held.let_come()
    return min(1.0, alone / beside)


class _Held:
    """Messages that every rank has asked for and none has sent. ways: from whom they come here, and to whom this rank
    is to send such a one."""

    def __init__(self, ranks: Together, ways: Sequence[tuple[int, int, Direction]]) -> None:
        self._ranks, self._ways = ranks, ways
        channels = [ranks.links.channel(source, way, "in") for source, _, way in ways]
        self._pending = [channel.recv(torch.zeros(1, device=ranks.device)) for channel in channels]

    def let_come(self) -> None:
        channels = [self._ranks.links.channel(target, way, "out") for _, target, way in self._ways]
        self._pending += [channel.send(torch.zeros(1, device=self._ranks.device)) for channel in channels]
        for one in self._pending:
            one.wait("a message")


def messages(ranks: Together, size: int, flows: Sequence[Flow]) -> float:
    """Seconds of one along each of these flows, all at the same time."""
    links, rank = ranks.links, ranks.rank
    links.open_channels(flows)
    own = [flow for flow in sorted(flows) if rank in flow[:2]]
    tensors = [torch.zeros(max(1, size // 4), device=ranks.device) for _ in own]

    def exchange() -> None:
        pending: list[Pending] = []
        for (sender, receiver, direction), tensor in zip(own, tensors, strict=True):
            if sender == rank:
                pending.append(links.channel(receiver, direction, "out").send(tensor))
            else:
                pending.append(links.channel(sender, direction, "in").recv(tensor))
        for one in pending:
            one.wait("a message")

    return ranks.seconds(exchange, bool(own))

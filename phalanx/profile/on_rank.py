"""What one rank does to find out how fast it is, while the others do the same: one question after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from phalanx.comm.links import Group, Links
from phalanx.launch.context import RankContext
from phalanx.planning.rates import COLLECTIVES, SPEEDS, Spread
from phalanx.profile.beside import Together, beneath, product, waiting

_MOST = 200  # of one thing in a round
_BUSY = {"cpu": 512, "cuda": 4096}  # side of products that ranks compute beside each other
_SUMMED = {"cpu": 2**24, "cuda": 2**28}  # bytes that are summed beneath computation
_SUMMED_FAR = {"cpu": 2**22, "cuda": 2**26}


@dataclass(frozen=True)
class Question:
    """What is measured: products of matrices with so many rows, something of so many bytes, or how fast things get on
    beside so many ranks, or messages that each waits for, as a share of their speed alone. is_far: among the ranks of
    all nodes, not of each."""

    kind: str
    size: int
    is_far: bool = False


class Care(NamedTuple):
    """Seconds of a round, rounds of which the quickest counts, and how often a thing is done before."""

    seconds: float
    rounds: int
    warm_up: int


@dataclass(frozen=True)
class Team:
    """A rank among all those that measure together. nodes: the ranks of each. one_machine: whether the nodes are parts
    of one machine."""

    context: RankContext
    spread: Spread
    nodes: tuple[tuple[int, ...], ...]
    one_machine: bool = False

    @staticmethod
    def of(context: RankContext) -> Team:
        """One that is alone."""
        assert context.world == 1
        return Team(context, Spread(), ((0,),))

    @property
    def near(self) -> tuple[int, ...]:
        return next(ranks for ranks in self.nodes if self.context.rank in ranks)

    def members(self, is_far: bool) -> tuple[int, ...]:
        return tuple(range(self.context.world)) if is_far else self.near

    def peer(self, is_far: bool) -> int | None:
        """With whom messages are exchanged: the next rank of the node, or the same one of the next node; of an odd
        number the last has none."""
        place, node = self.near.index(self.context.rank), self.nodes.index(self.near)
        if is_far:
            return self.nodes[node ^ 1][place] if node ^ 1 < len(self.nodes) else None
        return self.near[place ^ 1] if place ^ 1 < len(self.near) else None


def answer(team: Team, links: Links | None, question: Question, dtype: str, care: Care) -> float:
    """FLOP/s, bytes/s, a share of a speed, or the seconds of a collective; all ranks measure at the same time."""
    device, kind, size = torch.device(team.context.device), question.kind, question.size
    members = team.members(question.is_far)
    group = links.group(members, "profile") if links is not None and len(members) > 1 else None
    if kind == "listening":
        assert links is not None
        return waiting(Together(links, members), product(device), team.peer(question.is_far))
    if kind in SPEEDS:
        assert links is not None
        return _speed(kind, size, Together(links, members), question.is_far)
    if kind in COLLECTIVES:
        assert links is not None and group is not None
        return _seconds(_collective(kind, size, links, group, team.peer(question.is_far)), device, group, care)
    if kind == "product":
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), device, group, care)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    if kind == "host":
        kept = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return size / _seconds(lambda: kept.copy_(source, non_blocking=True), device, group, care)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device, group, care)


def _speed(kind: str, busy: int, ranks: Together, is_far: bool) -> float:
    """Of computation beside so many ranks that compute, counting its own; of all ranks' computation with a sum beneath
    it, and of that sum."""
    device = ranks.device.type
    if kind == "computing":
        whole = product(ranks.device, _BUSY[device])
        alone, beside = (ranks.seconds(whole, ranks.rank < number) for number in (1, busy))
        return min(1.0, alone / beside)
    found = beneath(ranks, product(ranks.device), (_SUMMED_FAR if is_far else _SUMMED)[device], (busy,))
    return found.compute if kind == "computing beneath" else found.transfer[0]


def _collective(kind: str, size: int, links: Links, group: Group, peer: int | None) -> Callable[[], Any]:
    """size: bytes of the whole tensor that is summed, gathered or scattered; of a message to the peer."""
    ranks, rank, device = len(group.ranks), links.context.rank, links.device
    count = max(1, size // 4 // ranks) * ranks
    whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
    if kind == "all_reduce":
        return lambda: group.all_reduce(whole).wait("a sum")
    if kind == "all_gather":
        return lambda: group.all_gather(whole, part).wait("a gather")
    if kind == "reduce_scatter":
        return lambda: group.reduce_scatter(part, whole).wait("a scatter")
    if peer is None:
        return lambda: None
    low, high = sorted((rank, peer))
    links.open_channels([(low, high, "f"), (high, low, "b")])
    there, back = ("f", "b") if rank == low else ("b", "f")
    other, out, into = torch.zeros_like(whole), links.channel(peer, there, "out"), links.channel(peer, back, "in")

    def exchange() -> None:
        sent = out.send(whole)
        into.recv(other).wait("a message")
        sent.wait("a message to leave")

    return exchange


def _seconds(work: Callable[[], Any], device: torch.device, group: Group | None, care: Care) -> float:
    """Of one, in the quickest of a few rounds in which all ranks do equally many: what else the machine does only makes
    it slower."""

    def timed(times: int) -> float:
        if group is not None:
            group.barrier().wait("all ranks")
        begin = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / times

    timed(care.warm_up)
    times = max(1, min(_MOST, int(care.seconds / max(timed(1), 1e-7))))
    if group is not None:
        fewest = torch.tensor([-float(times)], device=device)  # whoever has nothing to do would do it most often
        group.all_reduce(fewest, "max").wait("an agreement")
        times = -int(fewest.item())
    return min(timed(times) for _ in range(care.rounds))

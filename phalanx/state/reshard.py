"""From one layout to another: carrying out the moves that `moves` plans, between ranks and from files.

Planning is the same on every rank, so nothing is negotiated: each rank knows what it sends and what it will receive.
How bytes travel is a transport's work; that a source may be files is `checkpoint`'s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from phalanx.state.layout import Box, Layout, StateShard
from phalanx.state.moves import Move, plan_moves

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from phalanx.state.checkpoint import Checkpoint


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object: ...


class Transport(Protocol):
    """Messages between two ranks arrive in the order in which they were sent; nothing blocks before `wait`."""

    def send(self, peer: int, tensor: Tensor) -> Pending: ...

    def recv(self, peer: int, tensor: Tensor) -> Pending: ...


def reshard(
    old: Layout,
    new: Layout,
    local: Mapping[str, Tensor],
    *,
    rank: int,
    transport: Transport,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """What `rank` holds in the new layout: flat data by name, on `device`. Every rank of both layouts calls this.

    `local` is this rank's data in the old layout. Between two ranks there is one message per dtype.
    """
    return execute(plan_moves(old, new), new.get(rank, ()), local, rank=rank, transport=transport, device=device)


def execute(
    moves: Iterable[Move],
    shards: Iterable[StateShard],
    local: Mapping[str, Tensor],
    *,
    rank: int,
    transport: Transport,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Carries out one rank's part of planned moves; `shards` is what this rank has afterwards."""
    result = {shard.name: _empty(shard.numel, shard.dtype, device) for shard in shards}
    outgoing, incoming = _messages(moves, rank)
    sends = [transport.send(peer, _pack(message, local, device)) for (peer, _), message in outgoing if peer != rank]
    arrivals: list[tuple[Pending, Tensor, list[Move]]] = []
    for (peer, dtype), message in incoming:
        if peer == rank:
            for move in message:
                source = move.taken_from.view(local[move.name], move.box)
                move.put_to.view(result[move.name], move.box).copy_(source)
        else:
            buffer = _empty(sum(move.box.numel for move in message), dtype, device)
            arrivals.append((transport.recv(peer, buffer), buffer, message))
    for pending, buffer, message in arrivals:
        pending.wait()
        _unpack(buffer, message, result)
    for pending in sends:
        pending.wait()
    return result


def load(checkpoint: Checkpoint, shards: Iterable[StateShard], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The same state with files as the source: flat data by name, reading only the boxes that are held."""
    return {item.name: checkpoint.read_flat(item.name, item.boxes).to(device) for item in shards}


def gather_tensors(
    layout: Layout,
    local: Mapping[str, Tensor],
    *,
    rank: int,
    transport: Transport,
    root: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors by name on `root`, one at a time, in the layout's order; no rank holds more than one of them.

    Every rank of the layout takes part: those that are not the root go through it too and get nothing.
    """
    by_name: dict[str, dict[int, StateShard]] = {}
    for holder in sorted(layout):
        for shard in layout[holder]:
            by_name.setdefault(shard.name, {})[holder] = shard
    for name, shards in by_name.items():
        any_of = next(iter(shards.values()))
        whole = StateShard(name, any_of.shape, any_of.dtype, (Box.whole(any_of.shape),))
        old, new = {holder: [shard] for holder, shard in shards.items()}, {root: [whole]}
        found = reshard(old, new, local, rank=rank, transport=transport, device=device)
        if rank == root:
            yield name, found[name].view(whole.shape)


Messages = list[tuple[tuple[int, str], list[Move]]]


def _messages(moves: Iterable[Move], rank: int) -> tuple[Messages, Messages]:
    """This rank's moves by (peer, dtype), out and in. Both ends sort alike, so messages need no tags."""
    outgoing: dict[tuple[int, str], list[Move]] = defaultdict(list)
    incoming: dict[tuple[int, str], list[Move]] = defaultdict(list)
    for move in moves:
        if move.source == rank:
            outgoing[move.destination, move.dtype].append(move)
        if move.destination == rank:
            incoming[move.source, move.dtype].append(move)
    return sorted(outgoing.items(), key=lambda item: item[0]), sorted(incoming.items(), key=lambda item: item[0])


def _pack(message: list[Move], local: Mapping[str, Tensor], device: torch.device | str) -> Tensor:
    buffer = _empty(sum(move.box.numel for move in message), message[0].dtype, device)
    start = 0
    for move in message:
        part = buffer[start : start + move.box.numel].view(move.box.shape)
        part.copy_(move.taken_from.view(local[move.name], move.box))
        start += move.box.numel
    return buffer


def _unpack(buffer: Tensor, message: list[Move], result: Mapping[str, Tensor]) -> None:
    start = 0
    for move in message:
        part = buffer[start : start + move.box.numel].view(move.box.shape)
        move.put_to.view(result[move.name], move.box).copy_(part)
        start += move.box.numel


def _empty(numel: int, dtype: str, device: torch.device | str) -> Tensor:
    import torch

    return torch.empty(numel, dtype=getattr(torch, dtype), device=device)

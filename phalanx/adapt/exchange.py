"""Moves between ranks, a round at a time: every rank packs what it gives to each other, one collective carries it all,
and what arrives is compared with the checksum that the sender took of every tensor, then unpacked.

Nothing is negotiated: both ends know all moves and lay out messages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from phalanx.adapt.portions import move_bytes
from phalanx.comm.links import Group
from phalanx.state.moves import Move

_ALIGNED = 16  # bytes: every tensor of a message begins where any dtype may
Held = Mapping[str, Tensor]  # flat data of state shards by name


class Message:
    """What one rank gives to another in a round: checksums, then the elements of every move."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves, self.starts = moves, list[int]()
        end = _round_up(8 * len(moves))
        for move in moves:
            self.starts.append(end)
            end = _round_up(end + move_bytes(move))
        self.size = end if moves else 0

    def pack(self, buffer: Tensor, held: Held) -> None:
        """buffer: as many bytes as the message has."""
        for move, start in zip(self.moves, self.starts, strict=True):
            stop = start + move_bytes(move)
            buffer[stop : _round_up(stop)] = 0
            part = buffer[start:stop].view(getattr(torch, move.dtype)).view(move.box.shape)
            part.copy_(move.taken_from.view(held[move.name], move.box))
        if self.moves:
            self._stored(buffer).copy_(self._sums(buffer))

    def wrong(self, buffer: Tensor) -> Tensor:
        """Per move, whether its elements are not those that were packed."""
        return self._stored(buffer) != self._sums(buffer)

    def unpack(self, buffer: Tensor, held: Held) -> None:
        for move, start in zip(self.moves, self.starts, strict=True):
            part = buffer[start : start + move_bytes(move)].view(getattr(torch, move.dtype)).view(move.box.shape)
            move.put_to.view(held[move.name], move.box).copy_(part)

    def _stored(self, buffer: Tensor) -> Tensor:
        return buffer[: 8 * len(self.moves)].view(torch.int64)

    def _sums(self, buffer: Tensor) -> Tensor:
        stops = (_round_up(start + move_bytes(move)) for move, start in zip(self.moves, self.starts, strict=True))
        spans = zip(self.starts, stops, strict=True)
        return torch.stack([buffer[start:stop].view(torch.int64).sum() for start, stop in spans])


class Staging:
    """Memory through which messages pass, used again and again: the first touch of new memory costs more than a copy
    into it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffers = device, dict[str, Tensor]()

    def take(self, name: str, size: int) -> Tensor:
        """So many bytes, whatever they hold."""
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers.pop(name, None)
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._buffers[name][:size]


def exchange(moves: Sequence[Move], old: Held, new: Held, rank: int, group: Group, staging: Staging) -> list[str]:
    """One round of a group of all ranks; what is wrong with what came, in words."""
    outgoing = _messages((move for move in moves if move.source == rank), group, lambda move: move.destination)
    incoming = _messages((move for move in moves if move.destination == rank), group, lambda move: move.source)
    sent, received = ([message.size for message in messages] for messages in (outgoing, incoming))
    packed, arrived = staging.take("packed", sum(sent)), staging.take("arrived", sum(received))
    for message, part in zip(outgoing, packed.split(sent), strict=True):
        message.pack(part, old)
    group.all_to_all(arrived, packed, received, sent).wait("state that moves")
    problems: list[str] = []
    parts = [(message, part) for message, part in zip(incoming, arrived.split(received), strict=True) if message.moves]
    if parts:
        wrong = torch.cat([message.wrong(part) for message, part in parts]).tolist()
        every = [move for message, _ in parts for move in message.moves]
        problems = [_damaged(move) for move, is_wrong in zip(every, wrong, strict=True) if is_wrong]
    for message, part in parts:
        message.unpack(part, new)
    return problems


def _messages(moves: Iterable[Move], group: Group, peer: Callable[[Move], int]) -> list[Message]:
    """One for every rank of the group, most of them empty."""
    found: dict[int, list[Move]] = {rank: [] for rank in group.ranks}
    for move in moves:
        found[peer(move)].append(move)
    return [Message(own) for own in found.values()]


def _damaged(move: Move) -> str:
    return f"{move.name} came damaged from rank {move.source} to rank {move.destination}"


def _round_up(number: int) -> int:
    return -(-number // _ALIGNED) * _ALIGNED

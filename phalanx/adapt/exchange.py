"""Moves between ranks, a round at a time: every rank packs what it gives to each other, one collective carries it all,
and what arrives is compared with the checksum that the sender took of every tensor, then unpacked.

Nothing is negotiated: both ends know all moves and lay out messages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.adapt.portions import move_bytes
from phalanx.comm.links import Group
from phalanx.state.moves import Move, Place

_ALIGNED = 16  # bytes: every tensor of a message begins where any dtype may
Held = Mapping[str, Tensor]  # flat data of state shards by name


class Message:
    """What one rank gives to another in a round: checksums, then the elements of every move."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = moves
        filled = [move_bytes(move) for move in moves]
        self._head, self._sizes = _round_up(8 * len(moves)), [_round_up(size) for size in filled]
        self.size = self._head + sum(self._sizes)
        dtypes: list[torch.dtype] = [getattr(torch, move.dtype) for move in moves]
        self._taken, self._put = (
            [_Elements(move, place(move), size, dtype) for move, size, dtype in zip(moves, filled, dtypes, strict=True)]
            for place in (lambda move: move.taken_from, lambda move: move.put_to)
        )

    def pack(self, buffer: Tensor, held: Held) -> None:
        """buffer: as many bytes as the message has."""
        for elements, part in zip(self._taken, self._parts(buffer), strict=True):
            elements.to_message(part, held)
        if self.moves:
            self._stored(buffer).copy_(self._sums(buffer))

    def wrong(self, buffer: Tensor) -> Tensor:
        """Per move, whether its elements are not those that were packed."""
        return self._stored(buffer) != self._sums(buffer)

    def unpack(self, buffer: Tensor, held: Held) -> None:
        for elements, part in zip(self._put, self._parts(buffer), strict=True):
            elements.from_message(part, held)

    def _parts(self, buffer: Tensor) -> Sequence[Tensor]:
        return buffer[self._head :].split(self._sizes) if self.moves else ()

    def _stored(self, buffer: Tensor) -> Tensor:
        return buffer[: 8 * len(self.moves)].view(torch.int64)

    def _sums(self, buffer: Tensor) -> Tensor:
        numbers = buffer[self._head :].view(torch.int64).split([size // 8 for size in self._sizes])
        return torch.stack([own.sum() for own in numbers])


class _Elements:
    """Of one move, on one of its two sides. Where they lie one after the other, which is known beforehand, they are
    copied as a row: of many small tensors, finding the elements would take longer than copying them."""

    def __init__(self, move: Move, place: Place, size: int, dtype: torch.dtype) -> None:
        self._move, self._place, self._size, self._dtype = move, place, size, dtype
        self._span = place.span(move.box)

    def to_message(self, part: Tensor, held: Held) -> None:
        if len(part) > self._size:
            part[self._size :] = 0
        message, data = self._both(part, held)
        message.copy_(data)

    def from_message(self, part: Tensor, held: Held) -> None:
        message, data = self._both(part, held)
        data.copy_(message)

    def _both(self, part: Tensor, held: Held) -> tuple[Tensor, Tensor]:
        message = (part if len(part) == self._size else part[: self._size]).view(self._dtype)
        data, box = held[self._move.name], self._move.box
        if self._span is not None:
            return message, data[self._span[0] : self._span[1]]
        return message.view(box.shape), self._place.view(data, box)


@dataclass(frozen=True)
class Round:
    """Moves between ranks at once, as one rank sees them: a message to and from every rank of the group, most of them
    empty."""

    outgoing: list[Message]
    incoming: list[Message]

    @classmethod
    def of(cls, moves: Sequence[Move], rank: int, ranks: Sequence[int]) -> Round:
        return cls(
            _messages((move for move in moves if move.source == rank), ranks, lambda move: move.destination),
            _messages((move for move in moves if move.destination == rank), ranks, lambda move: move.source),
        )

    @property
    def sent_bytes(self) -> int:
        return sum(message.size for message in self.outgoing)

    @property
    def received_bytes(self) -> int:
        return sum(message.size for message in self.incoming)


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

    def make_room(self, rounds: Iterable[Round]) -> None:
        """So that no exchange lacks memory when others wait for it."""
        for own in rounds:
            self.take("packed", own.sent_bytes)
            self.take("arrived", own.received_bytes)


def exchange(own: Round, old: Held, new: Held, group: Group, staging: Staging) -> list[str]:
    """One round of a group of all ranks; what is wrong with what came, in words."""
    outgoing, incoming = own.outgoing, own.incoming
    sent, received = ([message.size for message in messages] for messages in (outgoing, incoming))
    packed, arrived = staging.take("packed", own.sent_bytes), staging.take("arrived", own.received_bytes)
    for message, part in zip(outgoing, packed.split(sent), strict=True):
        message.pack(part, old)
    group.all_to_all(arrived, packed, received, sent).wait("state that moves")
    group.confirm(arrived, "state that moves")  # what an earlier round left there would look sound
    problems: list[str] = []
    parts = [(message, part) for message, part in zip(incoming, arrived.split(received), strict=True) if message.moves]
    if parts:
        wrong = torch.cat([message.wrong(part) for message, part in parts]).tolist()
        every = [move for message, _ in parts for move in message.moves]
        problems = [_damaged(move) for move, is_wrong in zip(every, wrong, strict=True) if is_wrong]
    for message, part in parts:
        message.unpack(part, new)
    return problems


def _messages(moves: Iterable[Move], ranks: Sequence[int], peer: Callable[[Move], int]) -> list[Message]:
    found: dict[int, list[Move]] = {rank: [] for rank in ranks}
    for move in moves:
        found[peer(move)].append(move)
    return [Message(own) for own in found.values()]


def _damaged(move: Move) -> str:
    return f"{move.name} came damaged from rank {move.source} to rank {move.destination}"


def _round_up(number: int) -> int:
    return -(-number // _ALIGNED) * _ALIGNED

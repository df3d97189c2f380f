"""A bucket: parameters that are gathered and reduced together, in flat buffers of which this rank keeps all or a shard.

Trained and frozen parameters lie on shelves of their own. What a rank updates — its *pieces* — is the shard of each
trained shelf; without ZeRO that is everything. Which parameters share a bucket is decided in `model_shape.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.links import Group, Pending
from phalanx.runtime.flat import FlatLayout, Piece
from phalanx.state.local import Local

Read = Callable[[str, bool, Piece], Tensor]
"""(name, whether a master weight is wanted, which piece) → its elements in order, in any shape."""


@dataclass(frozen=True)
class Sharding:
    """How this rank's buckets are divided: `index` of `shards` parts; `whole`: all values are kept all the same."""

    shards: int = 1
    index: int = 0
    whole: bool = True


class Shelf:
    """Parameters side by side: `shard` is this rank's part; `buffer` all of them, None while only the shard is here."""

    def __init__(
        self, tensors: Mapping[str, Local], sharding: Sharding, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout = FlatLayout.of(tensors, sharding.shards)
        self.dtype, self.device = dtype, device
        self.pieces = self.layout.pieces(sharding.index)
        self.buffer: Tensor | None = None
        size, begin = self.layout.shard_size, sharding.index * self.layout.shard_size
        if sharding.whole:
            self.buffer = torch.zeros(self.layout.size, dtype=dtype, device=device)
            self.shard = self.buffer[begin : begin + size]
        else:
            self.shard = torch.zeros(size, dtype=dtype, device=device)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Each parameter as it lies in a buffer that holds them all."""
        return {place.name: buffer[place.start : place.stop].view(place.shape) for place in self.layout.places}

    def cut(self, shard: Tensor) -> dict[str, Tensor]:
        """What a shard holds of each parameter: in its own shape if that is all of it, else as a row of elements."""
        return {
            piece.name: piece.shaped(shard[offset : offset + piece.stop - piece.start]) for piece, offset in self.pieces
        }

    def fill(self, read: Read, is_master: bool) -> Tensor | None:
        """Takes the values in; returns the shard in float32 if they become masters."""
        master = torch.zeros_like(self.shard, dtype=torch.float32) if is_master else None
        if self.buffer is None:
            for piece, offset in self.pieces:
                self._take(read(piece.name, is_master, piece).reshape(-1), offset, master)
            return master
        offsets = {piece.name: (piece, offset) for piece, offset in self.pieces}
        for place in self.layout.places:
            if place.start == place.stop:
                continue  # an uneven split may leave this rank nothing, of which there is nothing to read
            values = read(place.name, is_master, Piece.whole(place.name, place.local)).reshape(-1)
            self.buffer[place.start : place.stop].copy_(values)
            if place.name in offsets and master is not None:
                piece, offset = offsets[place.name]
                self._take(values[piece.start : piece.stop], offset, master)
        return master

    def _take(self, values: Tensor, offset: int, master: Tensor | None) -> None:
        self.shard[offset : offset + values.numel()].copy_(values)
        if master is not None:
            master[offset : offset + values.numel()].copy_(values)


class Bucket:
    """One bucket on this rank. `values` maps the names of parameters to tensors that can be computed with now."""

    def __init__(self, trained: Shelf | None, frozen: Shelf | None, loose: Mapping[Piece, Tensor], zero: Group) -> None:
        self.trained, self._zero = trained, zero
        self.shelves = [shelf for shelf in (trained, frozen) if shelf is not None]
        self._loose = dict(loose)  # parameters that are not numbers with a fraction: never sharded, never trained
        self._arriving: list[tuple[Shelf, Tensor, Pending]] = []
        self._lent: list[Tensor] = []
        self.masters: Tensor | None = None

    def resident(self) -> dict[str, Tensor]:
        """The parameters that are always here."""
        found = {piece.name: tensor for piece, tensor in self._loose.items()}
        for shelf in self.shelves:
            found |= shelf.views(shelf.buffer) if shelf.buffer is not None else {}
        return found

    def share(self) -> None:
        """Starts giving the updated shard to the ranks that did not update it, and taking theirs."""
        if self.trained is not None and self.trained.buffer is not None:
            source = self.trained.shard.clone()  # a collective must not read what it writes
            self._arriving.append(
                (self.trained, self.trained.buffer, self._zero.all_gather(self.trained.buffer, source))
            )

    def gather(self, pool: BufferPool) -> None:
        """Starts collecting the whole from all shards."""
        assert not self._lent, "gathered twice"
        for shelf in self.shelves:
            if shelf.buffer is None:
                buffer = pool.take(shelf.layout.size, shelf.dtype, shelf.device)
                self._lent.append(buffer)
                self._arriving.append((shelf, buffer, self._zero.all_gather(buffer, shelf.shard)))

    def arrive(self) -> dict[str, Tensor]:
        """Waits for what is on its way; the parameters that can be used from now on."""
        found: dict[str, Tensor] = {}
        for shelf, buffer, pending in self._arriving:
            pending.wait("parameters")
            found |= shelf.views(buffer)
        self._arriving.clear()
        return found

    @property
    def is_arriving(self) -> bool:
        return bool(self._arriving)

    def free(self, pool: BufferPool) -> list[str]:
        """Gives back what was gathered; the parameters that cannot be used any more."""
        self.arrive()
        for buffer in self._lent:
            pool.give(buffer)
        self._lent.clear()
        return [place.name for shelf in self.shelves if shelf.buffer is None for place in shelf.layout.places]

    def weights(self) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Each piece that this rank updates: the tensor to update, and the values the model computes with."""
        if self.trained is None:
            return
        copies = self.trained.cut(self.trained.shard)
        updated = copies if self.masters is None else self.trained.cut(self.masters)
        for piece, _ in self.trained.pieces:
            yield piece, updated[piece.name], copies[piece.name]

    def kept(self) -> Iterator[tuple[Piece, Tensor, bool]]:
        """The pieces of frozen parameters, and whether they are this rank's shard."""
        for shelf in self.shelves:
            if shelf is not self.trained:
                cut = shelf.cut(shelf.shard)
                yield from ((piece, cut[piece.name], True) for piece, _ in shelf.pieces)
        yield from ((piece, tensor, False) for piece, tensor in self._loose.items())


class BufferPool:
    """Buffers to use again and again: on a CPU the first touch of new memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free.get((size, dtype))
        return free.pop() if free else torch.zeros(size, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

"""A bucket: parameters that are gathered and reduced together, in flat buffers of which this rank keeps all or a shard.

Trained and frozen parameters lie in buffers of their own. What a rank updates — its *pieces* — is the shard of each
trained buffer; without ZeRO that is everything. Which parameters share a bucket is decided in `engine/compose.py`,
where they lie in it in `layout_of.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from phalanx.comm.links import Group, Pending
from phalanx.params.fetching import Fetching
from phalanx.params.flat import FlatLayout, Piece, Sharding
from phalanx.params.host_memory import Copying, home_of

Read = Callable[[str, bool, Piece], Tensor]
"""(name, whether a master weight is wanted, which piece) → its elements in order, in any shape."""


class FlatBuffer:
    """Parameters side by side: `shard` is this rank's part; `full` all of them, None while only the shard is here.
    on_host: the shard lies on the host of `device`."""

    def __init__(
        self, layout: FlatLayout, sharding: Sharding, dtype: torch.dtype, device: torch.device, *, on_host: bool = False
    ) -> None:  # fmt: skip
        assert layout.shards == sharding.shards, f"{layout.shards} shards are not {sharding.shards}"
        self.layout = layout
        self.dtype, self.device, self.on_host = dtype, device, on_host
        self.pieces = self.layout.pieces(sharding.index)
        self.full: Tensor | None = None
        size, begin = self.layout.shard_size, sharding.index * self.layout.shard_size
        if on_host:
            assert size == self.layout.size or not sharding.whole, "all on the host, of which a shard is updated"
            self.shard = home_of(torch.empty(size, dtype=dtype, device="meta"), device).zero_()
        elif sharding.whole:
            self.full = torch.zeros(self.layout.size, dtype=dtype, device=device)
            self.shard = self.full[begin : begin + size]
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

    def fill(self, read: Read, is_master: bool, only_shard: bool = False) -> Tensor | None:
        """Takes the values in; returns the shard in float32 if they become masters. only_shard: where more is kept
        than that, the rest comes from other ranks (`Bucket.collect`)."""
        master = torch.zeros_like(self.shard, dtype=torch.float32) if is_master else None
        if self.full is None or only_shard:
            for piece, offset in self.pieces:
                self._take(read(piece.name, is_master, piece).reshape(-1), offset, master)
            return master
        offsets = {piece.name: (piece, offset) for piece, offset in self.pieces}
        for place in self.layout.places:
            if place.start == place.stop:
                continue  # an uneven split may leave this rank nothing, of which there is nothing to read
            values = read(place.name, is_master, Piece.whole(place.name, place.local)).reshape(-1)
            self.full[place.start : place.stop].copy_(values)
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

    def __init__(
        self, trained: FlatBuffer | None, frozen: FlatBuffer | None, unsharded: Mapping[Piece, Tensor]
    ) -> None:  # fmt: skip
        self.trained = trained
        self.buffers = [flat for flat in (trained, frozen) if flat is not None]
        self._unsharded = dict(unsharded)  # tables of integers, never trained
        self._arriving: list[tuple[FlatBuffer, Tensor, Pending | Copying]] = []
        self._updates: list[Future[Copying]] = []
        self._lent: list[Tensor] = []
        self._fetched: dict[FlatBuffer, tuple[Tensor, Copying]] = {}  # shards that came to be gathered
        self.masters: Tensor | None = None

    @property
    def on_host(self) -> bool:
        """Whether its parameters lie on the host."""
        return any(flat.on_host for flat in self.buffers)

    def resident(self) -> dict[str, Tensor]:
        """The parameters that are always here."""
        found = {piece.name: tensor for piece, tensor in self._unsharded.items()}
        for flat in self.buffers:
            found |= flat.views(flat.full) if flat.full is not None else {}
        return found

    @property
    def updated(self) -> tuple[tuple[Piece, int], ...]:
        """The pieces that this rank updates, and where each begins in the shard."""
        return self.trained.pieces if self.trained is not None else ()

    def update(self, updated: Future[Copying]) -> None:
        """Its trained parameters are being updated elsewhere; whoever needs them waits."""
        self._updates.append(updated)

    def _finish_updates(self) -> None:
        updates, self._updates = self._updates, []
        for updated in updates:
            updated.result().wait("updated parameters")

    def share(self, zero: Group) -> None:
        """Starts giving the updated shard to the ranks that did not update it, and taking theirs. zero: those that
        together hold all shards."""
        self._finish_updates()
        if self.trained is not None and self.trained.full is not None:
            source = self.trained.shard.clone()  # a collective must not read what it writes
            self._arriving.append((self.trained, self.trained.full, zero.all_gather(self.trained.full, source)))

    def collect(self, zero: Group) -> None:
        """Starts taking what lies here of others' shards, frozen parameters included."""
        for flat in self.buffers:
            if flat.full is not None and flat.layout.shards > 1:
                self._arriving.append((flat, flat.full, zero.all_gather(flat.full, flat.shard.clone())))

    def abandon(self) -> list[str]:
        """What was on its way from other ranks does not come any more; the parameters that cannot be used then. Its
        memory is given to nobody: something may still be written there."""
        self._finish_updates()
        copies = [pending for _, _, pending in self._arriving if isinstance(pending, Copying)]
        for copying in (*copies, *(copying for _, copying in self._fetched.values())):
            copying.wait_here()
        self._arriving.clear()
        self._lent.clear()
        self._fetched.clear()
        return [place.name for flat in self.buffers if flat.full is None for place in flat.layout.places]

    def forget(self) -> None:
        """Lets go of all tensors, whoever still knows this bucket."""
        for flat in self.buffers:
            flat.full, flat.shard = None, flat.shard.new_empty(0)
        self.masters = None
        self._unsharded.clear()
        self._lent.clear()
        self._fetched.clear()

    def fetch(self, pool: BufferPool, fetching: Fetching) -> None:
        """Starts to bring what lies on the host: all of it or, to be gathered, this rank's shard."""
        assert not self._fetched and (not self._lent or not self._is_whole), "fetched twice"
        self._finish_updates()
        for flat in self.buffers:
            buffer = pool.take(flat.layout.shard_size, flat.dtype, flat.device)
            copying = fetching.bring(buffer, flat.shard)
            if self._is_whole:
                self._lent.append(buffer)
                self._arriving.append((flat, buffer, copying))
            else:
                self._fetched[flat] = buffer, copying

    @property
    def _is_whole(self) -> bool:
        """Whether this rank keeps all of its parameters."""
        return all(flat.layout.shards == 1 for flat in self.buffers)

    def drop(self, pool: BufferPool) -> None:
        """Gives back shards that came to be gathered."""
        for buffer, copying in self._fetched.values():
            copying.wait()
            pool.give(buffer)
        self._fetched.clear()

    def gather(self, pool: BufferPool, zero: Group) -> None:
        """Starts collecting the whole from all shards."""
        assert not self._lent, "gathered twice"
        self._finish_updates()
        for flat in self.buffers:
            if flat.full is None:
                buffer = pool.take(flat.layout.size, flat.dtype, flat.device)
                self._lent.append(buffer)
                self._arriving.append((flat, buffer, zero.all_gather(buffer, self._shard_here(flat))))

    def _shard_here(self, flat: FlatBuffer) -> Tensor:
        """This rank's shard on the device."""
        if not flat.on_host:
            return flat.shard
        buffer, copying = self._fetched[flat]
        copying.wait()
        return buffer

    def arrive(self) -> dict[str, Tensor]:
        """Waits for what is on its way; the parameters that can be used from now on."""
        self._finish_updates()
        found: dict[str, Tensor] = {}
        for flat, buffer, pending in self._arriving:
            pending.wait("parameters")
            found |= flat.views(buffer)
        self._arriving.clear()
        return found

    @property
    def is_arriving(self) -> bool:
        return bool(self._arriving or self._updates)

    def free(self, pool: BufferPool) -> list[str]:
        """Gives back what was gathered; the parameters that cannot be used any more."""
        self.arrive()
        for buffer in self._lent:
            pool.give(buffer)
        self._lent.clear()
        return [place.name for flat in self.buffers if flat.full is None for place in flat.layout.places]

    def fill(self, read: Read) -> None:
        """Other values for all that is kept here, but for tables of integers."""
        for flat in self.buffers:
            masters = flat.fill(read, flat is self.trained and self.masters is not None)
            if masters is not None and self.masters is not None:
                self.masters.copy_(masters)

    def weights(self) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Each piece that this rank updates: the tensor to update, and the values the model computes with."""
        if self.trained is None:
            return
        copies = self.trained.cut(self.trained.shard)
        updated = copies if self.masters is None else self.trained.cut(self.masters)
        for piece, _ in self.trained.pieces:
            yield piece, updated[piece.name], copies[piece.name]

    def kept(self) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces of frozen parameters."""
        for flat in self.buffers:
            if flat is not self.trained:
                cut = flat.cut(flat.shard)
                yield from ((piece, cut[piece.name]) for piece, _ in flat.pieces)
        yield from ((piece, tensor) for piece, tensor in self._unsharded.items() if tensor.numel())


class BufferPool:
    """Buffers to use again and again: on a CPU the first touch of new memory costs more than the copy into it.
    keeps_on_gpu: those of a GPU too, whose allocator would keep their memory for tensors of any size."""

    def __init__(self, *, keeps_on_gpu: bool = True) -> None:
        self._keeps_on_gpu = keeps_on_gpu
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free.get((size, dtype))
        return free.pop() if free else torch.zeros(size, dtype=dtype, device=device)

    def give(self, buffer: Tensor) -> None:
        if self._keeps_on_gpu or not buffer.is_cuda:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

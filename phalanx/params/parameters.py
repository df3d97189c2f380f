"""The parameters of this rank: what the engine computes with and, where that is another thing, what is updated.

In half precision the optimizer works on float32 master weights, of which the engine's parameters are rounded copies.
Under ZeRO a rank updates only its pieces, and with stage 3 keeps only those.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.errors import ConfigError, nearest
from phalanx.params.buckets import Bucket, BufferPool, FlatBuffer, Read
from phalanx.params.fetching import Fetching
from phalanx.params.flat import Piece
from phalanx.params.host_memory import on_host
from phalanx.params.layout_of import StateLayout


@dataclass(frozen=True)
class Weight:
    """A piece of a parameter that this rank keeps: what is saved, what is updated, what is computed with."""

    piece: Piece
    exact: Tensor  # in the highest precision there is
    copy: Tensor  # in the precision of training; the same tensor unless there are masters, or the host updates it
    trained: bool

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return f"{'model' if self.exact.dtype == self.copy.dtype else 'master'}/{self.piece.name}"


class Parameters:
    """`values` are the parameters that can be computed with now, `weights` the pieces that this rank keeps, by name.
    on_host: those that lie on the host."""

    def __init__(self, buckets: Mapping[int, Bucket], device: torch.device) -> None:
        self._buckets = buckets
        self.fetching = Fetching(device)
        self._pool = BufferPool(keeps_on_gpu=False)
        self.values: dict[str, Tensor] = {}
        self._gathered: set[int] = set()
        self.peak_gathered = 0
        self.weights: dict[str, Weight] = {}
        self.on_host = {
            place.name for bucket in buckets.values() for flat in bucket.buffers if flat.on_host
            for place in flat.layout.places
        }  # fmt: skip
        for bucket in buckets.values():
            self.values |= bucket.resident()
            for piece, exact, copy in bucket.weights():
                self.weights[piece.name] = Weight(piece, exact, copy, trained=True)
            for piece, tensor in bucket.kept():
                self.weights[piece.name] = Weight(piece, tensor, tensor, trained=False)

    @property
    def trained(self) -> dict[str, Weight]:
        """What the optimizer updates."""
        return {name: weight for name, weight in self.weights.items() if weight.trained}

    @property
    def resident_elements(self) -> int:
        """Elements of parameters that are always here."""
        whole = self.resident()
        pieces = (weight.piece for weight in self.weights.values() if weight.piece.name not in whole)
        elements = sum(tensor.numel() for tensor in whole.values())
        return elements + sum(piece.stop - piece.start for piece in pieces)

    def resident(self) -> dict[str, Tensor]:
        """The parameters that are always here, by name."""
        return {name: tensor for bucket in self._buckets.values() for name, tensor in bucket.resident().items()}

    def bucket(self, index: int) -> Bucket:
        return self._buckets[index]

    def held(self) -> Collection[int]:
        return self._buckets.keys()

    def gather(self, index: int, zero: Group) -> None:
        """zero: the ranks that together hold all shards."""
        self._buckets[index].gather(self._pool, zero)
        self._gathered.add(index)
        self.peak_gathered = max(self.peak_gathered, len(self._gathered))

    def free(self, index: int) -> None:
        for name in self._buckets[index].free(self._pool):
            self.values.pop(name, None)
        self._gathered.discard(index)

    def fetch(self, index: int) -> None:
        """From the host."""
        self._buckets[index].fetch(self._pool, self.fetching)

    def drop(self, index: int) -> None:
        """Gives back a shard that came from the host to be gathered."""
        self._buckets[index].drop(self._pool)

    def share(self, index: int, zero: Group) -> None:
        self._buckets[index].share(zero)

    def share_all(self, zero: Group) -> None:
        """Where ranks keep whole parameters and update a shard of each: after an update outside of a program."""
        for index in self._buckets:
            self.share(index, zero)

    def collect_all(self, zero: Group) -> None:
        """As `collect`, and waits for it."""
        self.collect(zero)
        self.settle()

    def collect(self, zero: Group) -> None:
        """Where ranks keep whole parameters and were filled with a shard of each: starts to get the rest, for which
        whoever computes with it waits."""
        for bucket in self._buckets.values():
            bucket.collect(zero)

    def abandon(self) -> None:
        """The links to other ranks are broken: what was gathered, or on its way, is given up."""
        for bucket in self._buckets.values():
            for name in bucket.abandon():
                self.values.pop(name, None)
        self._gathered.clear()
        self._pool = BufferPool(keeps_on_gpu=False)

    def forget(self) -> None:
        """Lets go of all tensors, whoever still knows these parameters."""
        for bucket in self._buckets.values():
            bucket.forget()
        self.values.clear()
        self.weights.clear()
        self._pool = BufferPool(keeps_on_gpu=False)

    def fill(self, read: Read) -> None:
        """Other values for everything that is kept, one parameter at a time."""
        self.settle()
        for bucket in self._buckets.values():
            bucket.fill(read)

    def ready(self, indices: Iterable[int]) -> None:
        """Waits until the parameters of these buckets have arrived."""
        for index in indices:
            if self._buckets[index].is_arriving:
                self.values.update(self._buckets[index].arrive())

    def settle(self) -> None:
        """Waits for everything that is on its way."""
        self.ready(self._buckets)


def load_parameters(
    state: StateLayout, rank: int, read: Read, *, device: torch.device, hosted: Collection[int] = (),
    fetched: Collection[int] = (), only_shards: bool = False,
) -> Parameters:  # fmt: skip
    """What a rank keeps, read one parameter at a time. hosted: the buckets of which what is updated lies on the host:
    masters, or where the host updates them the parameters. fetched: those whose parameters lie there. only_shards: no
    more is read than what `state` says that this rank keeps; the rest of parameters that are whole here is still to be
    collected."""
    sharding, dtype = state.sharding(rank), getattr(torch, state.facts.dtype)
    tables = {each.name: getattr(torch, each.integer) for each in state.facts.parameters if not each.sharded}
    found: dict[int, Bucket] = {}
    for index, layout in state.buckets(rank).items():
        unsharded = {piece: _read_table(piece, read, tables[piece.name]).to(device) for piece in layout.unsharded}
        trained, frozen = (
            FlatBuffer(own, sharding, dtype, device, on_host=index in fetched) if own else None
            for own in (layout.trained, layout.frozen)
        )
        found[index] = Bucket(trained, frozen, unsharded)
        if trained is not None:
            masters = trained.fill(read, state.facts.masters, only_shards)
            if index in hosted and masters is not None:
                masters = on_host(masters, device)
            elif index in hosted and state.plan.steps_on_host and not trained.on_host:
                masters = on_host(trained.shard, device)
            found[index].masters = masters
        if frozen is not None:
            frozen.fill(read, False, only_shards)
    return Parameters(found, device)


def read_order(state: StateLayout, rank: int) -> list[str]:
    """The parameters that `load_parameters` reads, in its order."""
    found: dict[str, None] = {}
    is_whole, index = state.sharding(rank).whole, state.sharding(rank).index
    for layout in state.buckets(rank).values():
        found |= dict.fromkeys(piece.name for piece in layout.unsharded if piece.local.numel)
        for flat in filter(None, (layout.trained, layout.frozen)):
            places = [place.name for place in flat.places if place.start < place.stop]
            found |= dict.fromkeys(places if is_whole else [piece.name for piece, _ in flat.pieces(index)])
    return list(found)


def keeps_masters(dtype: torch.dtype, master_weights: bool) -> bool:
    """Whether trained parameters are kept in float32 besides. master_weights: whether the user wants that."""
    return master_weights and dtype in (torch.bfloat16, torch.float16)


def _read_table(piece: Piece, read: Read, dtype: torch.dtype) -> Tensor:
    """Integer parameters exist (tables of quantised modules); they are not trained and keep their type."""
    if not piece.local.numel:
        return torch.empty(piece.shape, dtype=dtype)
    return read(piece.name, False, piece).reshape(piece.shape).to(dtype)


def choose_trainable(
    trainable: Sequence[str], names: Iterable[str], aliases: Mapping[str, str], freeze: Sequence[str],
    also_frozen: Collection[str] = (),
) -> tuple[str, ...]:  # fmt: skip
    """The parameters that require gradients and match none of the `freeze` patterns; a tied one matches by any name.
    also_frozen: those that a parameter group freezes."""
    known = [*names, *aliases]
    frozen: set[str] = set(also_frozen)
    for pattern in freeze:
        matches = fnmatch.filter(known, pattern)
        if not matches:
            raise ConfigError(f"option freeze: no parameter matches {pattern!r}", _closest(pattern, known))
        frozen.update(aliases.get(name, name) for name in matches)
    left = tuple(name for name in trainable if name not in frozen)
    if not left:
        reason = f"option freeze = {list(freeze)} leaves" if freeze and trainable else "the model has"
        reason = "what parameter groups freeze leaves" if also_frozen else reason
        raise ConfigError(f"{reason} no parameter to train", "let at least one parameter require gradients")
    return left


def _closest(pattern: str, known: list[str]) -> str:
    """A model has too many names to list them all."""
    close = nearest(pattern.strip("*"), known)
    return close if close.startswith("did you mean") else f"names look like {known[0]!r} or {known[-1]!r}"

"""Gradients added up over micro-batches and ranks, in float32 at least.

Every weight gradient of every plan passes through `Gradients.add`, so that the order and precision of the sum are
decided in one place; products are multiplied here, into the sum. Where nothing is reduced, a single gradient is kept as
it came; where something is, gradients are added up in one flat buffer per bucket, which is reduced in one message while
the backward goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.links import Group, Pending
from phalanx.model.segment.products import Gradient, Product
from phalanx.runtime.buckets import BufferPool, Shelf


class Accumulator:
    """Gradients by parameter name, each kept as it came until there is something to add. A parameter used in several
    places gets one sum."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, names: Sequence[str], gradients: Sequence[Gradient]) -> None:
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is None:
                continue
            total = self._sums.get(name)
            if isinstance(gradient, Product):
                self._sums[name] = _multiplied(gradient, total)
            elif total is None:
                self._sums[name] = gradient
            elif gradient.dtype == wide(total.dtype):
                self._sums[name] = gradient.add_(total)
            else:
                self._sums[name] = total.to(wide(total.dtype)).add_(gradient)

    def take(self) -> dict[str, Tensor]:
        """The finished sums, which now belong to the caller; parameters that got no gradient are absent."""
        sums, self._sums = self._sums, {}
        return sums


@dataclass(frozen=True)
class Reduction:
    """Over whom a bucket's gradients are summed. A group of one rank does nothing.

    sharded: each rank of `zero` keeps its own part of the sum, else all keep all of it. That is then summed over
    `replicas`, the same shard in other replicas and in other parts of a tensor-parallel group, and over `tie`, the
    stages that hold this bucket.
    """

    zero: Group
    replicas: Group
    tie: Group
    sharded: bool


class BucketGradients:
    """The gradients of one bucket whose sum is not this rank's alone."""

    def __init__(self, shelf: Shelf, how: Reduction, pool: BufferPool) -> None:
        self._shelf, self._how, self._pool = shelf, how, pool
        self._dtype = wide(shelf.dtype)
        self._buffer: Tensor | None = None  # sums of this rank since the last reduction
        self._views: dict[str, Tensor] = {}
        self._added: set[str] = set()  # since the last reduction
        self._seen: set[str] = set()  # in this step
        self._moving: tuple[Tensor, Tensor, Pending] | None = None  # what is summed over ranks, and where to
        self._sum: Tensor | None = None  # this rank's part of the sum over ranks
        self._final: Pending | None = None  # what `_sum` is being summed over further ranks by

    def add(self, gradients: Mapping[str, Tensor | Product]) -> None:
        self._open()
        views: list[Tensor] = []
        copied: list[Tensor] = []
        for name, gradient in gradients.items():
            view = self._views[name]
            match gradient, name in self._added:
                case Product(), True:
                    gradient.add_to(view)
                case Product(), False:
                    gradient.write(view)
                case _, True:
                    view.add_(gradient)
                case _, False:
                    views.append(view)
                    copied.append(gradient)
        if copied:
            torch._foreach_copy_(views, copied)
        self._added.update(gradients)

    def reduce(self) -> None:
        """Starts the sum over ranks of what was added since the last time."""
        buffer = self._close()
        self.collect()
        if self._how.sharded:
            part = self._pool.take(self._shelf.layout.shard_size, self._dtype, self._shelf.device)
            self._moving = (buffer, part, self._how.zero.reduce_scatter(part, buffer))
        else:
            self._moving = (buffer, buffer, self._how.zero.all_reduce(buffer))

    def collect(self) -> None:
        """Waits for the sum that is on its way and adds it to those before."""
        if self._moving is None:
            return
        buffer, part, pending = self._moving
        pending.wait("gradients")
        self._moving = None
        if part is not buffer:
            self._pool.give(buffer)
        if self._sum is None:
            self._sum = part
        else:
            self._sum.add_(part)
            self._pool.give(part)

    def sum(self) -> None:
        """Starts the sum over replicas of what was reduced."""
        self._final = self._how.replicas.all_reduce(self._complete())

    def tie(self) -> None:
        """Starts the sum over the stages that hold this bucket."""
        self._final = self._how.tie.all_reduce(self._complete())

    def take(self) -> dict[str, Tensor]:
        """What this rank's pieces get; absent what no loss depends on. Valid until `release`."""
        pieces = self._shelf.cut(self._complete())
        # Another stage may have a gradient where this one has none; nobody knows, so zero stands for none there.
        found = pieces if len(self._how.tie.ranks) > 1 else {n: piece for n, piece in pieces.items() if n in self._seen}
        self._seen = set()
        return found

    def release(self) -> None:
        """The sum's memory may be used again."""
        if self._sum is not None:
            self._pool.give(self._sum)
            self._sum = None

    def _complete(self) -> Tensor:
        """Everything that was added and reduced until now."""
        self.collect()
        if self._final is not None:
            self._final.wait("gradients")
            self._final = None
        if self._sum is None:  # nobody shares it
            self._sum = self._close()
        return self._sum

    def _open(self) -> None:
        if self._buffer is None:
            self._buffer = self._pool.take(self._shelf.layout.size, self._dtype, self._shelf.device)
            self._views = self._shelf.views(self._buffer)

    def _close(self) -> Tensor:
        """The sums of this rank, zero where nothing was added."""
        self._open()
        assert self._buffer is not None
        for name in self._views.keys() - self._added:
            self._views[name].zero_()
        self._seen |= self._added
        buffer, self._buffer, self._added = self._buffer, None, set()
        return buffer


class Gradients:
    """All gradients of one step on this rank. `home`: the bucket of each parameter whose sum is not this rank's alone.

    in_flight: how many reductions may be under way at once; their buffers are what ZeRO 2 saves.
    """

    def __init__(
        self, buckets: Mapping[int, BucketGradients], home: Mapping[str, int], in_flight: int | None = None
    ) -> None:
        self._buckets, self._home, self._in_flight = buckets, home, in_flight
        self._alone = Accumulator()
        self._moving: deque[BucketGradients] = deque()

    def add(self, names: Sequence[str], gradients: Sequence[Gradient]) -> None:
        alone: dict[str, Tensor | Product] = {}
        by_bucket: dict[int, dict[str, Tensor | Product]] = {}
        for name, gradient in zip(names, gradients, strict=True):
            if gradient is not None:
                home = self._home.get(name)
                into = alone if home is None else by_bucket.setdefault(home, {})
                into[name] = _value(into[name]) + _value(gradient) if name in into else gradient
        self._alone.add(list(alone), list(alone.values()))
        for bucket, found in by_bucket.items():
            self._buckets[bucket].add(found)

    def reduce(self, bucket: int) -> None:
        self._buckets[bucket].reduce()
        self._moving.append(self._buckets[bucket])
        while self._in_flight is not None and len(self._moving) > self._in_flight:
            self._moving.popleft().collect()

    def sum(self, bucket: int) -> None:
        self._buckets[bucket].sum()

    def tie(self, bucket: int) -> None:
        self._buckets[bucket].tie()

    def finish(self) -> dict[str, Tensor]:
        """The gradients of this rank's pieces; parameters that got none are absent."""
        self._moving.clear()
        found = self._alone.take()
        for bucket in self._buckets.values():
            found |= bucket.take()
        return found

    def release(self) -> None:
        """After the update: nothing of what `finish` gave is used any more."""
        for bucket in self._buckets.values():
            bucket.release()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision in which gradients of this precision are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _multiplied(product: Product, total: Tensor | None) -> Tensor:
    """The product added to a sum, which is wide from the first on."""
    dtype = wide(product.left.dtype)
    if total is None:
        total = product.left.new_empty(product.left.shape[0], product.right.shape[1], dtype=dtype)
        product.write(total)
    else:
        total = total.to(dtype)
        product.add_to(total)
    return total


def _value(gradient: Tensor | Product) -> Tensor:
    return gradient.value() if isinstance(gradient, Product) else gradient

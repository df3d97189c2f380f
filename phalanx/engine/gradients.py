"""Gradients of parameters, added up over micro-batches and ranks, in float32 at least.

Every weight gradient of every plan passes through `Sum.add` or `FlatSum.add`, so that the order and precision of the
sum are decided in one place; products are multiplied here, into the sum. Where nothing is reduced, a single gradient is
kept as it came; where something is, gradients are added up in one flat buffer per bucket, which is reduced in one
message while the backward goes on. Under a plan with `sums=exact` no order matters (`params/exact.py`): then a product
is multiplied by itself. When any of this happens is the program's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.engine.redistribute import Arriving
from phalanx.model.segment.products import Gradient, Product
from phalanx.params import exact
from phalanx.params.buckets import BufferPool, FlatBuffer

Found = Mapping[str, Tensor | Product]  # gradients by the names of parameters


class Sum:
    """Gradients that are this rank's alone, each kept as it came until there is something to add."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, gradients: Found) -> None:
        for name, gradient in gradients.items():
            total = self.sums.get(name)
            if isinstance(gradient, Product):
                self.sums[name] = _multiplied(gradient, total)
            elif total is None:
                self.sums[name] = gradient
            elif gradient.dtype == wide(total.dtype):
                self.sums[name] = gradient.add_(total)
            else:
                self.sums[name] = total.to(wide(total.dtype)).add_(gradient)

    def pieces(self) -> dict[str, Tensor]:
        return self.sums

    @property
    def num_bytes(self) -> int:
        return sum(total.nbytes for total in self.sums.values())


class ExactSum:
    """The same, in whatever order they come."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtype = torch.float32

    def add(self, gradients: Found) -> None:
        for name, gradient in gradients.items():
            own = _wide_value(gradient)
            self._sums.setdefault(name, exact.zeros_like(own))
            exact.add(self._sums[name], own)
            self._dtype = own.dtype

    def pieces(self) -> dict[str, Tensor]:
        return {name: exact.value(total, self._dtype) for name, total in self._sums.items()}

    @property
    def num_bytes(self) -> int:
        return sum(total.nbytes for total in self._sums.values())


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


class FlatSum:
    """What was added to a bucket since its last reduction."""

    def __init__(self, bucket: BucketGradients) -> None:
        self.buffer = bucket.take(bucket.flat.layout.size)
        self._views = bucket.flat.views(self.buffer)
        self.added: set[str] = set()

    def add(self, gradients: Found) -> None:
        if self.buffer.is_complex():
            self._add_exactly(gradients)
        else:
            self._add_as_they_come(gradients)
        self.added.update(gradients)

    def _add_exactly(self, gradients: Found) -> None:
        for name, gradient in gradients.items():
            if name not in self.added:
                self._views[name].zero_()
            exact.add(self._views[name], _wide_value(gradient))

    def _add_as_they_come(self, gradients: Found) -> None:
        views: list[Tensor] = []
        copied: list[Tensor] = []
        for name, gradient in gradients.items():
            view = self._views[name]
            match gradient, name in self.added:
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

    def close(self) -> Tensor:
        """The sums, zero where nothing was added."""
        for name in self._views.keys() - self.added:
            self._views[name].zero_()
        return self.buffer

    @property
    def num_bytes(self) -> int:
        return self.buffer.nbytes


class Reduced:
    """This rank's part of a sum over ranks. seen: the parameters that got a gradient here."""

    def __init__(self, bucket: BucketGradients, tensor: Tensor, seen: set[str]) -> None:
        self._bucket, self._tensor, self._seen = bucket, tensor, seen

    @property
    def tensor(self) -> Tensor:
        return self._tensor

    def add(self, other: Reduced) -> None:
        self._tensor.add_(other._tensor)
        self._seen |= other._seen

    def pieces(self) -> dict[str, Tensor]:
        """What this rank's pieces get; absent what no loss depends on."""
        tensor = self._tensor
        if tensor.is_complex():
            tensor = exact.value(tensor, wide(self._bucket.flat.dtype))
        pieces = self._bucket.flat.cut(tensor)
        # Another stage may have a gradient where this one has none; nobody knows, so zero stands for none there.
        tied = len(self._bucket.how.tie.ranks) > 1
        return pieces if tied else {name: piece for name, piece in pieces.items() if name in self._seen}

    def release(self) -> None:
        """Its memory may be used again."""
        self._bucket.give(self._tensor)

    @property
    def num_bytes(self) -> int:
        return self._tensor.nbytes


class BucketGradients:
    """How the gradients of one bucket are reduced whose sum is not this rank's alone. exactly: in whatever order."""

    def __init__(self, flat: FlatBuffer, how: Reduction, pool: BufferPool, *, exactly: bool = False) -> None:
        self.flat, self.how, self._pool = flat, how, pool
        self._dtype = torch.complex128 if exactly else wide(flat.dtype)

    def take(self, size: int) -> Tensor:
        return self._pool.take(size, self._dtype, self.flat.device)

    def give(self, buffer: Tensor) -> None:
        self._pool.give(buffer)

    def open(self) -> FlatSum:
        return FlatSum(self)

    def reduce(self, added: FlatSum) -> Arriving:
        """Starts the sum over ranks; gives what `Reduced` is when it is here."""
        buffer, how = added.close(), self.how
        if not how.sharded:
            pending = how.zero.all_reduce(exact.numbers(buffer))
            return Arriving(pending, lambda: Reduced(self, buffer, added.added))
        part = self.take(self.flat.layout.shard_size)

        def finish() -> Reduced:
            self.give(buffer)
            return Reduced(self, part, added.added)

        return Arriving(how.zero.reduce_scatter(exact.numbers(part), exact.numbers(buffer)), finish)

    def whole(self, added: FlatSum) -> Reduced:
        """A sum that only the stages which hold it share."""
        return Reduced(self, added.close(), added.added)

    @staticmethod
    def sum(reduced: Reduced, group: Group) -> Arriving:
        """Starts the sum over further ranks, in place."""
        return Arriving(group.all_reduce(exact.numbers(reduced.tensor)), lambda: reduced)


def together(names: tuple[str, ...], gradients: list[Gradient]) -> dict[str, Tensor | Product]:
    """Gradients by name; a parameter that a segment uses twice gets one."""
    found: dict[str, Tensor | Product] = {}
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            found[name] = _value(found[name]) + _value(gradient) if name in found else gradient
    return found


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


def _wide_value(gradient: Tensor | Product) -> Tensor:
    """By itself, in the precision in which gradients are added up."""
    return _multiplied(gradient, None) if isinstance(gradient, Product) else gradient.to(wide(gradient.dtype))


def _value(gradient: Tensor | Product) -> Tensor:
    return gradient.value() if isinstance(gradient, Product) else gradient

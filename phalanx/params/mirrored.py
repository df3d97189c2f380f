"""State of another rank, as far as no third one holds it, in this rank's host memory: kept current by the gradients
that the other updates by, with the same optimizer, clipping, learning rate and skipped steps.

Pieces of parameters are kept whole, their elements in order, so that on CPUs every kernel rounds as it does there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.params.hosted import Given
from phalanx.params.layout_of import StateLayout
from phalanx.params.optimizer import Optimizer
from phalanx.params.parameters import Weight
from phalanx.params.rank_state import Filled, Source, from_checkpoint, of_checkpoint


class Mirrored:
    """rank: whose state it is under the layout's plan. names: of the parameters. source: has all that the rank keeps of
    them by now. scalars: of its optimizer. make: an optimizer for weights."""

    def __init__(
        self, layout: StateLayout, rank: int, names: Collection[str], source: Source, scalars: Mapping[str, Any],
        make: Callable[[Mapping[str, Weight]], torch.optim.Optimizer], clip: float | None,
    ) -> None:  # fmt: skip
        self.layout, self.rank = layout, rank
        self._kept = [kept for kept in layout.kept(rank) if kept.facts.name in names]
        slots = [tuple(name.split("/", 2)[1:]) for name in source.names() if name.startswith("optimizer/")]
        self.weights: dict[str, Weight] = {}
        for kept in self._kept:
            exact = kept.piece.shaped(kept.piece.read(source, layout.exact(kept).name))
            self.weights[kept.facts.name] = Weight(kept.piece, exact, exact, kept.facts.trained)
        trained = {name: weight for name, weight in self.weights.items() if weight.trained}
        self._optimizer = Optimizer(make(trained), trained, clip)

        def read(slot: str, name: str) -> Tensor:
            return from_checkpoint(source, f"optimizer/{slot}/{name}", self.weights[name].piece)

        self._optimizer.load([(slot, name) for slot, name in slots], read, scalars)
        self._sums = self._sum_up()

    def update(self, gradients: Mapping[str, Tensor], given: Given) -> bool:
        """By the gradients of a step, which it may change; whether this state was what it should be before."""
        if not self.is_sound:
            return False
        self._optimizer.step(gradients, *given)
        self._sums = self._sum_up()
        return True

    @property
    def is_sound(self) -> bool:
        """Whether it is what the last update left."""
        return self._sums == self._sum_up()

    @property
    def updated(self) -> list[str]:
        """The parameters that it has optimizer state for, once there is any."""
        return [kept.facts.name for kept in self.layout.updated(self.rank) if kept.facts.name in self.weights]

    def shards(self) -> Iterator[Filled]:
        """As a checkpoint names them."""
        return of_checkpoint(self.layout, self._kept, self.weights, self._optimizer.tensors())

    def scalars(self) -> dict[str, Any]:
        return self._optimizer.scalars()

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (weight.exact for weight in self.weights.values())
        yield from (tensor for _, _, tensor in self._optimizer.tensors())

    def _sum_up(self) -> list[int]:
        return checksums(self._tensors())


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Of the bits of each."""
    found = [_in_words(tensor.reshape(-1)).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(found).tolist() if found else []


def _in_words(row: Tensor) -> Tensor:
    """As whole numbers of as many bytes as fit: the wider they are, the faster they are summed up."""
    for word in (torch.int64, torch.int32, torch.int16):
        if not (row.nbytes % word.itemsize or row.storage_offset() * row.itemsize % word.itemsize):
            return row.view(word)
    return row.view(torch.uint8)

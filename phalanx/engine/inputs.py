"""What follows from a micro-batch's samples alone: its inputs, what the prologue makes of them, dropout keys, and for
slices the place where they begin and the past they attend to.

Everything is made when it is first asked for, so that a rank makes only what its own segments read. `Feeder` turns
batches into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine.compute import MOST_SHAPES, Compute
from phalanx.errors import DataError, PlanError
from phalanx.model.captured import Captured
from phalanx.model.ops.random import sample_keys
from phalanx.model.ops.slice_attention import Past, Slice
from phalanx.model.slicing import TOKENS, WHOLE_TOKENS, Sliced
from phalanx.tasks.base import Batch

Key = tuple[int, int, str, str]  # slice, tensor degree, kind and name of a port


@dataclass(frozen=True)
class SampleShard:
    """The samples of a micro-batch that a unit of smaller tensor degree sees on this rank."""

    index: int
    count: int

    def of(self, samples: int) -> slice:
        assert samples % self.count == 0, f"{samples} samples cannot be divided into {self.count} parts"
        size = samples // self.count
        return slice(self.index * size, (self.index + 1) * size)


class _View:
    """What units of one tensor degree see of a micro-batch."""

    def __init__(self, compute: Compute, inputs: Mapping[str, Tensor], keys: Tensor, dims: dict[str, int]) -> None:
        self._compute, self.inputs, self.keys, self.dims = compute, inputs, keys, dims
        self._values: dict[str, Tensor] | None = None
        self._dropout: dict[str, Tensor] | None = None

    @property
    def values(self) -> dict[str, Tensor]:
        if self._values is None:
            self._values = self._compute.prologue(self.inputs, self.dims)
        return self._values

    def dropout(self, name: str) -> Tensor:
        if self._dropout is None:
            self._dropout = self._compute.dropout_keys(self.keys)
        return self._dropout.get(name, self.keys)  # in an evaluation the port is there, and nothing reads it


class _Alike:
    """What micro-batches that look and are cut alike use one after the other: what attentions keep of their slices, the
    handles of these, and parts of values that follow from shapes alone. Making them anew would take longer than all
    else that the engine does for a slice."""

    def __init__(self) -> None:
        self._pasts: dict[tuple[int, str], Past] = {}
        self._slices: list[Slice] = []
        self.found: dict[Key, Tensor] = {}
        self.orders: dict[int, Tensor] = {}  # in which tokens of so many samples are cut

    def handle(self, key: Key, degree: int, tokens: int, start: int) -> Tensor:
        """degree: of those that see other samples."""
        past = self._pasts.setdefault((degree, key[3]), Past(tokens))
        self._slices.append(Slice(past, start))
        return self._slices[-1].handle

    def clear(self, degree: int, names: Iterable[str]) -> None:
        for name in names:
            self._pasts[degree, name].clear()

    def clear_all(self) -> None:
        for past in self._pasts.values():
            past.clear()

    @property
    def num_bytes(self) -> int:
        return sum(past.num_bytes for past in self._pasts.values())


class Inputs(dict[Key, Tensor]):
    """One micro-batch, or half of one. Looked up by slice, degree, and kind and name of a port. edges: where its tokens
    are cut; alike: what others like it have left; degrees: what units of smaller tensor degree see of its
    samples."""

    def __init__(
        self,
        compute: Compute,
        inputs: Mapping[str, Tensor],
        keys: Tensor,
        dims: Callable[[Mapping[str, Tensor]], dict[str, int]],
        degrees: Mapping[int, SampleShard],
        sliced: Sliced | None = None,
        edges: Sequence[int] = (),
        alike: list[_Alike] | None = None,
    ) -> None:
        self._left = [] if alike is None else alike
        self._alike = self._left.pop() if self._left else _Alike()
        super().__init__(self._alike.found)
        self._compute, self._inputs, self._keys, self._dims_of, self._dims = compute, inputs, keys, dims, dims(inputs)
        self._degrees, self._sliced, self._edges = degrees, sliced, edges
        self._views: dict[int, _View] = {}

    def __del__(self) -> None:
        self._alike.clear_all()
        self._left.append(self._alike)

    @property
    def num_samples(self) -> int:
        return self._keys.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._inputs.values())

    def count(self) -> Tensor:
        """How many items its loss is a sum over."""
        return self._compute.count(self._inputs, self._dims)

    def dims(self, slice_: int, degree: int) -> dict[str, int]:
        dims = self._view(degree).dims
        if self._sliced is None:
            return dims
        start, stop = self._tokens(slice_)
        return {**dims, TOKENS: stop - start, WHOLE_TOKENS: dims[TOKENS]}

    @property
    def shape_key(self) -> tuple[object, ...]:
        """What tells micro-batches apart for which different functions are needed."""
        return (*self._dims.values(), *self._edges)

    def forget_past(self) -> None:
        """As if none of its slices had been computed."""
        self._alike.clear_all()

    def clear_past(self, degree: int, names: Iterable[str]) -> None:
        """Keys and values of earlier slices, and their gradients, are not needed any more."""
        self._alike.clear(self._degree(degree), names)

    def past_bytes(self) -> int:
        return self._alike.num_bytes

    def __missing__(self, key: Key) -> Tensor:
        slice_, degree, kind, name = key
        if kind == "past":
            found = {key: self._alike.handle(key, self._degree(degree), self._dims[TOKENS], self._tokens(slice_)[0])}
        elif kind in ("input", "value") and self._sliced is not None:
            cut = self._cut(self._view(degree), kind, name, self._sliced)
            found = {(number, degree, kind, name): part for number, part in enumerate(cut)}
        else:
            found = {key: self._make(self._view(degree), slice_, kind, name)}
        if kind in ("past", "start") or (kind in ("value", "whole_value") and name in self._compute.fixed):
            self._alike.found |= found
        self.update(found)
        return found[key]

    def _make(self, view: _View, slice_: int, kind: str, name: str) -> Tensor:
        match kind:
            case "dropout":
                return view.dropout(name)
            case "value" | "whole_value":
                return view.values[name]
            case "input" | "whole_input":
                return view.inputs[name]
            case _:
                assert kind == "start", f"{kind} {name} does not follow from inputs"
                return torch.tensor(self._tokens(slice_)[0])

    def _degree(self, degree: int) -> int:
        return degree if degree in self._degrees else 0  # all samples

    def _view(self, degree: int) -> _View:
        degree = self._degree(degree)
        if degree not in self._views:
            inputs, keys, dims, shard = self._inputs, self._keys, self._dims, self._degrees.get(degree)
            if shard is not None:
                rows = shard.of(keys.shape[0])
                inputs, keys = {name: tensor[rows] for name, tensor in inputs.items()}, keys[rows]
                dims = self._dims_of(inputs)
            self._views[degree] = _View(self._compute, inputs, keys, dims)
        return self._views[degree]

    def _tokens(self, slice_: int) -> tuple[int, int]:
        edges = self._edges or (0, self._dims[TOKENS])
        return edges[slice_], edges[slice_ + 1]

    def _cut(self, view: _View, kind: str, name: str, sliced: Sliced) -> Sequence[Tensor]:
        edges = self._edges or (0, self._dims[TOKENS])
        if kind == "input":
            return sliced.cut_input(name, view.inputs[name], edges)
        return sliced.cut_value(name, view.values[name], view.keys.shape[0], edges, self._alike.orders)


class Feeder:
    """Turns batches into micro-batches: checked, moved to the device, with their dropout keys. degrees: what units of
    smaller tensor degree see of a micro-batch. sliced: how its tokens are cut, where the model runs on slices."""

    def __init__(
        self,
        captured: Captured,
        compute: Compute,
        *,
        seed: int,
        dtype: torch.dtype,
        degrees: Mapping[int, SampleShard],
        sliced: Sliced | None = None,
    ) -> None:
        self.captured, self.compute, self._sliced = captured, compute, sliced
        self._seed, self._dtype, self._degrees = seed, dtype, degrees
        self._alike: dict[tuple[object, ...], list[_Alike]] = {}  # by what they look like and how they are cut

    def __call__(
        self, batch: Batch, first: int, sizes: Sequence[int], edges: Callable[[int, int], Sequence[int]] | None = None
    ) -> list[Inputs]:
        """Consecutive parts of the samples at stream positions from `first` on. edges: (number of the part, its tokens)
        → where these are cut."""
        require_inputs(self.captured, batch)
        on_device = {name: self._move(tensor) for name, tensor in batch.items()}
        keys = sample_keys(self._seed, first, sum(sizes), self.compute.device)
        versions = self.compute.versions()
        parts: list[Inputs] = []
        begin = 0
        for number, size in enumerate(sizes):
            inputs = {name: tensor[begin : begin + size] for name, tensor in on_device.items()}
            dims = self._dims(inputs)
            cut = tuple(edges(number, dims[TOKENS])) if edges is not None else ()
            parts.append(
                Inputs(
                    self.compute, inputs, keys[begin : begin + size], self._dims, self._degrees, self._sliced, cut,
                    self._left_by((versions, *dims.values(), cut)),
                )
            )  # fmt: skip
            begin += size
        return parts

    def _left_by(self, look: tuple[object, ...]) -> list[_Alike]:
        """What micro-batches that looked like this one have left. Of the last few looks: lengths may differ in every
        step."""
        found = self._alike.setdefault(look, [])
        while len(self._alike) > MOST_SHAPES:
            del self._alike[next(iter(self._alike))]
        return found

    def _dims(self, inputs: Mapping[str, Tensor]) -> dict[str, int]:
        return self.captured.dims(dict(inputs))

    def _move(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        if self.compute.device.type != "cuda" or tensor.device.type == "cuda":
            return tensor
        return tensor.contiguous().pin_memory().to(self.compute.device, non_blocking=True)


def num_samples(batch: Mapping[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]


def split(samples: int, parts: int) -> list[int]:
    """Sizes of `parts` micro-batches, as even as possible, larger ones first."""
    if parts > samples:
        raise PlanError(
            f"plan: mb={parts} cuts a batch of {samples} samples into more micro-batches than it has samples",
            f"use mb={samples} or less, or a larger batch_size",
        )
    size, larger = divmod(samples, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def require_inputs(captured: Captured, batch: Batch) -> None:
    """The batch must be what the model was captured with: the same inputs, and the same sizes where they are fixed."""
    expected = {spec.name: spec for spec in captured.inputs}
    if set(batch) != set(expected):
        raise DataError(
            f"a batch holds {', '.join(sorted(batch))}, but the model was captured with {', '.join(sorted(expected))}",
            "training and evaluation data must give the same inputs in every batch",
        )
    for name, tensor in batch.items():
        dims = expected[name].dims
        fits = tensor.dim() == len(dims) and all(
            isinstance(dim, str) or dim == size for dim, size in zip(dims, tensor.shape, strict=True)
        )
        if not fits:
            raise DataError(
                f"input {name!r} has shape {list(tensor.shape)}, but the model was captured for "
                f"[{', '.join(map(str, dims))}]",
                "pad or cut samples to one size in the dataset or in collate",
            )

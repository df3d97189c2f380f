"""Which stored tensors make up which of a model's tensors, and which boxes of them, without reading any.

HuggingFace files may lack or carry the base model's prefix, use older names, or store per expert what the model holds
fused. transformers knows these rules; here they are applied to names and shapes only. A parameter is then often a
stack, a concatenation or a slice of stored tensors: an `Assembly` says which stored box lands where, so that reading
one box of the parameter touches only the bytes it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from phalanx.errors import ModelError
from phalanx.state.layout import Box

if TYPE_CHECKING:
    from torch import Tensor

ReadStored = Callable[[str, Box], "Tensor"]


@dataclass(frozen=True)
class Piece:
    """The box `source` of the stored tensor `key` fills the box `target`; stored dim d lies along dim `dims[d]`.

    Dims of the target that no stored dim lies along have size 1 in this piece.
    """

    key: str
    source: Box
    target: Box
    dims: tuple[int, ...]

    def moved(self, dim: int, by: int) -> Piece:
        offset = tuple(o + by * (d == dim) for d, o in enumerate(self.target.offset))
        return replace(self, target=Box(offset, self.target.shape))

    def within(self, box: Box) -> Piece | None:
        """The part of this piece that lies in `box`, in the coordinates of `box`."""
        common = self.target.intersect(box)
        if common is None:
            return None
        inner = common.relative_to(self.target)
        offset = tuple(self.source.offset[d] + inner.offset[dim] for d, dim in enumerate(self.dims))
        shape = tuple(inner.shape[dim] for dim in self.dims)
        return Piece(self.key, Box(offset, shape), common.relative_to(box), self.dims)

    def read(self, read_stored: ReadStored) -> Tensor:
        """The values, shaped like the target."""
        stored = read_stored(self.key, self.source)
        order = sorted(range(len(self.dims)), key=lambda d: self.dims[d])
        return stored.permute(order).reshape(self.target.shape)


@dataclass(frozen=True)
class Assembly:
    """A tensor of this shape, made of pieces that cover it without overlap."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def stored(cls, key: str, shape: tuple[int, ...]) -> Assembly:
        """A stored tensor as it is."""
        box = Box.whole(shape)
        return cls(shape, (Piece(key, box, box, tuple(range(len(shape)))),))

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(piece.key for piece in self.pieces)

    def part(self, box: Box) -> Assembly:
        """One box of this tensor, as a tensor."""
        found = (piece.within(box) for piece in self.pieces)
        return Assembly(box.shape, tuple(piece for piece in found if piece is not None))

    def transposed(self, dim0: int, dim1: int) -> Assembly:
        """With two dims swapped."""
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        def swap(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[d] for d in order)

        pieces = tuple(
            replace(p, target=Box(swap(p.target.offset), swap(p.target.shape)), dims=tuple(order[d] for d in p.dims))
            for p in self.pieces
        )
        return Assembly(swap(self.shape), pieces)

    def unsqueezed(self, dim: int) -> Assembly:
        """With a new dim of size 1 before `dim`."""

        def widen(values: tuple[int, ...], new: int) -> tuple[int, ...]:
            return (*values[:dim], new, *values[dim:])

        pieces = tuple(
            replace(
                p,
                target=Box(widen(p.target.offset, 0), widen(p.target.shape, 1)),
                dims=tuple(d + (d >= dim) for d in p.dims),
            )
            for p in self.pieces
        )
        return Assembly(widen(self.shape, 1), pieces)

    def read(self, read_stored: ReadStored) -> Tensor:
        """The values of the whole tensor."""
        if len(self.pieces) == 1:
            return self.pieces[0].read(read_stored)
        parts = [(piece.target, piece.read(read_stored)) for piece in self.pieces]
        if not parts:
            raise AssertionError(f"no piece covers a tensor of shape {self.shape}")
        result = parts[0][1].new_empty(self.shape)
        for target, values in parts:
            result[target.slices()] = values
        return result


def concatenated(parts: list[Assembly], dim: int) -> Assembly:
    """The parts one after the other along `dim`."""
    sizes = [part.shape[dim] for part in parts]
    starts = accumulate(sizes, initial=0)
    pieces = tuple(piece.moved(dim, start) for part, start in zip(parts, starts, strict=False) for piece in part.pieces)
    shape = tuple(sum(sizes) if d == dim else size for d, size in enumerate(parts[0].shape))
    return Assembly(shape, pieces)


def stacked(parts: list[Assembly], dim: int) -> Assembly:
    """The parts beside each other along a new dim."""
    return concatenated([part.unsqueezed(dim) for part in parts], dim)


def chunked(whole: Assembly, count: int, dim: int) -> list[Assembly]:
    """`count` parts along `dim`, all but the last of equal size, as torch.chunk does."""
    step = -(-whole.shape[dim] // count)
    boxes = []
    for start in range(0, whole.shape[dim], step):
        size = min(step, whole.shape[dim] - start)
        offset = tuple(start * (d == dim) for d in range(len(whole.shape)))
        boxes.append(Box(offset, tuple(size if d == dim else s for d, s in enumerate(whole.shape))))
    return [whole.part(box) for box in boxes]


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Converted:
    """A tensor that only transformers' own conversion can make; reading any part of it reads all its sources."""

    shape: tuple[int, ...]
    name: str
    group: _Group
    model: PreTrainedModel

    def read(self, read_stored: ReadStored, boxes: Sequence[Box]) -> list[Tensor]:
        whole = self.group.convert(self.model, read_stored)[self.name]
        return [whole[box.slices()] for box in boxes]


Source = Assembly | Converted


@dataclass(frozen=True)
class KeyMap:
    """`sources`: the model's tensor name → what it is made of. `unexpected`: stored keys the model has no use for."""

    sources: dict[str, Source]
    unexpected: tuple[str, ...]


def match(model: nn.Module, stored: Shapes) -> KeyMap:
    """Maps stored keys to the parameters and persistent buffers of `model` (which may be on the meta device)."""
    state: dict[str, Tensor] = model.state_dict()
    sources: dict[str, Source] = {}
    unexpected: list[str] = []
    groups: dict[str, _Group] = {}
    rename = _Renamer(model, state)
    # transformers meets keys in this order: experts by number, and a renaming's guard before what it guards.
    for key in sorted(stored, key=dot_natural_key):
        name, pattern, converter = rename(key)
        if name not in state:
            unexpected.append(key)
        elif converter is None:
            sources[name] = Assembly.stored(key, stored[key])
        else:
            groups.setdefault(name, _Group(name, converter, stored)).collected[pattern].append(key)
    for group in groups.values():
        assert isinstance(model, PreTrainedModel), "plain modules convert nothing"
        sources.update(group.sources(model))
    return KeyMap(sources, tuple(unexpected))


class _Renamer:
    """Stored key → model name, and the conversion that the key takes part in, if any. Plain modules rename nothing."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        is_huggingface = isinstance(model, PreTrainedModel)
        transforms = get_model_conversion_mapping(model) if is_huggingface else []
        self._state = state
        self._prefix = model.base_model_prefix if is_huggingface else None
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}

    def __call__(self, key: str) -> tuple[str, str, WeightConverter | None]:
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
        if name not in self._state and key in self._state:
            name, pattern = rename_source_key(key, [], [], self._prefix, self._state)
        return name, pattern or "", self._by_pattern[pattern] if pattern is not None else None


class _Group:
    """Stored tensors that one conversion turns into one or several of the model's tensors."""

    def __init__(self, name: str, converter: WeightConverter, stored: Shapes) -> None:
        self.name = name
        self.converter = converter
        self.stored = stored
        self.collected: dict[str, list[str]] = defaultdict(list)

    def sources(self, model: PreTrainedModel) -> dict[str, Source]:
        def on_meta(key: str, box: Box) -> Tensor:
            return torch.empty(box.shape, device="meta")

        try:
            results = {name: tuple(value.shape) for name, value in self.convert(model, on_meta).items()}
        except Exception as error:
            keys = sorted(key for keys in self.collected.values() for key in keys)
            raise ModelError(
                f"the stored tensors {', '.join(keys[:6])}{', …' if len(keys) > 6 else ''} "
                f"cannot be turned into {self.name}: {error}",
                "the weights are of another architecture or incomplete; download the folder again",
            ) from error
        lazy = self._assemblies(len(results))
        if lazy is None or [part.shape for part in lazy] != list(results.values()):
            return {name: Converted(shape, name, self, model) for name, shape in results.items()}
        return dict(zip(results, lazy, strict=True))

    def convert(self, model: PreTrainedModel, read_stored: ReadStored) -> dict[str, Tensor]:
        """Runs transformers' conversion on whole tensors."""
        converter = deepcopy(self.converter)
        for pattern, keys in self.collected.items():
            for key in keys:
                value = read_stored(key, Box.whole(self.stored[key]))
                # Declared to take futures; takes tensors as well, as when transformers saves.
                converter.add_tensor(self.name, key, pattern, value)  # pyright: ignore[reportArgumentType]
        converted = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def _assemblies(self, count: int) -> list[Assembly] | None:
        """The same conversion as boxes; None where an operation is more than moving boxes around."""
        order = [pattern for pattern in self.converter.source_patterns if pattern in self.collected]
        lists = [[Assembly.stored(key, self.stored[key]) for key in self.collected[pattern]] for pattern in order]
        for operation in self.converter.operations:
            flat = [part for parts in lists for part in parts]
            if type(operation) is MergeModulelist:
                lists = [[stacked(parts, operation.dim % (len(parts[0].shape) + 1))] for parts in lists]
            elif type(operation) is Concatenate:
                lists = [[concatenated(flat, operation.dim % len(flat[0].shape))]]
            elif type(operation) is Chunk and len(flat) == 1:
                lists = [chunked(flat[0], count, operation.dim % len(flat[0].shape))]
            elif type(operation) is Transpose and len(flat) == 1 and not getattr(operation, "check_dims", False):
                dims = len(flat[0].shape)
                lists = [[flat[0].transposed(operation.dim0 % dims, operation.dim1 % dims)]]
            else:
                return None
        return [part for parts in lists for part in parts]

"""Keys and values of the tokens before a slice, in buffers that live as long as a micro-batch's slices do.

An attention operator in a compiled graph gets a *handle*, a number in a tensor, and finds the slice behind it here: so
no length of a past is ever a constant of a graph, and nothing of a past is copied or joined to attend to it.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor


class Past:
    """One attention of one micro-batch: keys and values of the first `filled` of `tokens` tokens, and, on the way back,
    the gradients that later slices left for them, in float32 at least."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._kv: tuple[Tensor, Tensor] | None = None
        self._gradients: tuple[Tensor, Tensor] | None = None

    def write(self, start: int, k: Tensor, v: Tensor) -> None:
        """k, v: [samples, heads, tokens of the slice, dim]."""
        if self._kv is None:
            self._kv = _buffer(k, self.tokens), _buffer(v, self.tokens)
        for buffer, own in zip(self._kv, (k, v), strict=True):
            buffer[:, :, start : start + own.shape[2]] = own

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values of tokens start … stop - 1."""
        assert self._kv is not None, "a slice attends to a past that was never computed"
        keys, values = self._kv
        return keys[:, :, start:stop], values[:, :, start:stop]

    def add_gradients(self, start: int, dk: Tensor, dv: Tensor, wide: torch.dtype) -> None:
        if self._gradients is None:
            assert self._kv is not None
            self._gradients = tuple(torch.zeros_like(x, dtype=wide) for x in self._kv)  # pyright: ignore
        for buffer, new in zip(self._gradients, (dk, dv), strict=True):  # pyright: ignore
            buffer[:, :, start : start + new.shape[2]] += new

    def gradients(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Of the tokens start … stop - 1, once no later slice adds to them."""
        assert self._gradients is not None
        dk, dv = self._gradients
        return dk[:, :, start:stop], dv[:, :, start:stop]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for pair in (self._kv, self._gradients) if pair is not None for x in pair)

    def clear(self) -> None:
        """For who owns it: nobody reads it any more."""
        self._kv = self._gradients = None


class Slice:
    """The tokens of an attention's micro-batch from `start` on. `handle` names it in a graph."""

    _numbers = itertools.count()
    _alive: weakref.WeakValueDictionary[int, Slice] = weakref.WeakValueDictionary()

    def __init__(self, past: Past, start: int) -> None:
        self.past, self.start = past, start
        number = next(self._numbers)
        self.handle = torch.tensor(number)
        self._alive[number] = self

    @classmethod
    def behind(cls, handle: Tensor) -> Slice:
        return cls._alive[int(handle)]


def _buffer(like: Tensor, tokens: int) -> Tensor:
    """[samples, heads, tokens, dim], laid out token by token, as kernels read it best."""
    samples, heads, _, dim = like.shape
    return like.new_zeros(samples, tokens, heads, dim).transpose(1, 2)

"""Sums that do not depend on the order in which they are made, nor on who makes which part of them.

A number is taken apart into *words*: whole multiples of fixed powers of two, from coarse to fine. As float64 they are
added up without any rounding as long as they stay below 2⁵³, and what is not rounded is associative: over
micro-batches, blocks and ranks, in a ring or in a tree, by whatever library. What is not finite stays so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

# Of a gradient: two words of 40 bits, so that 2¹³ of them can be added (`program/passes/reductions.py` refuses more). A
# float32 of 10⁻¹¹ or more keeps all its bits.
COARSE, FINE = 20, 61
LARGEST = 2.0**20  # a larger gradient of one micro-batch counts as not finite

# Of squares and losses: words of 32 bits each, the finest worth 2⁻¹²⁰. The first takes what is above.
_LADDER = (-40, -8, 24, 56, 88, 120)
_BASE = 2.0**32
NUM_WORDS = len(_LADDER)

_PIECE = {"cpu": 2**16}  # elements at a time: what is computed in between stays in the cache
_MOST = 2**24


def zeros_like(tensor: Tensor) -> Tensor:
    """An empty sum of tensors of this shape. The two words of an element are one complex number, so that sums lie, are
    cut and are sent as their elements are."""
    return torch.zeros(tensor.shape, dtype=torch.complex128, device=tensor.device)


def add(total: Tensor, gradient: Tensor) -> None:
    """To a sum that `zeros_like` began, or another that is contiguous."""
    size = _PIECE.get(total.device.type, _MOST)
    for sums, own in zip(total.view(-1).split(size), gradient.reshape(-1).split(size), strict=True):
        _add(torch.view_as_real(sums), own)


def _add(total: Tensor, gradient: Tensor) -> None:
    rest = gradient.double()
    rest = rest.masked_fill(rest.abs() >= LARGEST, math.inf)
    coarse = (rest * 2.0**COARSE).round_()
    rest.sub_(coarse, alpha=2.0**-COARSE)
    total[:, 0] += coarse
    total[:, 1] += rest.mul_(2.0**FINE).round_()


def value(total: Tensor, dtype: torch.dtype) -> Tensor:
    """What a sum of gradients comes to."""
    found = torch.empty(total.shape, dtype=dtype, device=total.device)
    size = _PIECE.get(total.device.type, _MOST)
    for own, sums in zip(found.view(-1).split(size), total.view(-1).split(size), strict=True):
        own.copy_(sums.real * 2.0**-COARSE + sums.imag * 2.0**-FINE)
    return found


def numbers(total: Tensor) -> Tensor:
    """The same memory as ranks send it: a row of float64."""
    return torch.view_as_real(total).view(-1) if total.is_complex() else total


def words(values: Tensor) -> Tensor:
    """The sum of all these values, as words."""
    found = torch.zeros(NUM_WORDS, dtype=torch.float64, device=values.device)
    for own in values.reshape(-1).split(2**20):
        found = carried(found + _taken_apart(own.double()))
    return found


def words_of_squares(values: Tensor) -> Tensor:
    """The sum of their squares, likewise. Those of float32 are not even rounded."""
    found = torch.zeros(NUM_WORDS, dtype=torch.float64, device=values.device)
    for own in values.reshape(-1).split(_PIECE.get(values.device.type, 2**20)):
        found = carried(found + _taken_apart(own.double().square()))
    return found


def together(found: Iterable[Tensor], like: Tensor) -> Tensor:
    """Sums of sums; zero, on the device of `like`, if there are none."""
    total = torch.zeros(NUM_WORDS, dtype=torch.float64, device=like.device)
    for own in found:
        total = carried(total + own)
    return total


def carried(found: Tensor) -> Tensor:
    """The same sum with all words but the first between 0 and 2³²: then equal sums have equal words."""
    own = list(found.unbind())
    for place in range(len(own) - 1, 0, -1):
        over = (own[place] / _BASE).floor()
        own[place], own[place - 1] = own[place] - over * _BASE, own[place - 1] + over
    return torch.stack(own)


def total(found: Tensor) -> Tensor:
    """The number that words stand for, in float64; the same for equal sums."""
    own = list(carried(found).unbind())
    result = torch.zeros_like(own[0])
    for place in range(len(own) - 1, -1, -1):  # the finest first
        if place:  # halfway to the next: so that a small negative sum is not the difference of two large numbers
            over = (own[place] >= _BASE / 2).double()
            own[place], own[place - 1] = own[place] - over * _BASE, own[place - 1] + over
        result = result + own[place] * 2.0 ** -_LADDER[place]
    return result


def _taken_apart(rest: Tensor) -> Tensor:
    """Sums of each word of a few values: at most 2²¹ of them."""
    found: list[Tensor] = []
    for power in _LADDER:
        own = (rest * 2.0**power).round_()
        rest = rest.sub(own, alpha=2.0**-power)
        found.append(own.sum())
    return torch.stack(found)

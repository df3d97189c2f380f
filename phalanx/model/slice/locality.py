"""Which operators bring different tokens together: a mean over tokens, a convolution along them, a recurrence.

A slice would compute them from its own tokens alone; nothing would fail, and the numbers would be wrong. Decided by
shapes, in sizes that tell tokens from everything else. Sorting rows and sending them to experts keeps every token to
itself. Attention is not looked at here, and neither is what a model computes from its inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

IsTokens = Callable[[int], bool]  # whether a size counts tokens

_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # whose last dim is summed over
_KEEP_APART = {"unsqueeze", "squeeze", "stack", "permute", "unflatten", "sort"}  # although they name a dim
_BRING_TOGETHER = ("lstm", "gru", "rnn", "scaled_dot_product_attention", "unfold", "as_strided")


def tokens_meet(node: fx.Node, is_tokens: IsTokens) -> bool:
    """Whether a node with its value in `meta` computes a token from others."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or torch.Tag.pointwise in target.tags:
        return False
    shapes = [tuple(v.shape) for v in (n.meta.get("val") for n in node.all_input_nodes) if isinstance(v, Tensor)]
    if not any(map(is_tokens, (size for shape in shapes for size in shape))):
        return False
    name, arguments = target._schema.name.removeprefix("aten::"), _arguments(node, target)
    if name.startswith(_BRING_TOGETHER):
        return True
    return any(is_tokens(size) for size in _mixed_sizes(name, arguments, node.meta["val"]))


def _mixed_sizes(name: str, arguments: dict[str, Any], result: Any) -> Iterable[int]:
    """The sizes of the dims along which elements are added, moved or left out."""
    values = list(arguments.values())
    if name in _PRODUCTS:
        return _shape(values[_PRODUCTS[name]])[-1:]
    if name == "einsum":
        return _summed(*values[:2])
    if name.startswith("conv"):
        return _shape(values[0])[2:]
    if name in ("pad", "constant_pad_nd"):
        widths, shape = values[1], _shape(values[0])
        return [shape[-1 - i // 2] for i, width in enumerate(widths) if width]
    shape = _shape(values[0][0] if isinstance(values[0], list | tuple) else values[0])
    if isinstance(result, Tensor) and not result.dim():  # a loss is a sum, and those of slices add up
        return () if name == "sum" else shape
    if name in _KEEP_APART or not arguments.keys() & {"dim", "dims"} or (name == "slice" and shape == _shape(result)):
        return ()
    dims = arguments.get("dim", arguments.get("dims"))
    return [shape[dim] for dim in ([dims] if isinstance(dims, int) else dims or range(len(shape)))]


def _summed(equation: str, operands: Iterable[Any]) -> list[int]:
    """The sizes behind letters that an einsum's result lacks; without an arrow those are the repeated ones."""
    sources, arrow, kept = equation.replace(" ", "").partition("->")
    kept = kept if arrow else {letter for letter in sources if sources.count(letter) == 1}
    found: list[int] = []
    for letters, shape in zip(sources.split(","), map(_shape, operands), strict=True):
        first, _, last = letters.partition("...")
        named = zip(first + last, (*shape[: len(first)], *shape[len(shape) - len(last) :]), strict=True)
        found += [size for letter, size in named if letter not in kept]
    return found


def _arguments(node: fx.Node, target: OpOverload) -> dict[str, Any]:
    """By name, with the defaults of what was not given."""
    names = [argument.name for argument in target._schema.arguments]
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    given = dict(zip(names, node.args, strict=False))
    return {name: (given | node.kwargs).get(name, defaults.get(name)) for name in names}


def _shape(value: Any) -> tuple[int, ...]:
    found = value.meta["val"] if isinstance(value, fx.Node) else value
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def counts_tokens(tokens: int, batch: int) -> IsTokens:
    """For sizes that stand for these dims alone: tokens, or samples × tokens, perhaps several rows of each."""
    return lambda size: size == tokens or size % math.lcm(tokens, batch) == 0

"""What a split of a weight means to its product: read off the graph of a segment that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

import phalanx.model.ops.experts
import phalanx.model.ops.operators  # noqa: F401  (define the operators named below)

aten, own = torch.ops.aten, torch.ops.phalanx

# The dims of a product's second argument: what it puts out, what it sums over.
_PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.linear.default: (0, 1), aten.mm.default: (1, 0), aten.matmul.default: (1, 0),
    own.grouped_matmul.default: (2, 1), aten.conv1d.default: (0, 1), aten.conv2d.default: (0, 1),
    aten.conv3d.default: (0, 1), aten.convolution.default: (0, 1),
}  # fmt: skip
_TURNED = (aten.t.default, aten.transpose.int)
_SAME = (aten.to.dtype, aten.contiguous.default, aten.type_as.default)
_LOSSES = (own.cross_entropy_part.default,)


def product_of(weight: fx.Node) -> fx.Node | None:
    """The product that a placeholder is the weight of; None for biases, norms and tables."""
    return next((product for product, _ in _products(weight, turned=False)), None)


def role_of(weight: fx.Node, dim: int) -> str:
    """columns: ranks compute different outputs. rows: each has some summands of all outputs. vocabulary: of the
    embedding's rows or the loss's classes. elements: with the values that it is added to or multiplied with."""
    if any(user.target is own.embedding_part.default for user in weight.users):
        return "vocabulary"
    for product, turned in _products(weight, turned=False):
        out, _ = _PRODUCTS[product.target]
        is_out = (dim == out) != turned
        return ("vocabulary" if _reaches_loss(product) else "columns") if is_out else "rows"
    return "elements"


def _products(value: fx.Node, turned: bool) -> Iterator[tuple[fx.Node, bool]]:
    """Products that use a value as their weight, and whether its two dims are swapped on the way."""
    for user in value.users:
        if user.target in _PRODUCTS and len(user.args) > 1 and user.args[1] is value:
            yield user, turned
        elif user.target in (*_TURNED, *_SAME):
            yield from _products(user, turned != (user.target in _TURNED))


def _reaches_loss(value: fx.Node) -> bool:
    """Without another product in between."""
    return any(user.target in _LOSSES or (user.target not in _PRODUCTS and _reaches_loss(user)) for user in value.users)

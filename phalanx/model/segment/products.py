"""Weight gradients that are matrix products, handed out as their two factors.

Whoever adds gradients up multiplies right into the sum, in its precision: the product of one micro-batch or slice is
never rounded, written and read again. With many small ones that costs as much as the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


@dataclass(frozen=True)
class Product:
    """left @ right, not yet multiplied."""

    left: Tensor
    right: Tensor

    def value(self) -> Tensor:
        return self.left @ self.right

    def write(self, into: Tensor) -> None:
        """Where a kernel cannot write in this precision, the product is rounded to its factors' first."""
        if into.dtype == self.left.dtype:
            torch.mm(self.left, self.right, out=into)
        elif into.device.type == "cuda":
            aten.mm.dtype_out(self.left, self.right, into.dtype, out=into)
        else:
            into.copy_(self.value())

    def add_to(self, total: Tensor) -> None:
        if total.dtype == self.left.dtype:
            total.addmm_(self.left, self.right)
        elif total.device.type == "cuda":
            aten.addmm.dtype_out(total, self.left, self.right, total.dtype, out=total)
        else:
            total.add_(self.value())


Gradient = Tensor | Product | None  # None: no loss depends on the parameter


@dataclass(frozen=True)
class Factor:
    """The rows of a node's value as a matrix, perhaps transposed."""

    node: fx.Node
    transposed: bool

    @classmethod
    def of(cls, node: fx.Node, given: Collection[fx.Node]) -> Factor:
        """As a view of something that is `given`, if it is one, and else computed."""
        transposed = node not in given and _is_transpose(node)
        node = node.all_input_nodes[0] if transposed else node
        source = node
        while source not in given and _flattens(source):
            source = source.all_input_nodes[0]
        return cls(source if source in given else node, transposed)

    def turned(self) -> Factor:
        return replace(self, transposed=not self.transposed)

    def __call__(self, value: Tensor) -> Tensor:
        matrix = value if value.dim() == 2 else value.flatten(0, -2)
        return matrix.t() if self.transposed else matrix


class Forms:
    """In which form a cut-out function gives each gradient of a parameter: `nodes` are what it computes for that."""

    def __init__(self, gradients: Sequence[fx.Node | None], given: Collection[fx.Node], products: bool) -> None:
        self._forms = [_form(gradient, given) if products else gradient for gradient in gradients]
        nodes = [n for form in self._forms for n in (_nodes(form) if isinstance(form, tuple) else [form])]
        wanted = [node for node in dict.fromkeys(nodes) if node is not None]
        self.nodes = [node for node in wanted if node not in given]
        self.given = [node for node in wanted if node in given]

    def reader(
        self, arguments: Sequence[fx.Node], num_others: int
    ) -> Callable[[Sequence[Tensor], Sequence[Tensor]], list[Gradient]]:
        """Takes gradients from what a function was given, which are these nodes, and from what it gave, after so many
        other results."""
        places = {node: place for place, node in enumerate(arguments)}
        places |= {node: len(arguments) + num_others + place for place, node in enumerate(self.nodes)}
        takers = [_taker(form, places) for form in self._forms]

        def read(given: Sequence[Tensor], results: Sequence[Tensor]) -> list[Gradient]:
            values = [*given, *results]
            return [take(values) for take in takers]

        return read


def _taker(
    form: tuple[Factor, Factor] | fx.Node | None, places: Mapping[fx.Node, int]
) -> Callable[[Sequence[Tensor]], Gradient]:
    if form is None:
        return lambda values: None
    if isinstance(form, fx.Node):
        return itemgetter(places[form])
    left, right = form
    first, second = places[left.node], places[right.node]
    return lambda values: Product(left(values[first]), right(values[second]))


def _form(gradient: fx.Node | None, given: Collection[fx.Node]) -> tuple[Factor, Factor] | fx.Node | None:
    """The factors of a gradient that is nothing but a product, or such a product transposed; else itself."""
    node, flipped = gradient, False
    while node is not None and len(node.users) == 1 and _is_transpose(node):
        node, flipped = node.all_input_nodes[0], not flipped
    if node is None or len(node.users) != 1 or node.target is not aten.mm.default:
        return gradient
    left, right = (Factor.of(factor, given) for factor in node.args if isinstance(factor, fx.Node))
    return (right.turned(), left.turned()) if flipped else (left, right)


def _nodes(form: tuple[Factor, Factor]) -> list[fx.Node]:
    return [factor.node for factor in form]


def _is_transpose(node: fx.Node) -> bool:
    """Of a matrix."""
    dims: Any = node.args[1] if len(node.args) > 1 else None
    return node.target is aten.t.default or (node.target is aten.permute.default and list(dims) == [1, 0])


def _flattens(node: fx.Node) -> bool:
    """Whether it is its source with all dims but the last made one."""
    if node.target not in _VIEWS:
        return False
    shape, source = node.meta["val"].shape, node.all_input_nodes[0].meta["val"].shape
    return len(shape) == 2 and len(source) > 2 and shape[-1] == source[-1]

"""Says with plain operators what models write in other ways: the same values, in forms that later passes know.

Casts and slices that do nothing are dropped, views accept any strides, an index that counts is a slice, and parts that
are written one after the other into a new tensor are joined.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from phalanx.model.graph.functionalise import FlatGraph, replace

aten = torch.ops.aten
_END = 2**63 - 1
_SAME = {  # other names
    aten.multiply.Tensor: aten.mul.Tensor, aten.multiply.Scalar: aten.mul.Scalar, aten.divide.Tensor: aten.div.Tensor,
    aten.subtract.Tensor: aten.sub.Tensor,
}  # fmt: skip
_FLOATING = {torch.float64: (torch.float32, torch.float64)}  # to which `widen` made casts to float32


def simplify(flat: FlatGraph) -> None:
    for node in list(flat.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target in _SAME:
            node.target = _SAME[node.target]
        elif node.target in (aten.reshape_as.default, aten.view_as.default):
            sizes = [flat.size(size) for size in node.meta["val"].shape]
            node.target, node.args = aten.reshape.default, (node.args[0], sizes)
        elif node.target is aten.expand_as.default:
            sizes = [flat.size(size) for size in node.meta["val"].shape]
            node.target, node.args = aten.expand.default, (node.args[0], sizes)
        elif node.target is aten.numpy_T.default and node.meta["val"].dim() == 2:
            node.target = aten.t.default
        elif node.target is aten.embedding.default and len(node.args) > 4 and node.args[4]:
            node.update_arg(4, False)  # a sparse gradient is the same one, which sums and reductions cannot hold
        elif node.target is aten.to.dtype:
            source = node.args[0].meta["val"].dtype  # pyright: ignore
            if source in _FLOATING.get(node.args[1], (node.args[1],)):  # pyright: ignore
                replace(flat.graph, node, node.args[0])
        elif node.target is aten.slice.Tensor and tuple(node.args[2:]) in ((0, _END), (0, _END, 1)):
            replace(flat.graph, node, node.args[0])
        elif node.target is aten.index.Tensor:
            _slice_instead(flat, node)
        elif node.target is aten.slice_scatter.default and tuple(node.args[3:]) in ((0, _END), (0, _END, 1)):
            replace(flat.graph, node, node.args[1])
        elif node.target is aten.slice_scatter.default:
            _join_instead(flat, node)


def _slice_instead(flat: FlatGraph, node: fx.Node) -> None:
    """x[:, [3, 4]] with a constant list of neighbours is x[:, 3:5]."""
    x, indices = node.args
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]  # pyright: ignore
    if len(given) != 1 or flat.roles.get(given[0][1], ("",))[0] != "constant":  # pyright: ignore
        return
    dim, index = given[0]
    values: Any = flat.constants[flat.roles[index][1]]
    if values.dim() != 1 or values.dtype == torch.bool or not len(values):
        return
    first, last = int(values[0]), int(values[-1])
    if values.tolist() != list(range(first, last + 1)) or (first < 0 <= last):
        return
    node.target, node.args = aten.slice.Tensor, (x, dim, first, _END if last == -1 else last + 1)


def _join_instead(flat: FlatGraph, node: fx.Node) -> None:
    """Parts that fill a new tensor from its begin to its end, one after the other, are joined."""
    parts: list[fx.Node] = []
    dim, size = _dim(node), node.meta["val"].shape[_dim(node)]
    if not isinstance(size, int):
        return
    last: Any = node
    end = size
    while last.target is aten.slice_scatter.default and _dim(last) == dim:
        start, stop, step = (*last.args[3:], *(None, None, 1)[len(last.args) - 3 :])
        begins, ends = (start or 0), size if stop is None else min(stop, size)
        if step != 1 or begins < 0 or ends != end or not _fits(last.args[1], node, dim):
            return
        parts.insert(0, last.args[1])
        last, end = last.args[0], begins
    if end or last.target not in (aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default):
        return
    node.target, node.args = aten.cat.default, (parts, dim)


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[2] if len(node.args) > 2 else 0
    return dim % node.meta["val"].dim()


def _fits(part: Any, whole: fx.Node, dim: int) -> bool:
    """Whether a part has the dtype and, apart from one dim, the size of the whole."""
    value, other = part.meta["val"], whole.meta["val"]
    sizes = zip(map(str, value.shape), map(str, other.shape), strict=True)
    return value.dtype == other.dtype and all(d == dim or a == b for d, (a, b) in enumerate(sizes))

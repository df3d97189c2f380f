"""Passes that turn a freshly exported graph into the plain form the rest of Phalanx works on.

Afterwards a graph is functional (no in-place operators), holds no guards, no symbolic-size arithmetic and no fixed
device; randomness is keyed, attention is our operator, the loss is a sum (`losses.py`). Whatever a pass cannot express
exactly is refused with the module and source line it came from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

import phalanx.model.ops.attention
import phalanx.model.ops.operators  # noqa: F401  (the three define operators)
from phalanx.errors import CaptureError
from phalanx.model.graph.functionalise import FlatGraph, inline_modes, make_functional, refuse_coupling, replace, where
from phalanx.model.graph.losses import rewrite_loss
from phalanx.model.graph.simplify import simplify

aten = torch.ops.aten
_IGNORED = {
    aten._assert_tensor_metadata.default, aten._assert_scalar.default, aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default, aten._assert_async.msg,
}  # fmt: skip


def normalise(flat: FlatGraph, dtype: torch.dtype) -> None:
    """All passes, in order."""
    inline_modes(flat)
    _drop_guards(flat)
    refuse_coupling(flat)
    make_functional(flat)
    _name_sizes(flat)
    _forget_devices(flat)
    _say_dtypes(flat)
    if dtype == torch.float64:
        widen(flat.graph)
    simplify(flat)
    _use_our_attention(flat)
    _use_our_experts(flat)
    _key_dropout(flat)
    rewrite_loss(flat)
    flat.graph.eliminate_dead_code()
    flat.roles = {node: role for node, role in flat.roles.items() if node.users}
    for node in list(flat.graph.nodes):
        if node.op == "placeholder" and node not in flat.roles:
            flat.graph.erase_node(node)
    flat.graph.lint()


def _calls(flat: FlatGraph, *targets: Callable[..., Any]) -> Iterator[fx.Node]:
    for node in list(flat.graph.nodes):
        if node.op == "call_function" and node.target in targets:
            yield node


def _drop_guards(flat: FlatGraph) -> None:
    for node in reversed(list(flat.graph.nodes)):
        if node.op == "call_function" and node.target in _IGNORED:
            flat.graph.erase_node(node)


def _name_sizes(flat: FlatGraph) -> None:
    for node in list(flat.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.SymInt | torch.SymBool | int) or not node.users:
            continue
        replace(flat.graph, node, flat.size(value))


def _forget_devices(flat: FlatGraph) -> None:
    for node in list(flat.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.to.dtype_layout, aten.to.device, aten.to.other):
            dtype = node.meta["val"].dtype
            node.target, node.args, node.kwargs = aten.to.dtype, (node.args[0], dtype), {}
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cpu"))
        node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("pin_memory", "layout")}


def _say_dtypes(flat: FlatGraph) -> None:
    """What tensors made inside the graph hold does not depend on torch's default dtype, nor on when that is asked."""
    for node in flat.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or node.kwargs.get("dtype") is not None:
            continue
        arguments = node.target._schema.arguments
        makes = not any(argument.type.kind() == "TensorType" for argument in arguments)
        if makes and any(argument.name == "dtype" and argument.kwarg_only for argument in arguments):
            node.update_kwarg("dtype", node.meta["val"].dtype)


def retarget(graph: fx.Graph, device: torch.device) -> None:
    """Tensors made inside the graph are made on `device`."""
    for node in graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", device)


def widen(graph: fx.Graph, narrow: Collection[torch.dtype] = (torch.float32,)) -> None:
    """In float64 the casts to float32 that models carry inside would hide real errors behind rounding."""
    swap = lambda arg: torch.float64 if isinstance(arg, torch.dtype) and arg in narrow else arg  # noqa: E731
    for node in graph.nodes:
        node.args = _map_leaves(node.args, swap)
        node.kwargs = _map_leaves(node.kwargs, swap)


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_map_leaves(item, function) for item in value)
    if isinstance(value, list):
        return [_map_leaves(item, function) for item in value]
    if isinstance(value, dict):
        return {key: _map_leaves(item, function) for key, item in value.items()}
    return function(value)


def _use_our_attention(flat: FlatGraph) -> None:
    """Plain scaled_dot_product_attention calls become our operator; a bias that is all zeros is dropped."""
    for node in _calls(flat, aten.scaled_dot_product_attention.default):
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        query, key = given["query"].meta["val"], given["key"].meta["val"]
        causal, dropout = bool(given.get("is_causal", False)), float(given.get("dropout_p", 0.0))
        # Causal attention of unequal lengths is aligned at the first key there, at the last key in our operator.
        alike = query.dim() == 4 and (not causal or str(query.shape[2]) == str(key.shape[2]))
        if not alike or (given.get("attn_mask") is not None and not dropout):
            _refuse_dropout(node, dropout)
            continue
        scale = given.get("scale") or query.shape[-1] ** -0.5
        with flat.graph.inserting_before(node):
            bias = _bias(flat.graph, given.get("attn_mask"))
            args = (*node.args[:3], None, None, bias, None, causal, float(scale), 0, 0.0, dropout)
            pair = flat.graph.call_function(torch.ops.phalanx.attention.default, args)
            out = flat.graph.call_function(operator.getitem, (pair, 0))
        for new in (pair, out):
            new.meta["path"] = node.meta.get("path", "")
        out.meta["val"] = node.meta["val"]
        replace(flat.graph, node, out)
    for node in _calls(flat, torch.ops.phalanx.attention.default):
        bias = node.args[5]
        if isinstance(bias, fx.Node) and bias.target in (aten.zeros.default, aten.zeros_like.default):
            node.update_arg(5, None)


def _refuse_dropout(node: fx.Node, dropout: float) -> None:
    if dropout:
        raise CaptureError(
            f"this form of attention has dropout that no plan could repeat ({where(node)})",
            "give scaled_dot_product_attention [batch, heads, tokens, dim], and causal attention equally many keys",
        )


def _bias(graph: fx.Graph, mask: fx.Node | None) -> fx.Node | None:
    """A mask of scaled_dot_product_attention as our operator's bias: floating, with all four dims."""
    if mask is None:
        return None
    missing, path = 4 - mask.meta["val"].dim(), mask.meta.get("path", "")
    steps: list[tuple[Any, tuple[Any, ...]]] = [(aten.unsqueeze.default, (0,))] * missing
    if mask.meta["val"].dtype == torch.bool:
        steps.append((aten.where.Scalar, (0.0, float("-inf"))))
    for target, args in steps:
        mask = graph.call_function(target, (mask, *args))
        mask.meta["path"] = path
    return mask


def _use_our_experts(flat: FlatGraph) -> None:
    """Grouped products become our operator; rows per expert are counted on floats, the one dtype every device takes."""
    for node in list(flat.graph.nodes):
        name = str(node.target)
        if "grouped_mm" in name:
            x, weight = node.args[:2]
            offsets = node.args[2] if len(node.args) > 2 else node.kwargs["offs"]
            node.target, node.args, node.kwargs = torch.ops.phalanx.grouped_matmul.default, (x, weight, offsets), {}
        elif node.target is aten.histc.default and not node.args[0].meta["val"].is_floating_point():
            with flat.graph.inserting_before(node):
                counted = flat.graph.call_function(aten.to.dtype, (node.args[0], torch.float32))
            counted.meta["path"] = node.meta["path"]
            node.update_arg(0, counted)


def _key_dropout(flat: FlatGraph) -> None:
    """Each dropout draws from the keys of its own site: module path and call index within it."""
    calls: dict[str, int] = {}

    def keys(node: fx.Node) -> fx.Node:
        _require_samples_first(flat, node)
        path = str(node.meta.get("path", ""))
        index = calls[path] = calls.get(path, -1) + 1
        return flat.placeholder("dropout", f"{path}#{index}")

    for node in _calls(flat, aten.dropout.default, torch.ops.phalanx.attention.default):
        if node.target is torch.ops.phalanx.attention.default:
            if node.args[11]:
                node.update_arg(6, keys(node))
            continue
        x, p, train = node.args
        if not p or not train:
            replace(flat.graph, node, x)
            continue
        node.target, node.args = torch.ops.phalanx.dropout.default, (x, keys(node), p)


def _require_samples_first(flat: FlatGraph, node: fx.Node) -> None:
    """Keys belong to samples, so the rows of what is dropped must be samples, or samples times tokens."""
    shape = node.args[0].meta["val"].shape  # pyright: ignore
    if not len(shape) or "batch" not in flat.dims_in(shape[0]):
        raise CaptureError(
            f"dropout on a tensor of shape {list(shape)}, whose first dim is not the batch ({where(node)})",
            "lay activations out as [batch, ...] (batch_first=True); dropout on weights cannot be split by samples",
        )


def without_dropout(graph: fx.Graph) -> None:
    """The same graph for evaluation."""
    for node in list(graph.nodes):
        if node.target in (torch.ops.phalanx.dropout.default, torch.ops.phalanx.dropout_part.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is torch.ops.phalanx.attention.default:
            node.args = (*node.args[:6], None, *node.args[7:11], 0.0)
        elif node.target is torch.ops.phalanx.attention_slice.default:
            node.args = (*node.args[:7], None, *node.args[8:12], 0.0)

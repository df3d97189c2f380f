"""The loss as a sum: a mean over items becomes (sum, count), so that any split of the batch adds up exactly.

The count is computed from the inputs alone (labels that are not ignored), so every rank knows it without communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from phalanx.errors import CaptureError
from phalanx.model.graph.flat import FlatGraph, where

aten = torch.ops.aten
_SUM, _MEAN = 2, 1
_ELEMENTWISE: dict[Any, int] = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.binary_cross_entropy_with_logits.default: 4,
}  # fmt: skip  (position of `reduction`)


def rewrite_loss(flat: FlatGraph) -> None:
    """Finds the loss the graph returns, makes it a sum and adds its count; the graph then returns both."""
    output = next(iter(reversed(flat.graph.nodes)))
    loss = output.args[0]
    while isinstance(loss, list | tuple):
        loss = loss[0]
    if not isinstance(loss, fx.Node):
        raise CaptureError("the model returned no loss", "its forward must return a loss when it is given labels")
    with flat.graph.inserting_before(output):
        flat.loss, flat.count = _sum_and_count(flat, loss)
    flat.count.meta["path"] = flat.loss.meta["path"] = loss.meta.get("path", "")
    output.args = ((flat.loss, flat.count),)


def _sum_and_count(flat: FlatGraph, loss: fx.Node) -> tuple[fx.Node, fx.Node]:
    graph = flat.graph
    while loss.target is aten.to.dtype:
        assert isinstance(loss.args[0], fx.Node)
        loss = loss.args[0]
    if loss.target is aten.cross_entropy_loss.default:
        return _cross_entropy(flat, loss)
    if loss.target in (*_ELEMENTWISE, aten.mean.default):
        _require_items(flat, loss)
    if loss.target in _ELEMENTWISE and _argument(loss, _ELEMENTWISE[loss.target], _MEAN) == _MEAN:
        position = _ELEMENTWISE[loss.target]
        args = (*loss.args[:position], *[None] * (position - len(loss.args)), _SUM, *loss.args[position + 1 :])
        total = graph.call_function(loss.target, args, dict(loss.kwargs))  # pyright: ignore[reportArgumentType]
        return total, _number_of_elements(flat, loss.args[1])
    if loss.target is aten.mean.default:
        return graph.call_function(aten.sum.default, (loss.args[0],)), _number_of_elements(flat, loss.args[0])
    raise CaptureError(
        f"the loss ends in {loss.target}, not in a mean over items ({where(loss)}); a split batch would change it",
        "return cross_entropy, mse_loss, l1_loss, binary_cross_entropy_with_logits or x.mean() as the loss",
    )


def _require_items(flat: FlatGraph, loss: fx.Node) -> None:
    """What is averaged must have the samples among its elements: `x.mean(0).mean()` is a mean of means."""
    averaged: Any = loss.args[0]
    if "batch" not in flat.dims_in(averaged.meta["val"].numel()):
        raise CaptureError(
            f"the loss averages a tensor without a batch dim ({where(loss)}); a split batch would change it",
            "compute the loss per sample or per token, and take the mean of that",
        )


def _cross_entropy(flat: FlatGraph, loss: fx.Node) -> tuple[fx.Node, fx.Node]:
    graph = flat.graph
    names = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    given: dict[str, Any] = dict(zip(names, loss.args, strict=False)) | dict(loss.kwargs)
    logits, targets = given["input"], given["target"]
    ignore, smoothing = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
    plain = given.get("weight") is None and given.get("reduction", _MEAN) == _MEAN
    if not plain or logits.meta["val"].dim() != 2 or targets.meta["val"].dim() != 1:
        raise CaptureError(
            "this cross entropy is not a plain mean over rows of class indices",
            "flatten logits to [items, classes] and labels to [items], without class weights",
        )
    logits = _before_widening(graph, logits)
    total = graph.call_function(torch.ops.phalanx.cross_entropy_sum.default, (logits, targets, ignore, smoothing))
    valid = graph.call_function(aten.ne.Scalar, (targets, ignore))
    return total, graph.call_function(aten.sum.default, (valid,))


def _before_widening(graph: fx.Graph, logits: fx.Node) -> fx.Node:
    """The logits before models cast them to float32: our operator widens by itself, without storing the wide copy."""
    if _widens(logits):
        return _before_widening(graph, logits.args[0])  # pyright: ignore
    if logits.target is aten.reshape.default and _widens(logits.args[0]):  # pyright: ignore
        narrow = _before_widening(graph, logits.args[0])  # pyright: ignore
        reshaped = graph.call_function(aten.reshape.default, (narrow, *logits.args[1:]))
        reshaped.meta.update(logits.meta)
        return reshaped
    return logits


def _widens(node: fx.Node) -> bool:
    if node.target is not aten.to.dtype:
        return False
    source, target = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # pyright: ignore
    return torch.promote_types(source, target) == target


def _argument(node: fx.Node, position: int, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get("reduction", default)


def _number_of_elements(flat: FlatGraph, x: Any) -> fx.Node:
    options = {"dtype": torch.int64, "device": torch.device("cpu")}  # exact, and moved to the rank's device like others
    return flat.graph.call_function(aten.scalar_tensor.default, (flat.size(x.meta["val"].numel()),), options)

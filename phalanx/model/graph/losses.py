"""The loss as (sum, count): a mean over items becomes their sum and their number, so that any split of the batch adds
up exactly. The count follows from the inputs alone (labels that are not ignored), so that every rank knows it without
communication.

A loss may be several terms: means, scaled or added, and what depends on parameters only (a penalty on weights). They
need one count, so terms over other numbers of items are scaled to it. Whatever else a loss may be is taken for a mean
over samples, and `assumed` says why; whether that is so is tried out wherever a plan would cut the batch
(`model/separable.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from sympy import sympify
from torch import fx

from phalanx.errors import CaptureError
from phalanx.model.graph.functionalise import FlatGraph, where

aten = torch.ops.aten
_SUM, _MEAN = 2, 1
_ELEMENTWISE: dict[Any, int] = {
    aten.mse_loss.default: 2,
    aten.l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.kl_div.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}  # fmt: skip  (position of `reduction`)
_CROSS_ENTROPY = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_REARRANGED = (
    aten.reshape.default, aten.flatten.using_ints, aten.to.dtype, aten.slice.Tensor, aten.select.int,
    aten.squeeze.dim, aten.squeeze.default, aten.unsqueeze.default, aten.contiguous.default, aten.transpose.int,
)  # fmt: skip
NOT_KNOWN = ("", 0)  # labels that are no input: nothing can be said about those that are ignored
_NEGATIVE_LOG = ("input", "target", "weight", "reduction", "ignore_index")


@dataclass(frozen=True)
class _Term:
    """factor × total / count. count: a size over dynamic dims, a node of the inputs alone, or None for 1."""

    factor: float
    total: fx.Node
    count: Any

    def scaled(self, factor: float) -> _Term:
        return _Term(self.factor * factor, self.total, self.count)


class _Unknown(Exception):
    """A loss that is not known to be made of means; the message says what it is."""


def rewrite_loss(flat: FlatGraph) -> None:
    """Finds the loss the graph returns, makes it a sum and adds its count; the graph then returns both."""
    output = next(iter(reversed(flat.graph.nodes)))
    loss = output.args[0]
    while isinstance(loss, list | tuple):
        loss = loss[0]
    if not isinstance(loss, fx.Node):
        raise CaptureError("the model returned no loss", "its forward must return a loss when it is given labels")
    value = loss.meta["val"]
    if value.numel() != 1 or not value.is_floating_point():
        raise CaptureError(
            f"the model returned a tensor of shape {list(value.shape)} and {value.dtype} as its loss ({where(loss)})",
            "return one floating-point number, or a dict with one under 'loss'",
        )
    with flat.graph.inserting_before(output):
        flat.loss, flat.count = _Rewriter(flat, loss).rewrite()
    flat.count.meta["path"] = flat.loss.meta["path"] = loss.meta.get("path", "")
    output.args = ((flat.loss, flat.count),)


class _Rewriter:
    def __init__(self, flat: FlatGraph, loss: fx.Node) -> None:
        self.flat, self.graph, self.loss = flat, flat.graph, loss
        self._learned = _depending(flat, "parameter")
        self._labels: dict[fx.Node, tuple[str, int]] = {}  # what each number of labels is that of
        self._of_data = _depending(flat, "input") | _depending(flat, "size")

    def rewrite(self) -> tuple[fx.Node, fx.Node]:
        try:
            return self._joined(list(self._terms(self.loss)))
        except _Unknown as unknown:
            self.flat.assumed = str(unknown)
            count = self._number(self.flat.placeholder("size", "batch"))
            loss = self._call(aten.reshape.default, self.loss, []) if self.loss.meta["val"].dim() else self.loss
            return self._call(aten.mul.Tensor, loss, count), count

    def _terms(self, node: Any) -> Iterator[_Term]:
        """What a loss is a sum of."""
        args = node.args
        if node not in self._of_data:
            yield _Term(1.0, node, None)
        elif node.target is aten.to.dtype and node.meta["val"].is_floating_point():
            yield from self._terms(args[0])
        elif node.target in (aten.add.Tensor, aten.sub.Tensor) and all(isinstance(arg, fx.Node) for arg in args[:2]):
            sign = (1.0 if node.target is aten.add.Tensor else -1.0) * node.kwargs.get("alpha", 1)
            yield from self._terms(args[0])
            yield from (term.scaled(sign) for term in self._terms(args[1]))
        elif node.target is aten.neg.default:
            yield from (term.scaled(-1.0) for term in self._terms(args[0]))
        elif node.target is aten.mul.Tensor and (pair := _with_number(args)):
            yield from (term.scaled(pair[1]) for term in self._terms(pair[0]))
        elif node.target is aten.div.Tensor and isinstance(args[1], int | float):
            yield from (term.scaled(1.0 / args[1]) for term in self._terms(args[0]))
        elif node.target in (aten.mul.Tensor, aten.div.Tensor) and args[1] not in self._of_data:
            # A weight of the loss, learned or kept in a buffer.
            for term in self._terms(args[0]):
                yield _Term(term.factor, self._call(node.target, term.total, args[1]), term.count)
        elif node.target is aten.mul.Tensor and args[0] not in self._of_data:
            for term in self._terms(args[1]):
                yield _Term(term.factor, self._call(node.target, args[0], term.total), term.count)
        elif node.target is aten.div.Tensor and self._is_count(args[1]):
            self.flat.assumed = self.flat.assumed or f"the loss is a quotient ({where(node)})"
            yield _Term(1.0, args[0], self._count_of(args[1]))
        else:
            yield self._mean(node)

    def _is_count(self, node: Any) -> bool:
        value = node.meta.get("val")
        is_one = isinstance(value, torch.Tensor) and value.numel() == 1
        return node not in self._learned and (is_one or self._is_size(node))

    def _count_of(self, node: fx.Node) -> Any:
        """What a quotient divides by; the `clamp(min=1)` that avoids a division by zero is for whole batches."""
        while node.target in (aten.clamp.default, aten.clamp_min.default) and len(node.args) == 2:
            if not isinstance(node.args[1], int | float) or node.args[1] > 1:
                break
            node = node.args[0]  # pyright: ignore[reportAssignmentType]
        return node

    def _mean(self, node: fx.Node) -> _Term:
        if node.target is aten.cross_entropy_loss.default:
            return self._cross_entropy(node)
        if node.target is aten.nll_loss_nd.default:
            return self._negative_log(node)
        if node.target in (*_ELEMENTWISE, aten.mean.default):
            averaged: Any = node.args[0]
            if "batch" not in self.flat.dims_in(averaged.meta["val"].numel()):
                raise _Unknown(f"the loss averages a tensor without a batch dim ({where(node)})")
        position = _ELEMENTWISE.get(node.target)
        if position is not None and _reduction(node, position) == _MEAN:
            args = (*node.args[:position], *[None] * (position - len(node.args)), _SUM, *node.args[position + 1 :])
            total = self._call(
                cast(Any, node.target), *args, **{k: v for k, v in node.kwargs.items() if k != "reduction"}
            )
            return _Term(1.0, total, node.args[1].meta["val"].numel())  # pyright: ignore
        if node.target is aten.mean.default:
            return _Term(1.0, self._call(aten.sum.default, node.args[0]), node.args[0].meta["val"].numel())  # pyright: ignore
        raise _Unknown(f"the loss ends in {node.target}, not in a mean over items ({where(node)})")

    def _cross_entropy(self, node: fx.Node) -> _Term:
        given: dict[str, Any] = dict(zip(_CROSS_ENTROPY, node.args, strict=False)) | dict(node.kwargs)
        if given.get("reduction", _MEAN) != _MEAN:
            raise _Unknown(f"the loss is a cross entropy that is no mean ({where(node)})")
        logits, targets, weight = given["input"], given["target"], given.get("weight")
        ignore, smoothing = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
        if targets.meta["val"].is_floating_point():
            value = logits.meta["val"]
            total = self._call(cast(Any, node.target), logits, targets, weight, _SUM, ignore, smoothing)
            return _Term(1.0, total, value.numel() // value.shape[1] if value.dim() > 1 else 1)
        if weight is not None:
            total = self._call(cast(Any, node.target), logits, targets, weight, _SUM, ignore, smoothing)
            return _Term(1.0, total, self._weights_of(targets, weight, ignore, node))
        logits, targets = self._in_rows(logits, targets)
        logits = _before_widening(self.graph, logits)
        total = self._call(torch.ops.phalanx.cross_entropy_sum.default, logits, targets, ignore, smoothing)
        return _Term(1.0, total, self._valid(targets, ignore))

    def _in_rows(self, logits: fx.Node, targets: fx.Node) -> tuple[fx.Node, fx.Node]:
        """logits: [samples, classes, …] or [classes]. As [rows, classes] and [rows]."""
        dims, classes = logits.meta["val"].dim(), logits.meta["val"].shape[min(1, logits.meta["val"].dim() - 1)]
        if dims == 2:
            return logits, targets
        order = [0, *range(2, dims), 1] if dims > 2 else [0]
        moved = self._call(aten.permute.default, logits, order, like=logits.meta["val"].permute(order))
        rows = targets.meta["val"].reshape(-1)
        logits = self._call(aten.reshape.default, moved, [-1, classes], like=moved.meta["val"].reshape(-1, classes))
        return logits, self._call(aten.reshape.default, targets, [-1], like=rows)

    def _negative_log(self, node: fx.Node) -> _Term:
        given: dict[str, Any] = dict(zip(_NEGATIVE_LOG, node.args, strict=False)) | dict(node.kwargs)
        if given.get("reduction", _MEAN) != _MEAN:
            raise _Unknown(f"the loss is an nll_loss that is no mean ({where(node)})")
        targets, weight, ignore = given["target"], given.get("weight"), given.get("ignore_index", -100)
        total = self._call(cast(Any, node.target), given["input"], targets, weight, _SUM, ignore)
        counted = self._valid(targets, ignore) if weight is None else self._weights_of(targets, weight, ignore, node)
        return _Term(1.0, total, counted)

    def _valid(self, targets: fx.Node, ignore: int) -> fx.Node:
        count = self._call(aten.sum.default, self._call(aten.ne.Scalar, targets, ignore))
        source: Any = targets
        while source.target in _REARRANGED:
            source = source.args[0]
        kind, name = self.flat.roles.get(source, ("", ""))
        self._labels[count] = (name, ignore) if kind == "input" else NOT_KNOWN
        return count

    def _weights_of(self, targets: fx.Node, weight: fx.Node, ignore: int, node: fx.Node) -> fx.Node:
        """What a mean with class weights is divided by."""
        if weight in self._learned:
            raise _Unknown(f"the loss weighs classes by parameters ({where(node)})")
        valid = self._call(aten.ne.Scalar, targets, ignore)
        known = self._call(aten.mul.Tensor, targets, valid)
        wide = self._call(aten.to.dtype, weight, torch.float64)
        return self._call(
            aten.sum.default, self._call(aten.mul.Tensor, self._call(aten.index.Tensor, wide, [known]), valid)
        )

    def _joined(self, terms: Sequence[_Term]) -> tuple[fx.Node, fx.Node]:
        """All terms over one count."""
        counts = [term.count for term in terms if term.count is not None]
        if not counts:
            raise _Unknown("the loss has no term that is a mean over samples")
        first = counts[0]
        count = self._number(first)
        total: fx.Node | None = None
        for term in terms:
            part = self._over(term, first, count)
            total = part if total is None else self._call(aten.add.Tensor, total, part)
        assert total is not None
        return total, count

    def _over(self, term: _Term, count: Any, number: fx.Node) -> fx.Node:
        """A term's sum, if it were to be divided by another count."""
        if term.count is None:
            part = self._call(aten.mul.Tensor, term.total, number)
            ratio = 1.0
        else:
            part, ratio = term.total, self._ratio(count, term.count)
        factor = term.factor * ratio
        return part if factor == 1.0 else self._call(aten.mul.Tensor, part, factor)

    def _ratio(self, wanted: Any, given: Any) -> float:
        """Between two numbers of items, where it is the same for every part of a batch."""
        if self._same(wanted, given):
            return 1.0
        counts = [count for count in (wanted, given) if isinstance(count, fx.Node) and not self._is_size(count)]
        if counts:
            self.flat.never_ignored += tuple(self._labels.get(count, NOT_KNOWN) for count in counts)
            raise _Unknown("the loss adds means over different numbers of items, which depend on the data")
        ratio = self._expression(wanted) / self._expression(given)
        if not ratio.is_number:
            raise _Unknown("the loss adds means over numbers of items whose ratio depends on the shape of the batch")
        return float(ratio)

    def _expression(self, size: Any) -> Any:
        """Over the names of the dynamic dims."""
        if isinstance(size, fx.Node):
            return sympify(self.flat.roles[size][1])
        expression = sympify(size.node.expr if isinstance(size, torch.SymInt) else size)
        return sympify(str(expression.subs({s: self.flat.symbols[str(s)] for s in expression.free_symbols})))

    def _is_size(self, node: fx.Node) -> bool:
        return self.flat.roles.get(node, ("", ""))[0] == "size"

    def _same(self, one: Any, other: Any) -> bool:
        """Computed by the same operators from the same values."""
        if one is other:
            return True
        if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
            return not isinstance(one, fx.Node | list | tuple) and type(one) is type(other) and bool(one == other)
        if one.target != other.target or one.op == "placeholder" or len(one.args) != len(other.args):
            return False
        return one.kwargs == other.kwargs and all(map(self._same, one.args, other.args))

    def _number(self, count: Any) -> fx.Node:
        """A count as a tensor."""
        if isinstance(count, fx.Node) and not self._is_size(count):
            return count
        size = count if isinstance(count, fx.Node) else self.flat.size(count)
        # Exact, and moved to the rank's device like others.
        options = {"dtype": torch.int64, "device": torch.device("cpu")}
        return self.graph.call_function(aten.scalar_tensor.default, (size,), options)

    def _call(self, target: Callable[..., Any], *args: Any, like: Any = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["path"] = self.loss.meta.get("path", "")
        if like is not None:
            node.meta["val"] = like
        return node


def _depending(flat: FlatGraph, kind: str) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in flat.graph.nodes:
        is_one = flat.roles.get(node, ("", ""))[0] == kind
        if is_one or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _with_number(args: Sequence[Any]) -> tuple[fx.Node, float] | None:
    """A product of a tensor and a Python number."""
    numbers = [arg for arg in args if isinstance(arg, int | float)]
    nodes = [arg for arg in args if isinstance(arg, fx.Node)]
    return (nodes[0], float(numbers[0])) if len(numbers) == len(nodes) == 1 else None


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


def _reduction(node: fx.Node, position: int) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get("reduction", _MEAN)

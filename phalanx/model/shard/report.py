"""What tensor parallelism does to a model, in numbers and words: what is split how, what is not, and what is sent.

The share of the matrix FLOPs that is split is what Amdahl's law calls the parallel part: with F the FLOPs of the model
and R those of all tp ranks together, (tp - R / F) / (tp - 1). A product that ranks divide between them counts wholly,
one that each of them does whole counts nothing, and one that four ranks do twice counts two thirds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

import phalanx.model.ops.operators  # noqa: F401  (define the operators named below)
from phalanx.model.captured import Captured
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block
from phalanx.model.shard.shard import shard
from phalanx.model.shard.sharded import LocalParameter, Part
from phalanx.model.shard.work import work_of
from phalanx.plan.plan import Plan
from phalanx.program.shape import BlockOp

aten, own = torch.ops.aten, torch.ops.phalanx

# The dims of a product's second argument: what it puts out, what it sums over.
_PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.linear.default: (0, 1), aten.mm.default: (1, 0), aten.matmul.default: (1, 0),
    own.grouped_matmul.default: (2, 1), aten.bmm.default: (2, 1), aten.conv1d.default: (0, 1),
    aten.conv2d.default: (0, 1), aten.conv3d.default: (0, 1), aten.convolution.default: (0, 1),
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


_LAYER = re.compile(r"\.\d+(?=\.)")
_NODES = re.compile(r"^(\w+?)(?:_(?:default|int|tensor|scalar|dtype|self|dim))*(?:_\d+)? needs \w+ whole$")


@dataclass(frozen=True)
class WeightSplit:
    """A parameter. sizes: how long the split dim is on each rank. sections: parts of it that are divided by themselves,
    as in a joint projection. copies: ranks of a split group that have the same part."""

    unit: str
    name: str  # within its block
    how: str  # columns, rows, vocabulary, elements; whole; samples where the unit's degree is 1
    sections: int = 1
    sizes: tuple[int, ...] = ()
    copies: int = 1


@dataclass(frozen=True)
class Collective:
    """Redistributions of one kind in one direction, for one micro-batch. bytes: of one whole tensor."""

    unit: str
    direction: str  # forward or backward
    kind: str
    ranks: int
    bytes: int
    count: int = 1


@dataclass(frozen=True)
class BlockReport:
    """All blocks that are split alike. attention: per attention, heads and key/value heads of each rank."""

    names: tuple[str, ...]
    weights: tuple[WeightSplit, ...]
    attention: tuple[tuple[tuple[int, int], ...], ...]
    collectives: tuple[Collective, ...]  # of one of them
    flops: int  # of all of them, unsplit
    share: float  # of them that is split


@dataclass(frozen=True)
class Report:
    blocks: tuple[BlockReport, ...]
    parameters: int  # of the model
    parameters_per_rank: tuple[int, ...]
    flops: int  # of the model, forward, one micro-batch
    flops_per_rank: tuple[int, ...]
    share: float
    whole: tuple[tuple[str, str, int], ...]  # weights whose products several ranks do alike: why, in how many layers


def report(captured: Captured, plan: Plan, dtype: torch.dtype, dims: Mapping[str, int]) -> Report:
    """Splits the model for every rank of a tensor-parallel group and counts what each of them does."""
    assert plan.tp > 1 and dims["batch"] % plan.multiple == 0
    return _Reporter(captured, plan, dtype, dims).report()


def split_share(flops: float, of_all_ranks: float, tp: int) -> float:
    """The share of `flops` that ranks divide between them, if together they do `of_all_ranks`; of nothing, all."""
    return (tp - of_all_ranks / flops) / (tp - 1) if flops else 1.0


class _Reporter:
    def __init__(self, captured: Captured, plan: Plan, dtype: torch.dtype, dims: Mapping[str, int]) -> None:
        self._captured, self._blocks, self._tp, self._dims = captured, captured.blocks.blocks, plan.tp, dims
        self._ranks = [shard(captured, plan, index, dtype) for index in range(plan.tp)]
        self._work = [work_of(captured, rank, plan.tp, dtype, dims) for rank in self._ranks]
        self._units: dict[str, tuple[str, ...]] = {}  # per template, of each placeholder
        self._graphs: dict[str, fx.Graph] = {}  # of segments, by template

    def report(self) -> Report:
        flops = self._captured.blocks.flops(self._dims)
        per_rank = [sum(block.flops for block in work.blocks) for work in self._work]
        return Report(
            tuple(self._kinds(flops)),
            sum(map(prod, self._captured.shapes.values())),
            tuple(sum(p.local.numel for p in rank.parameters.values()) for rank in self._ranks),
            sum(flops),
            tuple(per_rank),
            split_share(sum(flops), sum(per_rank), self._tp),
            tuple(self._whole()),
        )

    def _kinds(self, flops: Sequence[int]) -> Iterator[BlockReport]:
        found: dict[tuple[object, ...], list[int]] = {}
        for number in range(len(self._blocks)):
            heads = tuple(zip(*[work.blocks[number].attention for work in self._work], strict=True))
            key = (tuple(self._weights(number)), heads, tuple(self._collectives(number)))
            found.setdefault(key, []).append(number)
        for (weights, heads, collectives), numbers in found.items():
            whole = sum(flops[number] for number in numbers)
            done = sum(work.blocks[number].flops for work in self._work for number in numbers)
            names = tuple(self._blocks[number].name for number in numbers)
            share = split_share(whole, done, self._tp)
            yield BlockReport(names, weights, heads, collectives, whole, share)  # pyright: ignore[reportArgumentType]

    def _weights(self, number: int) -> Iterator[WeightSplit]:
        block = self._blocks[number]
        for port, unit in zip(block.ports, self._units_of(block), strict=True):
            if port.kind == "parameter":
                yield self._weight(number, port.name, unit)

    def _weight(self, number: int, name: str, unit: str) -> WeightSplit:
        within = name.removeprefix(f"{self._blocks[number].name}.")
        everywhere = [rank.parameters[name] for rank in self._ranks]
        local, (node, part) = everywhere[0].local, next(self._users(number, name))
        if not local.ranges:
            return WeightSplit(unit, within, "whole")
        if part.degree == 1:
            return WeightSplit(unit, within, "samples")
        sizes = tuple(parameter.local.local_shape[local.dim] for parameter in everywhere)
        copies = self._copies(everywhere[0], part.degree)
        return WeightSplit(unit, within, role_of(node, local.dim), len(local.ranges), sizes, copies)

    def _copies(self, parameter: LocalParameter, degree: int) -> int:
        """How many ranks that split a unit between them have the same part of a parameter of it."""
        return max(len(cell) for cell in parameter.holders) * degree // self._tp if parameter.holders else 1

    def _units_of(self, block: Block) -> tuple[str, ...]:
        """The unit of the first node that uses each placeholder."""
        if block.template not in self._units:
            template = self._captured.blocks.templates[block.template]
            graph = graphs.load(template.text)
            unit = dict(zip(graph.nodes, template.units, strict=True))
            used = [next(iter(node.users), node) for node in graph.nodes if node.op == "placeholder"]
            self._units[block.template] = tuple(unit[node] for node in used)
        return self._units[block.template]

    def _users(self, number: int, name: str) -> Iterator[tuple[fx.Node, Part]]:
        """The placeholders of a parameter in the segments of a block."""
        blocks = self._ranks[0].blocks
        for part in self._ranks[0].parts[number]:
            if part.segment is None:
                continue
            segment = blocks.blocks[part.segment]
            if segment.template not in self._graphs:
                self._graphs[segment.template] = graphs.load(blocks.templates[segment.template].text)
            placeholders = [node for node in self._graphs[segment.template].nodes if node.op == "placeholder"]
            for node, port in zip(placeholders, segment.ports, strict=True):
                if (port.kind, port.name) == ("parameter", name):
                    yield node, part

    def _collectives(self, number: int) -> Iterator[Collective]:
        ops = self._ranks[0].ops[number]
        for direction in ("forward", "backward"):
            found = Counter(self._collective(op, direction) for op in ops if getattr(op, direction))
            # Among ranks that are alone nothing is sent.
            yield from (replace(each, count=count) for each, count in found.items() if each.ranks > 1)

    def _collective(self, op: BlockOp, direction: str) -> Collective:
        ranks, activations = max(len(cell) for cell in op.cells), self._work[0].activations
        source, target = activations[op.reads[0]].nbytes, activations[op.writes[0]].nbytes
        kind = getattr(op, direction)
        # What is gathered or scattered lies in equal parts, perhaps padded.
        size = source if kind == "all_reduce" else ranks * min(source, target)
        return Collective(op.unit, direction, kind, ranks, size)

    def _whole(self) -> Iterator[tuple[str, str, int]]:
        """Products that the rules could not split, that they do not know, and heads that several ranks have."""
        reasons = dict(text.split(": ", 1) for text in self._ranks[0].replicated)
        reasons = {name: _NODES.sub(r"\1 needs it whole", reason) for name, reason in reasons.items()}
        for number, block in enumerate(self._blocks):
            for name in block.names("parameter"):
                if name not in reasons and (reason := self._reason(number, name)):
                    reasons[name] = reason
        found = Counter((_LAYER.sub(".*", name), reason) for name, reason in reasons.items())
        yield from ((name, reason, count) for (name, reason), count in found.items())

    def _reason(self, number: int, name: str) -> str:
        """Why several ranks do the product of a weight alike; empty where they do not."""
        parameter = self._ranks[0].parameters[name]
        for node, part in self._users(number, name):
            product = product_of(node)
            if product is None or part.degree == 1:
                continue
            if not parameter.local.ranges:
                return f"no rule splits {str(product.target).split('.')[1]}"
            if (copies := self._copies(parameter, part.degree)) > 1:
                return f"fewer key/value heads than ranks: {copies} ranks have the same"
        return ""

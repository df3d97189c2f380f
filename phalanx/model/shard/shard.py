"""Splits a captured model between the ranks of a tensor-parallel group: `shard` gives one rank's view of it.

Every block's graph is placed by the rules of its operators and cut into segments and redistributions. All ranks find
the same places, so nobody has to be told; only the ranges differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from phalanx.errors import PlanError
from phalanx.model.captured import Captured
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Blocks, Port, Template
from phalanx.model.shard.localise import Activation, Item, Localiser, Moved, Segment
from phalanx.model.shard.outlines import Dims, Outlines
from phalanx.model.shard.placement import TOKENS, WHOLE
from phalanx.model.shard.rules import RULES, TooFewHeads, unlisted
from phalanx.model.shard.sharded import (
    BACKWARD,
    FORWARD,
    LOCAL_BACKWARD,
    LOCAL_FORWARD,
    LocalParameter,
    Part,
    Redistribution,
    Sharded,
)
from phalanx.model.shard.walk import Choices, Setting, Walk, depends_on, place_all
from phalanx.model.shard.weights import Cut, Use, cut_of, local_parameter
from phalanx.plan.plan import Plan
from phalanx.program.shape import BlockOp


def shard(
    captured: Captured, plan: Plan, tp_index: int, dtype: torch.dtype, whole: Collection[str] = ()
) -> Sharded:  # fmt: skip
    """The model as tensor-parallel rank `tp_index` sees it. whole: parameters that are not to be cut."""
    kept = set(whole)
    while True:
        sharder = _Sharder(captured, plan, tp_index, dtype, kept)
        found = sharder.run()
        if found is not None:
            return found
        kept |= sharder.torn


@dataclass(frozen=True)
class _Placed:
    """One template for one choice of degrees, cut for this rank."""

    walk: Walk
    items: list[Item]
    placeholders: list[fx.Node]


class _Sharder:
    """whole: parameters that are not to be cut, because blocks that share them, or another graph, would cut them
    differently."""

    def __init__(self, captured: Captured, plan: Plan, tp_index: int, dtype: torch.dtype, whole: set[str]) -> None:
        self.captured, self.plan, self.index, self._whole = captured, plan, tp_index, whole
        self.outlines = Outlines(captured, dtype)
        self.torn: set[str] = set()
        self._placed: dict[tuple[object, ...], _Placed] = {}
        self._activation_degrees: dict[str, int] = {}
        self._differentiable = set(captured.trainable)  # parameters and activations to which a gradient flows
        self._segments: list[Block] = []
        self._templates: dict[str, Template] = {}
        self._cuts: dict[str, Cut] = {}
        self._replicated: dict[str, None] = {}

    @property
    def dims(self) -> Dims:
        return self.outlines.dims

    def run(self) -> Sharded | None:
        parts: list[tuple[Part, ...]] = []
        ops: list[tuple[BlockOp, ...]] = []
        layer = 0
        for block, graph in self.outlines.blocks():
            units = self.captured.blocks.units(block)
            degrees = self._degrees(layer, units)
            layer += bool(units)
            placed = self._place(block, graph, degrees)
            assembled = _Assembly(self, block, placed)
            parts.append(tuple(assembled.parts))
            ops.append(tuple(assembled.ops))
            self._note_weights(block, placed)
            self._note_outputs(block, placed)
            self._note_whole(block, placed)
        if self.torn:
            return None
        return Sharded(
            replace(self.captured.blocks, blocks=tuple(self._segments), templates=self._templates),
            tuple(parts), tuple(ops), self._parameters(), tuple(self._replicated),
        )  # fmt: skip

    def add_segment(self, block: Block, template: Template) -> int:
        self._templates.setdefault(block.template, template)
        self._segments.append(block)
        return len(self._segments) - 1

    @cached_property
    def _num_layers(self) -> int:
        return len(self.captured.blocks.layers)

    def _degrees(self, layer: int, units: tuple[str, ...]) -> dict[str, int]:
        if not units:
            return {}
        return dict(zip(units, self.plan.degrees_of(layer, len(units), self._num_layers), strict=True))

    def _place(self, block: Block, graph: fx.Graph, degrees: Mapping[str, int]) -> _Placed:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        incoming = {
            node: self._activation_degrees[port.name]
            for node, port in zip(placeholders, block.ports, strict=True)
            if port.kind == "activation"
        }
        kept = tuple(p.name in self._whole for p in block.ports if p.kind == "parameter")
        flows = {node: port.name in self._differentiable for node, port in zip(placeholders, block.ports, strict=True)}
        key = (graph, *degrees.values(), *incoming.values(), *kept, *flows.values())
        if key not in self._placed:
            walk = self._walk(block, graph, degrees, incoming, placeholders)
            walk.differentiable = depends_on(graph, flows.__getitem__)
            items = Localiser(walk, self.dims, self.plan.tp, self.index).items()
            self._placed[key] = _Placed(walk, items, placeholders)
        return self._placed[key]

    def _walk(
        self,
        block: Block,
        graph: fx.Graph,
        degrees: Mapping[str, int],
        incoming: Mapping[fx.Node, int],
        placeholders: list[fx.Node],
    ) -> Walk:
        def degree(node: fx.Node) -> int:
            return incoming.get(node) or degrees.get(node.meta["unit"], self.plan.tp)

        sequence = self.plan.sequence
        choices = Choices()
        ports = dict(zip(placeholders, block.ports, strict=True))
        for node in graph.nodes:  # products of weights that must stay whole
            if any(s in ports and ports[s].name in self._whole for s in node.all_input_nodes):
                choices.whole[node] = "others that share a weight need it differently"
        activations = {n: TOKENS if sequence and self.dims.has_tokens(n.meta["val"].shape) else WHOLE for n in incoming}
        setting = Setting(degree, sequence, self.dims.has_tokens, self.plan.replicate)
        try:
            return place_all(graph, RULES, unlisted, activations, setting, choices)
        except TooFewHeads as found:
            raise PlanError(
                f"plan: {block.name} attends with {found.heads} heads, which {found.ranks} ranks cannot split",
                f"use tp={found.heads} or less, a smaller degree for that unit (degrees=…), or replicate=yes to do "
                "the attention whole on every rank",
            ) from None

    def _note_outputs(self, block: Block, placed: _Placed) -> None:
        """An activation stays with the degree of the unit that made it, which need not be the block's last."""
        made: Any = placed.walk.graph.output_node().args[0]
        self._activation_degrees |= {
            activation: placed.walk.degree(node) for activation, node in zip(block.outputs, made, strict=True)
        }
        flows = zip(block.outputs, made, strict=True)
        self._differentiable |= {activation for activation, node in flows if placed.walk.differentiable[node]}

    def _note_weights(self, block: Block, placed: _Placed) -> None:
        for node, port in zip(placed.placeholders, block.ports, strict=True):
            if port.kind == "parameter":
                found = cut_of(placed.walk, node, placed.items)
                earlier = self._cuts.get(port.name)
                if earlier is None:
                    self._cuts[port.name] = found
                elif (earlier.dim, earlier.cuts) != (found.dim, found.cuts):
                    self.torn.add(port.name)
                else:
                    self._cuts[port.name] = earlier.and_used(found)

    def _note_whole(self, block: Block, placed: _Placed) -> None:
        ports = zip(placed.placeholders, block.ports, strict=True)
        names = {node: port.name for node, port in ports if port.kind == "parameter"}
        for product, reason in placed.walk.choices.whole.items():
            weight = next((names[s] for s in product.all_input_nodes if s in names), str(product))
            self._replicated.setdefault(f"{weight}: {reason}")

    def _parameters(self) -> dict[str, LocalParameter]:
        found: dict[str, LocalParameter] = {}
        for name, shape in self.captured.shapes.items():
            cut = self._cuts.get(name, Cut(uses=frozenset({Use(self.plan.tp, False, False)})))
            found[name] = local_parameter(shape, cut, self.plan.tp, self.index)
        return found


class _Assembly:
    """One block's ops, with the names of its own activations and parameters."""

    def __init__(self, sharder: _Sharder, block: Block, placed: _Placed) -> None:
        self._sharder, self._block, self._placed = sharder, block, placed
        self._names: dict[Activation, str] = {}
        self._ports = dict(zip(placed.placeholders, block.ports, strict=True))
        self._name_outputs()
        self.parts: list[Part] = []
        self.ops: list[BlockOp] = []
        for item in placed.items:
            if isinstance(item, Segment):
                self._segment(item)
            else:
                self._redistribute(item)

    def _name_outputs(self) -> None:
        """An activation that leaves the block has the name that other blocks know it by."""
        owner = Localiser(self._placed.walk, self._sharder.dims, self._sharder.plan.tp, self._sharder.index)
        output = self._placed.walk.graph.output_node()
        for node, name in zip(output.args[0], self._block.outputs, strict=True):  # pyright: ignore
            self._names[owner.activation(output, node)] = name

    def _name(self, activation: Activation) -> str:
        if activation.node.op == "placeholder" and not activation.moves:
            return self._ports[activation.node].name
        return self._names.setdefault(activation, f"{self._block.name}/{len(self._names)}")

    def _segment(self, segment: Segment) -> None:
        ports = tuple(
            Port("activation", self._name(source)) if isinstance(source, Activation) else self._ports[source]
            for source in segment.sources
        )
        outputs = tuple(self._name(activation) for activation in segment.outputs)
        text = graphs.dump(segment.graph)
        widths = [self._local_shape(source) for source in segment.sources if not isinstance(source, Activation)]
        key = graphs.fingerprint("\n".join([text, *map(str, widths)]))
        units = tuple(segment.unit if node.op == "call_function" else "" for node in segment.graph.nodes)
        name = f"{self._block.name}/{len(self.parts)}"
        number = self._sharder.add_segment(Block(name, key, ports, outputs), Template(text, units, {}))
        self.parts.append(Part(segment=number, degree=segment.degree))
        reads = tuple(port.name for port in ports if port.kind == "activation")
        self.ops.append(BlockOp("segment", reads, outputs, segment.degree, segment.unit, flops=self._flops(segment)))

    def _local_shape(self, source: fx.Node) -> tuple[int, ...]:
        if self._ports[source].kind != "parameter":
            return ()
        walk, tp, index = self._placed.walk, self._sharder.plan.tp, self._sharder.index
        shape = tuple(source.meta["val"].shape)
        return local_parameter(shape, cut_of(walk, source, self._placed.items), tp, index).local.local_shape

    def _flops(self, segment: Segment) -> str:
        """The segment's share of the block's operations, scaled from the sizes of the outlines."""
        template = self._sharder.captured.blocks.templates[self._block.template]
        everything = "+".join(f"({text})" for text in template.flops.values()) or "0"
        blocks = self._sharder.captured.blocks
        total = sum(blocks_flops(blocks, template, self._sharder.dims))
        return f"({everything})*{round(segment.flops / total * 10**9)}/{10**9}" if total else "0"

    def _redistribute(self, moved: Moved) -> None:
        move, dims = moved.move, self._sharder.dims
        value = moved.source.node.meta["val"]
        source, target = self._name(moved.source), self._name(moved.target)
        is_tokens = move.dim == 1 and move.kind in ("reduce_scatter", "all_gather", "unshard", "shard")
        size = dims.name(value.shape[1]) if is_tokens else ""
        redistribution = Redistribution(move.kind, source, target, move.cells, move.dim, size, move.factor)
        self.parts.append(Part(redistribution=redistribution, degree=move.degree))
        differentiable = value.is_floating_point() and self._placed.walk.differentiable[moved.source.node]
        self.ops.append(
            BlockOp(
                "redistribution", (source,), (target,), move.degree, moved.source.node.meta["unit"],
                forward=(FORWARD | LOCAL_FORWARD).get(move.kind, ""),
                backward=(BACKWARD | LOCAL_BACKWARD).get(move.kind, "") if differentiable else "",
                cells=move.cells, elements=self._elements(moved),
            )
        )  # fmt: skip

    def _elements(self, moved: Moved) -> str:
        """Of the whole tensor that a collective moves, as much as its ranks have together."""
        move, dims, tp = moved.move, self._sharder.dims, self._sharder.plan.tp
        shape = moved.source.node.meta["val"].shape
        count = max((len(cell) for cell in move.cells), default=1)
        factors = [dims.name(size) for size in shape]
        if move.kind in ("reduce_scatter", "all_gather", "unshard", "shard") and move.dim == 1:
            factors[1] = f"(({factors[1]}+{count - 1})//{count}*{count})"  # padded to equal parts
        if move.kind == "stack":
            factors.append(str(count))
        larger = max(move.degree, max((cell[-1] - cell[0] + 1 for cell in move.cells), default=1))
        has_samples = any(size % dims.sizes["batch"] == 0 for size in shape)
        divided = f"//{tp // larger}" if has_samples and larger < tp else ""
        return "*".join(factors or ["1"]) + divided


def blocks_flops(blocks: Blocks, template: Template, dims: Dims) -> list[int]:
    from phalanx.expressions import evaluate

    return [evaluate(text, dims.sizes) for text in template.flops.values()]

"""The model as a rank has it that splits no tensors: every block is one segment, or a chain of one for each unit.

A block is cut where the forward of one unit is done again apart from that of the next. What one unit makes and a later
one reads is an activation between them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import fx

from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Blocks, Port, Template
from phalanx.model.shard.sharded import Chained, Part
from phalanx.program.shape import BlockOp


def unsplit(blocks: Blocks, by_unit: Collection[int] = ()) -> Chained:
    """by_unit: the blocks that are cut between their units."""
    keys = dict.fromkeys(blocks.blocks[number].template for number in sorted(by_unit))
    cut = {key: _Cut(blocks.templates[key]) for key in keys}
    chains = [
        cut[block.template].chain(block) if number in by_unit and cut[block.template].pieces else [block]
        for number, block in enumerate(blocks.blocks)
    ]
    templates = blocks.templates | {piece.key: piece.template for each in cut.values() for piece in each.pieces}
    segments = tuple(segment for chain in chains for segment in chain)
    numbers = iter(range(len(segments)))
    return Chained(
        replace(blocks, blocks=segments, templates=templates),
        tuple(tuple(Part(segment=next(numbers)) for _ in chain) for chain in chains),
        tuple(tuple(_op(segment, templates[segment.template]) for segment in chain) for chain in chains),
    )


def _op(segment: Block, template: Template) -> BlockOp:
    unit = next(iter(template.flops), "") if len(template.flops) == 1 else ""
    flops = "+".join(f"({text})" for text in template.flops.values()) or "0"
    return BlockOp("segment", segment.names("activation"), segment.outputs, degree=1, unit=unit, flops=flops)


@dataclass(frozen=True)
class _Piece:
    """One unit of a template. sources: what its placeholders stand for: placeholders of the template, or nodes of
    pieces before it. outputs: nodes that later pieces read, or the template puts out."""

    key: str
    template: Template
    sources: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


class _Cut:
    """A template in pieces, one per unit; none where it has fewer than two units."""

    def __init__(self, template: Template) -> None:
        self._template, self._graph = template, graphs.load(template.text)
        self._units = dict(zip(self._graph.nodes, template.units, strict=True))
        self._order = list(dict.fromkeys(unit for unit in template.units if unit))
        self._helpers = _helpers(self._graph)
        self._home = self._homes()
        (self._outputs,) = self._graph.output_node().args
        self.pieces = [self._piece(i) for i in range(len(self._order))] if len(self._order) > 1 else []

    def chain(self, block: Block) -> list[Block]:
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        ports: dict[fx.Node, Port] = dict(zip(placeholders, block.ports, strict=True))
        activations = zip(self._outputs, block.outputs, strict=True)  # pyright: ignore[reportArgumentType]
        ports |= {node: Port("activation", name) for node, name in activations}
        chain: list[Block] = []
        for i, piece in enumerate(self.pieces):
            for node in piece.outputs:
                ports.setdefault(node, Port("activation", f"{block.name}/{len(ports)}"))
            given, made = (tuple(ports[node] for node in nodes) for nodes in (piece.sources, piece.outputs))
            chain.append(Block(f"{block.name}/{i}", piece.key, given, tuple(port.name for port in made)))
        return chain

    def _homes(self) -> dict[fx.Node, int]:
        """The piece that computes a node: that of its unit, or a later one where it needs something from there. Parts
        of several results stay with them."""
        found: dict[fx.Node, int] = {}
        for node in self._graph.nodes:
            if node.op == "call_function" and node not in self._helpers:
                unit = self._units[node]
                own = self._order.index(unit) if unit and node.target is not operator.getitem else 0
                found[node] = max([own, *(found[source] for source in node.all_input_nodes if source in found)])
        return found

    def _piece(self, number: int) -> _Piece:
        mine = self._computed(number)
        sources = tuple(dict.fromkeys(s for node in mine for s in node.all_input_nodes if s not in mine))
        outputs = tuple(node for node in mine if self._home.get(node) == number and self._leaves(node, number))
        graph = fx.Graph()
        copies = {node: graph.placeholder(f"{_kind(node)}{i}") for i, node in enumerate(sources)}
        for node in mine:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node in outputs))
        text, unit = graphs.dump(graph), self._order[number]
        units = tuple(unit if node.op == "call_function" else "" for node in graph.nodes)
        flops = {unit: self._template.flops.get(unit, "0")}
        return _Piece(graphs.fingerprint(text), Template(text, units, flops), sources, outputs)

    def _computed(self, number: int) -> dict[fx.Node, None]:
        """The nodes of a piece and the helpers that it uses, in order."""
        found = {node for node, home in self._home.items() if home == number}
        for node in reversed(self._graph.nodes):
            if node in self._helpers and any(user in found for user in node.users):
                found.add(node)
        return dict.fromkeys(node for node in self._graph.nodes if node in found)

    def _leaves(self, node: fx.Node, number: int) -> bool:
        return node in self._outputs or any(self._home.get(user, number) != number for user in node.users)  # pyright: ignore


def _kind(source: fx.Node) -> str:
    """The role of a placeholder is its name."""
    return source.name.rstrip("0123456789") if source.op == "placeholder" else "activation"


def _helpers(graph: fx.Graph) -> set[fx.Node]:
    """What depends on no activation and no parameter: sizes and masks, which are computed wherever they are used."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and all(
            source in found or (source.op == "placeholder" and not source.name.startswith(("activation", "parameter")))
            for source in node.all_input_nodes
        ):
            found.add(node)
    return found

"""From a placed graph to what one rank runs: segments, and the redistributions that join them.

Nodes whose ranks compute the same thing and nodes whose ranks compute different things never share a segment; nor do
units of different degrees. Values that depend on no activation and no product are computed in every segment that uses
them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from phalanx.model.graph.graphs import flops
from phalanx.model.shard.canonical import loss_join, loss_part
from phalanx.model.shard.outlines import Dims
from phalanx.model.shard.placement import Placement, Range
from phalanx.model.shard.sharded import Move, Value, moves
from phalanx.model.shard.walk import Walk

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """A value that passes between segments: a node's, after some moves."""

    node: fx.Node
    moves: tuple[Move, ...] = ()


@dataclass
class Segment:
    """A local graph. `sources`: per placeholder the placeholder of the block's graph it stands for, or an
    activation."""

    degree: int
    is_heavy: bool
    unit: str = ""
    nodes: list[fx.Node] = field(default_factory=list)
    graph: fx.Graph = field(default_factory=fx.Graph)
    sources: list[fx.Node | Activation] = field(default_factory=list)
    outputs: list[Activation] = field(default_factory=list)
    flops: float = 0.0  # of one rank, for the sizes of the outlines


@dataclass(frozen=True)
class Moved:
    """A redistribution between two activations of a block."""

    source: Activation
    target: Activation
    move: Move


Item = Segment | Moved


class Localiser:
    """Cuts one placed graph for one inner index of each degree."""

    def __init__(self, walk: Walk, dims: Dims, tp: int, tp_index: int) -> None:
        self.walk, self._dims, self._tp, self._index = walk, dims, tp, tp_index
        self._segments: dict[tuple[int, int, bool], Segment] = {}
        self._level: dict[fx.Node, int] = {}
        self._home: dict[fx.Node, Segment] = {}

    def items(self) -> list[Item]:
        """Segments and redistributions in an order in which they can run."""
        for node in self.walk.graph.nodes:
            if node.op == "call_function" and self._is_computed(node) and self._is_used(node):
                self._assign(node)
        order = [self._segments[key] for key in sorted(self._segments)]
        activations = self._activations_needed(order)
        for segment in order:
            segment.outputs = [Activation(n) for n in segment.nodes if Activation(n) in activations]
        for segment in order:
            _Builder(self, segment).build()
        return self._with_moves(order, activations)

    def inner_index(self, degree: int) -> int:
        return self._index % degree

    # Which segment a node belongs to.

    def _is_computed(self, node: fx.Node) -> bool:
        return self.walk.live[node] and not self.walk.is_weight(node)

    def _is_used(self, node: fx.Node) -> bool:
        """Parts of the loss that stand for nothing, and what only they use, are left out."""
        if node.target is loss_part:
            return _is_heavy(self.walk.places[node])
        users = [user for user in node.users if user.op == "output" or self._reads(user, node)]
        return bool(users)

    def _reads(self, user: fx.Node, source: fx.Node) -> bool:
        return source in self.sources(user)

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """What a node really reads."""
        if node.target is loss_join:
            part, logits, targets = node.args[:3]
            split = self.walk.places[part].kind == "stacked"  # pyright: ignore
            return [source for source in (part if split else logits, targets) if isinstance(source, fx.Node)]
        if node.target is operator.getitem and node in self.walk.rewritten:
            return list(node.args[0].all_input_nodes)  # pyright: ignore
        return node.all_input_nodes

    def _assign(self, node: fx.Node) -> None:
        degree, heavy = self.walk.degree(node), _is_heavy(self.walk.places[node])
        level = 0
        for source in self.sources(node):
            if not self._is_computed(source):
                continue
            known = self._level.get(source, 0)
            same = source in self._home and (self._home[source].degree, self._home[source].is_heavy) == (degree, heavy)
            crosses = not same or self.activation(node, source).moves
            level = max(level, known + (1 if crosses and source in self._level else 0))
        segment = self._segments.setdefault((level, degree, heavy), Segment(degree, heavy))
        segment.nodes.append(node)
        segment.unit = segment.unit or node.meta["unit"]
        share = self._tp_share(node, heavy, degree)
        segment.flops += float(flops(node)) * share if node.target not in (loss_part, loss_join) else 0.0
        self._level[node], self._home[node] = level, segment

    def _tp_share(self, node: fx.Node, heavy: bool, degree: int) -> float:
        return (1 / degree if heavy else 1.0) * degree / self._tp

    # How values reach their users.

    def activation(self, user: fx.Node, source: fx.Node) -> Activation:
        """A source as a user needs it."""
        place = self.walk.places[source]
        if not isinstance(place, Placement):  # several tensors; their parts are what is moved
            return Activation(source)
        wanted = self.walk.wants.get((user, source), place)
        is_output = user.op == "output"
        to = self.walk.degree(source if is_output else user)
        heavy = not is_output and _is_heavy(self.walk.places[user])
        if place.kind == "split" or (place.kind, wanted.kind) == ("partial", "partial"):
            return Activation(source)
        kind = "whole" if wanted.kind == "split" else wanted.kind
        found = moves(self._value(source), place.kind, self.walk.degree(source), kind, to, heavy, self._tp)
        return Activation(source, tuple(found))

    def _value(self, node: fx.Node) -> Value:
        value = node.meta["val"]
        return Value(
            self._dims.has_batch(value.shape),
            self.walk.home(node).kind == "tokens",
            value.is_floating_point() and self.walk.differentiable[node],
        )

    def slice_of(self, user: fx.Node, source: fx.Node) -> Placement | None:
        """How a whole value is cut for a user that takes this rank's part of it."""
        wanted = self.walk.wants.get((user, source))
        return None if wanted is None or wanted.kind != "split" or self._kind(source) == "split" else wanted

    def _kind(self, source: fx.Node) -> str:
        place = self.walk.places[source]
        return place.kind if isinstance(place, Placement) else ""

    def _activations_needed(self, order: Sequence[Segment]) -> dict[Activation, None]:
        """Everything that leaves a segment, with all moves on the way."""
        found: dict[Activation, None] = {}
        for segment in order:
            for node in segment.nodes:
                for source in filter(self._is_computed, self.sources(node)):
                    activation = self.activation(node, source)
                    if activation.moves or self._home.get(source) is not segment:
                        self._note(activation, found)
        output = self.walk.graph.output_node()
        for source in output.all_input_nodes:
            self._note(self.activation(output, source), found)
        return found

    def _note(self, activation: Activation, found: dict[Activation, None]) -> None:
        for length in range(len(activation.moves) + 1):
            found.setdefault(Activation(activation.node, activation.moves[:length]))

    def _with_moves(self, order: Sequence[Segment], activations: dict[Activation, None]) -> list[Item]:
        """Each redistribution directly after what gives its source."""
        incoming = [activation for activation in activations if activation.node.op == "placeholder"]
        items: list[Item] = [*self._moves_of(incoming)]
        for segment in order:
            made = set(segment.nodes)
            items.append(segment)
            items += self._moves_of([activation for activation in activations if activation.node in made])
        return items

    def _moves_of(self, activations: Sequence[Activation]) -> list[Moved]:
        return [Moved(Activation(w.node, w.moves[:-1]), w, w.moves[-1]) for w in activations if w.moves]


class _Builder:
    """Builds the graph of one segment on one rank."""

    def __init__(self, owner: Localiser, segment: Segment) -> None:
        self._owner, self._segment, self._graph = owner, segment, segment.graph
        self._copies: dict[Any, fx.Node] = {}
        self._user: fx.Node | None = None
        self._mine = set(segment.nodes)

    def build(self) -> None:
        rank = self._owner.inner_index(self._segment.degree)
        for node in self._segment.nodes:
            self._user = node
            rewritten = self._owner.walk.rewritten.get(node)
            self._copies[node] = rewritten(self, rank) if rewritten is not None else self._copy(node)
        self._graph.output(tuple(self._copies[activation.node] for activation in self._segment.outputs))
        fuse_bias(self._graph)
        self._graph.eliminate_dead_code()
        self._drop_unused()

    # What rewritten nodes call.

    def call(self, target: Any, *args: Any) -> fx.Node:
        return self._graph.call_function(target, args)

    def of(self, value: Any) -> Any:
        """An argument of the original node, as it is in this graph."""
        return map_arg(value, self._argument)

    def _copy(self, node: fx.Node) -> fx.Node:
        return self._graph.create_node(node.op, node.target, self.of(node.args), self.of(node.kwargs))

    def _argument(self, source: fx.Node) -> fx.Node:
        user = self._user
        assert user is not None
        found = self._found(user, source)
        wanted = self._owner.slice_of(user, source)
        if wanted is None:
            return found
        ranges = wanted.cuts[self._owner.inner_index(self._segment.degree)]
        if wanted.outer == 1:
            return self._sliced(found, wanted.dim, ranges)
        size = source.meta["val"].shape[wanted.dim] // wanted.outer
        apart = self.call(aten.unflatten.int, found, wanted.dim, [-1, size])
        part = self._sliced(apart, wanted.dim + 1, ranges)
        return self.call(aten.flatten.using_ints, part, wanted.dim, wanted.dim + 1)

    def _sliced(self, value: fx.Node, dim: int, ranges: tuple[Range, ...]) -> fx.Node:
        pieces = [self.call(aten.slice.Tensor, value, dim, start, stop) for start, stop in ranges]
        return pieces[0] if len(pieces) == 1 else self.call(aten.cat.default, pieces, dim)

    def _found(self, user: fx.Node, source: fx.Node) -> fx.Node:
        walk = self._owner.walk
        if not walk.live[source] or walk.is_weight(source):
            return self._helper(source)
        activation = self._owner.activation(user, source)
        if source in self._mine and not activation.moves:
            return self._copies[source]
        return self._placeholder(activation, "activation")

    def _helper(self, source: fx.Node) -> fx.Node:
        """What is computed wherever it is used."""
        if source.op == "placeholder":
            return self._placeholder(source, source.name.rstrip("0123456789"))
        if source not in self._copies:
            args, kwargs = map_arg(source.args, self._helper), map_arg(source.kwargs, self._helper)
            self._copies[source] = self._graph.create_node(source.op, source.target, args, kwargs)
        return self._copies[source]

    def _placeholder(self, key: fx.Node | Activation, kind: str) -> fx.Node:
        if key not in self._copies:
            with _at_start(self._graph):
                self._copies[key] = self._graph.placeholder(f"{kind}{len(self._segment.sources)}")
            self._segment.sources.append(key)
        return self._copies[key]

    def _drop_unused(self) -> None:
        placeholders = [node for node in self._graph.nodes if node.op == "placeholder"]
        by_node = {copy: key for key, copy in self._copies.items()}
        kept = [node for node in placeholders if node.users]
        for node in placeholders:
            if not node.users:
                self._graph.erase_node(node)
        self._segment.sources = [by_node[node] for node in kept]
        for position, node in enumerate(kept):
            node.name = node.target = f"{node.name.rstrip('0123456789')}{position}"  # pyright: ignore


def _at_start(graph: fx.Graph) -> Any:
    """New placeholders follow those that are there."""
    last = None
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        last = node
    return graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes), None))


def fuse_bias(graph: fx.Graph) -> None:
    """A bias that is added to a product in the same segment is added by the product."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        product, bias = node.args
        if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or len(product.users) != 1:
            continue
        if bias.op != "placeholder" or not bias.name.startswith("parameter") or product.kwargs:
            continue
        with graph.inserting_before(node):
            if product.target is aten.linear.default and len(product.args) == 2:
                fused = graph.call_function(aten.linear.default, (*product.args, bias))
            elif product.target is aten.matmul.default and _is_parameter(product.args[1]):
                turned = graph.call_function(aten.t.default, (product.args[1],))
                fused = graph.call_function(aten.linear.default, (product.args[0], turned, bias))
            else:
                continue
        node.replace_all_uses_with(fused)
        graph.erase_node(node)
        graph.erase_node(product)


def _is_parameter(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.name.startswith("parameter")


def _is_heavy(place: Any) -> bool:
    return place.is_heavy if isinstance(place, Placement) else any(_is_heavy(part) for part in place)

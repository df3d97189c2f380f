"""A flat graph cut into blocks: the embedding, each layer, what lies between stacks, and the head with the loss.

Values that depend on no parameter (positions, rotary tables, masks) are computed once per micro-batch by the
*prologue*, on whichever rank needs them, instead of crossing cuts; what does cross are *activations*, and each gets its
gradient. Blocks that compute the same function share one *template*; a block is a template plus where its placeholders
get their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from phalanx.errors import CaptureError
from phalanx.expressions import evaluate
from phalanx.model.graph import graphs
from phalanx.model.graph.functionalise import FlatGraph, where
from phalanx.model.graph.graphs import flops
from phalanx.model.graph.units import LayerList, layer_of, unit_of


@dataclass(frozen=True)
class Port:
    """Where a placeholder gets its value.

    A parameter, input, buffer or constant is read by its name; an activation comes from another block, a value from the
    prologue; a size is an expression over the dynamic dims; dropout is the keys of a site.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Template:
    """A graph shared by blocks whose parameters have the same shapes: its text, the unit of each of its nodes, and the
    forward FLOPs of each unit."""

    text: str
    units: tuple[str, ...]
    flops: dict[str, str]


@dataclass(frozen=True)
class Block:
    """The smallest part that a pipeline cut never splits."""

    name: str
    template: str
    ports: tuple[Port, ...]
    outputs: tuple[str, ...]  # activations

    def names(self, kind: str) -> tuple[str, ...]:
        return tuple(port.name for port in self.ports if port.kind == kind)


@dataclass(frozen=True)
class Blocks:
    """A whole model as data: blocks in order of execution, their templates, and the prologue they draw values from."""

    blocks: tuple[Block, ...]
    templates: dict[str, Template]
    prologue: str
    prologue_ports: tuple[Port, ...]
    values: tuple[str, ...]  # names of the prologue's outputs
    loss: str  # activations
    count: str  # value
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def crossing(self, cut: int) -> tuple[str, ...]:
        """The activations alive between block `cut` - 1 and block `cut`."""
        made = [activation for block in self.blocks[:cut] for activation in block.outputs]
        used = {activation for block in self.blocks[cut:] for activation in block.names("activation")}
        return tuple(activation for activation in made if activation in used)

    def flops(self, dims: Mapping[str, int]) -> list[int]:
        """Forward floating-point operations of each block."""
        return [
            sum(evaluate(text, dims) for text in self.templates[block.template].flops.values()) for block in self.blocks
        ]

    def parameters(self) -> tuple[str, ...]:
        """Every parameter some block uses, in order of first use."""
        return tuple(dict.fromkeys(name for block in self.blocks for name in block.names("parameter")))


@dataclass
class _Run:
    """Consecutive nodes of one block."""

    name: str
    nodes: list[fx.Node]


def cut(flat: FlatGraph, layers: Sequence[LayerList]) -> Blocks:
    """Cuts a flat graph at every layer of `layers`."""
    return _Cutter(flat, layers).cut()


class _Cutter:
    def __init__(self, flat: FlatGraph, layers: Sequence[LayerList]) -> None:
        self.flat, self.layers = flat, layers
        self.dependent = _parameter_dependent(flat)
        self.runs = _split_into_runs(flat, layers, self.dependent)
        self.home = {node: run for run in self.runs for node in run.nodes}
        self.value_names: dict[fx.Node, str] = {}
        self.templates: dict[str, Template] = {}
        self.activations: dict[fx.Node, str] = {}

    def cut(self) -> Blocks:
        assert self.flat.loss is not None and self.flat.count is not None
        if not self.dependent[self.flat.loss]:
            raise CaptureError(
                "the loss depends on no parameter, so there is nothing to train",
                "return the loss of what the model computed",
            )
        self._name_activations()
        blocks = tuple(self._block(run) for run in self.runs)
        count = self._value(self.flat.count)
        prologue, ports = self._prologue()
        return Blocks(
            blocks, self.templates, graphs.dump(prologue), ports, tuple(self.value_names.values()),
            loss=self.activations[self.flat.loss], count=count, constants=self.flat.constants,
        )  # fmt: skip

    def _name_activations(self) -> None:
        for run in self.runs:
            crossing = [
                node
                for node in run.nodes
                if node is self.flat.loss or any(self.home.get(user, run) is not run for user in node.users)
            ]
            for index, node in enumerate(crossing):
                if not isinstance(node.meta.get("val"), torch.Tensor) and node is not self.flat.loss:
                    raise CaptureError(f"what leaves block '{run.name}' is not a tensor ({where(node)})")
                self.activations[node] = f"{run.name}:{index}"

    def _inside_layer(self, node: fx.Node) -> bool:
        return layer_of(node.meta.get("path", ""), self.layers) is not None

    def _value(self, node: fx.Node) -> str:
        """The name of a value the prologue provides."""
        return self.value_names.setdefault(node, f"value{len(self.value_names)}")

    def _port(self, node: fx.Node) -> Port:
        if node in self.flat.roles:
            return Port(*self.flat.roles[node])
        if node in self.activations:
            return Port("activation", self.activations[node])
        return Port("value", self._value(node))

    def _block(self, run: _Run) -> Block:
        mine = self._with_local_helpers(run)
        graph, ports, copies = fx.Graph(), [], {}
        for node in mine:
            for source in node.all_input_nodes:
                if source not in copies:
                    port = self._port(source)
                    copies[source] = graph.placeholder(f"{port.kind}{len(ports)}")
                    ports.append(port)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        outputs = [node for node in run.nodes if node in self.activations]
        graph.output(tuple(copies[node] for node in outputs))
        _placeholders_first(graph)
        text = graphs.dump(graph)
        widths = [str(tuple(n.meta["val"].shape)) for n in copies if self.flat.roles.get(n, ("", ""))[0] == "parameter"]
        key = graphs.fingerprint("\n".join([text, *widths]))
        if key not in self.templates:
            self.templates[key] = self._template(text, graph, {copy: node for node, copy in copies.items()})
        return Block(run.name, key, tuple(ports), tuple(self.activations[node] for node in outputs))

    def _with_local_helpers(self, run: _Run) -> list[fx.Node]:
        """The run's nodes and, copied in, the parameter-free nodes inside layers that they use."""
        needed: set[fx.Node] = set(run.nodes)
        stack = list(run.nodes)
        while stack:
            for source in stack.pop().all_input_nodes:
                local = source.op == "call_function" and not self.dependent[source] and self._inside_layer(source)
                if local and source not in needed:
                    needed.add(source)
                    stack.append(source)
        return [node for node in self.flat.graph.nodes if node in needed]

    def _template(self, text: str, graph: fx.Graph, originals: dict[fx.Node, fx.Node]) -> Template:
        units: list[str] = []
        totals: dict[str, Any] = {}
        owners = unit_of([originals[n] for n in graph.nodes if n.op == "call_function"], self.layers)
        for node in graph.nodes:
            unit = owners.get(originals.get(node), "") if node.op == "call_function" else ""  # pyright: ignore
            units.append(unit)
            if node.op == "call_function":
                totals[unit] = totals.get(unit, 0) + flops(originals[node])
        return Template(text, tuple(units), {unit: self._expression(total) for unit, total in totals.items()})

    def _expression(self, total: Any) -> str:
        names = {s: self.flat.symbols[str(s)] for s in getattr(total, "free_symbols", ())}
        return str(total.subs(names)) if names else str(total)

    def _prologue(self) -> tuple[fx.Graph, tuple[Port, ...]]:
        """The graph that computes every value blocks asked for from inputs, buffers and sizes."""
        needed: set[fx.Node] = set(self.value_names)
        stack = list(needed)
        while stack:
            for source in stack.pop().all_input_nodes:
                if source not in needed:
                    needed.add(source)
                    stack.append(source)
        graph, ports, copies = fx.Graph(), [], {}
        for node in self.flat.graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                kind, name = self.flat.roles[node]
                assert kind != "parameter", "the prologue depends on no parameter"
                copies[node] = graph.placeholder(f"{kind}{len(ports)}")
                ports.append(Port(kind, name))
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[node] for node in self.value_names))
        return graph, tuple(ports)


def _placeholders_first(graph: fx.Graph) -> None:
    first = next(iter(graph.nodes))
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        if node is not first:
            first.append(node)
        first = node


def _parameter_dependent(flat: FlatGraph) -> dict[fx.Node, bool]:
    dependent: dict[fx.Node, bool] = {}
    for node in flat.graph.nodes:
        is_parameter = flat.roles.get(node, ("", ""))[0] == "parameter"
        dependent[node] = is_parameter or any(dependent[source] for source in node.all_input_nodes)
    return dependent


def _split_into_runs(flat: FlatGraph, layers: Sequence[LayerList], dependent: dict[fx.Node, bool]) -> list[_Run]:
    """Consecutive parameter-dependent nodes by layer. Glue between two layers of a list joins the earlier one."""
    nodes = [n for n in flat.graph.nodes if n.op == "call_function" and dependent[n]]
    places = [layer_of(node.meta.get("path", ""), layers) for node in nodes]
    last = {place[0]: i for i, place in enumerate(places) if place is not None}
    groups: list[tuple[tuple[str, int] | None, list[fx.Node]]] = []
    for i, (node, place) in enumerate(zip(nodes, places, strict=True)):
        current = groups[-1][0] if groups else None
        if place is None and current is not None and i < last[current[0]]:
            place = current
        if not groups or groups[-1][0] != place:
            groups.append((place, []))
        groups[-1][1].append(node)
    return _name_runs(groups)


def _name_runs(groups: list[tuple[tuple[str, int] | None, list[fx.Node]]]) -> list[_Run]:
    runs: list[_Run] = []
    seen: dict[str, int] = {}
    for i, (place, nodes) in enumerate(groups):
        if place is not None:
            name = f"{place[0]}.{place[1]}"
        else:
            name = "head" if i == len(groups) - 1 else "embedding" if i == 0 else "bridge"
        seen[name] = seen.get(name, 0) + 1
        runs.append(_Run(name if seen[name] == 1 else f"{name}#{seen[name]}", nodes))
    return runs

"""Segments as functions: what is run, recomputed and compiled.

    F(params, inputs)          → outputs, saved; or either of the two alone
    B(params, saved, d_outputs)→ d_inputs, w_saved
    W(params, w_saved)         → d_params
    BW(params, saved, d_outputs) = B and W in one

All are cut out of one joint graph, each when it is first used. `saved` never holds a parameter or anything computed
from parameters alone: those are handed in again or recomputed, so parameters may be freed in between and memory is
known exactly. Which other values are kept is the policy's choice; whatever is not kept is recomputed from what is. W is
really separate: no operator that only a weight gradient needs runs in B. Weight gradients that will be added up are
given as the factors of a product where they are one (`products.py`).

The footprint of a segment is the memory that its functions need while they run, from the graph: as an interpreter runs
it, each operator by itself, a value living until nothing needs it any more. Compiled functions fuse operators and need
less; what kernels need inside is not counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from phalanx.model.segment import policies
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.joint import Joint, closure, trace
from phalanx.model.segment.products import Forms, Gradient

Saved = tuple[Tensor, ...]


@dataclass(frozen=True)
class Cut:
    """A function cut out of the joint graph, and which inputs or earlier results each argument is."""

    function: Callable[..., Any]
    arguments: tuple[fx.Node, ...]

    def __call__(self, values: dict[fx.Node, Tensor]) -> Any:
        return self.function(*[values[node] for node in self.arguments])


class Segment:
    """The functions of one template for one set of shapes. Arguments come in port order. products: weight gradients
    that are products are not multiplied."""

    def __init__(
        self,
        joint: Joint,
        is_parameter: Sequence[bool],
        saved: set[fx.Node],
        compiler: Compiler,
        products: bool = False,
    ) -> None:
        self._joint, self._products = joint, products
        self._parameters = tuple(n for n, p in zip(joint.inputs, is_parameter, strict=True) if p)
        free = policies.parameter_only(joint, self._parameters)
        self._d_inputs = [g for g, p in zip(joint.gradients, is_parameter, strict=True) if not p]
        self._d_params = [g for g, p in zip(joint.gradients, is_parameter, strict=True) if p]
        parts = _Partition(joint, set(self._parameters), free, saved, self._d_inputs, self._d_params)
        self._saved, self._w_saved = parts.saved, parts.w_saved
        inputs = set(joint.inputs)
        self._computed = [n for n in parts.saved if n not in inputs]
        self._w_computed = [n for n in parts.w_saved if n not in set(parts.saved)]
        self._given = [*self._parameters, *parts.saved, *joint.tangents]
        self._num_outputs, self._num_d_inputs = len(joint.outputs), len(self._d_inputs)
        self._compiler = compiler

    @cached_property
    def _forward(self) -> Cut:
        return self._cut([*self._joint.outputs, *self._computed], self._joint.inputs)

    @cached_property
    def _run(self) -> Cut:
        return self._cut(self._joint.outputs, self._joint.inputs) if self._computed else self._forward

    @cached_property
    def _again(self) -> Cut:
        return self._cut(self._computed, self._joint.inputs)

    @cached_property
    def _backward(self) -> Cut:
        return self._cut([*self._d_inputs, *self._w_computed], self._given)

    @cached_property
    def _weight(self) -> Cut:
        return self._cut(self._w_forms.nodes, [*self._parameters, *self._w_saved])

    @cached_property
    def _fused(self) -> Cut:
        return self._cut([*self._d_inputs, *self._forms.nodes], self._given)

    @cached_property
    def _w_forms(self) -> Forms:
        return Forms(self._d_params, {*self._parameters, *self._w_saved}, self._products)

    @cached_property
    def _forms(self) -> Forms:
        return Forms(self._d_params, set(self._given), self._products)

    def _cut(self, outputs: Sequence[fx.Node | None], sources: Sequence[fx.Node]) -> Cut:
        with torch.no_grad():
            return _cut(self._joint.graph, outputs, sources, self._compiler)

    @property
    def differentiable(self) -> tuple[bool, ...]:
        """Per output, whether a gradient for it is taken back."""
        return self._joint.differentiable

    @property
    def outputs(self) -> tuple[fx.Node, ...]:
        return self._joint.outputs

    @property
    def keeps_only_inputs(self) -> bool:
        return not self._computed

    @property
    def saved_nodes(self) -> tuple[fx.Node, ...]:
        return self._saved

    def footprint(self) -> Footprint:
        """Gradients of outputs are part of what a backward needs: nobody else counts them."""
        graph, d_outputs = self._joint.graph, total_bytes(self._joint.tangents)

        def peak(outputs: Sequence[fx.Node | None], sources: Sequence[fx.Node], kept: Sequence[fx.Node] = ()) -> int:
            return peak_bytes(graph, outputs, sources) - total_bytes(kept, besides=sources)

        return Footprint(
            forward=peak([*self._joint.outputs, *self._computed], self._joint.inputs, self._computed),
            backward=d_outputs + peak([*self._d_inputs, *self._w_computed], self._given),
            weight=peak(self._w_forms.nodes, [*self._parameters, *self._w_saved]),
            together=d_outputs + peak([*self._d_inputs, *self._forms.nodes], self._given),
        )

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        values = dict(zip(self._joint.inputs, tensors, strict=True))
        results = self._forward(values)
        values.update(zip(self._computed, results[self._num_outputs :], strict=True))
        return list(results[: self._num_outputs]), tuple(values[node] for node in self._saved)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs alone, where no backward comes or the forward is done again before it."""
        return list(self._run(dict(zip(self._joint.inputs, tensors, strict=True))))

    def again(self, tensors: Sequence[Tensor], outputs: bool) -> tuple[list[Tensor] | None, Saved]:
        """A forward done again for its backward; without `outputs`, nothing is computed that only they need."""
        if outputs:
            return self.forward(tensors)
        values = dict(zip(self._joint.inputs, tensors, strict=True))
        values.update(zip(self._computed, self._again(values), strict=True))
        return None, tuple(values[node] for node in self._saved)

    def backward(
        self, parameters: Sequence[Tensor], saved: Saved, d_outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Saved]:
        values = self._values(parameters, saved, d_outputs)
        results = self._backward(values)
        values.update(zip(self._w_computed, results[self._num_d_inputs :], strict=True))
        return list(results[: self._num_d_inputs]), tuple(values[node] for node in self._w_saved)

    def weight(self, parameters: Sequence[Tensor], w_saved: Saved) -> list[Gradient]:
        values = dict(zip(self._parameters, parameters, strict=True))
        values.update(zip(self._w_saved, w_saved, strict=True))
        values.update(zip(self._w_forms.nodes, self._weight(values), strict=True))
        return self._w_forms.of(values)

    def backward_weight(
        self, parameters: Sequence[Tensor], saved: Saved, d_outputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], list[Gradient]]:
        values = self._values(parameters, saved, d_outputs)
        results = self._fused(values)
        values.update(zip(self._forms.nodes, results[self._num_d_inputs :], strict=True))
        return list(results[: self._num_d_inputs]), self._forms.of(values)

    def _values(self, parameters: Sequence[Tensor], saved: Saved, d_outputs: Sequence[Tensor]) -> dict[fx.Node, Tensor]:
        values = dict(zip(self._parameters, parameters, strict=True))
        values.update(zip(self._saved, saved, strict=True))
        values.update(zip(self._joint.tangents, d_outputs, strict=True))
        return values


class _Partition:
    """Which nodes are saved for the backward and, of those and what B computes, which W needs."""

    def __init__(
        self,
        joint: Joint,
        parameters: set[fx.Node],
        free: set[fx.Node],
        chosen: set[fx.Node],
        d_inputs: Sequence[fx.Node | None],
        d_params: Sequence[fx.Node | None],
    ) -> None:
        order = {node: i for i, node in enumerate(joint.graph.nodes)}
        stop = (chosen - free - parameters) | set(joint.tangents)
        everything = [g for g in (*d_inputs, *d_params) if g is not None]
        reached = closure(everything, stop)
        leaves = (reached & stop) | (reached & set(joint.inputs))
        self.saved = tuple(sorted(leaves - parameters - set(joint.tangents), key=order.__getitem__))
        in_b = closure([g for g in d_inputs if g is not None], set(self.saved) | set(joint.tangents))
        computed = {part for node in in_b for part in _tensors_of(node)}
        available = (computed | set(self.saved) | set(joint.tangents)) - free - parameters
        in_w = closure([g for g in d_params if g is not None], available)
        self.w_saved = tuple(sorted(in_w & available, key=order.__getitem__))


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """The node itself or, where it gives several tensors, each of them: keeping the node would keep them all alive."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]


def _cut(graph: fx.Graph, outputs: Sequence[fx.Node | None], sources: Sequence[fx.Node], compiler: Compiler) -> Cut:
    """The part of `graph` that computes `outputs` from `sources`, as a function of those sources it really uses."""
    wanted = [node for node in outputs if node is not None]
    needed = closure(wanted, set(sources))
    arguments = tuple(node for node in sources if node in needed)
    part, copies = fx.Graph(), {}
    for node in arguments:
        copies[node] = part.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in graph.nodes:
        if node in needed and node not in copies:
            assert node.op != "placeholder", f"{node} is needed but not given"
            copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(tuple(None if node is None else copies[node] for node in outputs))
    return Cut(compiler(part), arguments)


def build(
    graph: fx.Graph,
    arguments: Sequence[Any],
    is_parameter: Sequence[bool],
    wants_gradient: Sequence[bool],
    *,
    recompute: bool,
    compiler: Compiler,
    products: bool = False,
) -> Segment:
    """Traces a template for these arguments. Flags are per tensor argument. products: see `Segment`."""
    joint = trace(graph, arguments, wants_gradient, is_parameter, compiler.decompositions)
    if recompute:
        saved: set[fx.Node] = set()
    elif compiler.fuses:
        saved = policies.min_cut(joint)
    else:
        saved = policies.used_by_backward(joint)
    return Segment(joint, is_parameter, saved, compiler, products)


@dataclass(frozen=True)
class Footprint:
    """Bytes at most beyond what was there before and what is kept afterwards: of F, B, W, and B with W."""

    forward: int
    backward: int
    weight: int
    together: int


def peak_bytes(graph: fx.Graph, outputs: Iterable[fx.Node | None], sources: Sequence[fx.Node]) -> int:
    """At the most, while `outputs` are computed from `sources`, which do not count; views cost nothing."""
    given = set(sources)
    wanted = [node for node in outputs if node is not None]
    needed = closure(wanted, given)
    order = [node for node in graph.nodes if node in needed and node not in given]
    held = {storage for node in sources for storage, _ in _storages(node)}
    last = {storage: place for place, node in enumerate(order) for used in (node, *node.all_input_nodes)
            for storage, _ in _storages(used)}  # fmt: skip
    last.update({storage: len(order) for node in wanted for storage, _ in _storages(node)})
    alive: dict[int, int] = {}
    peak = 0
    for place, node in enumerate(order):
        alive.update({storage: size for storage, size in _storages(node) if storage not in held})
        peak = max(peak, sum(alive.values()))
        alive = {storage: size for storage, size in alive.items() if last[storage] > place}
    return peak


def total_bytes(nodes: Iterable[fx.Node], besides: Iterable[fx.Node] = ()) -> int:
    """Of what these hold, each storage once, without what others hold."""
    own = {storage: size for node in nodes for storage, size in _storages(node)}
    return sum(own.values()) - sum(own.pop(storage, 0) for node in besides for storage, _ in _storages(node))


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    """Which it holds, and how many bytes each has."""
    tensors = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return [(tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()) for tensor in tensors]

"""Segments as functions: what is run, recomputed and compiled.

    F(params, inputs)          → outputs, saved; or either of the two alone
    B(params, saved, d_outputs)→ d_inputs, w_saved
    W(params, w_saved)         → d_params
    BW(params, saved, d_outputs) = B and W in one

All are cut out of one joint graph, each when it is first used. What is saved never holds a parameter or anything
computed from parameters alone: those are handed in again or recomputed, so parameters may be freed in between and
memory is known exactly. Nor does it hold what the segment was given or has put out: B and W are handed that again.
Which other values are kept is the policy's choice; whatever is not kept is recomputed from what is. W is really
separate: no operator that only a weight gradient needs runs in B. Weight gradients that will be added up are given as
the factors of a product where they are one (`products.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from phalanx.model.segment import policies
from phalanx.model.segment.compile import Compiler
from phalanx.model.segment.joint import Joint, base, closure, tensors_of, trace
from phalanx.model.segment.products import Forms, Gradient

aten = torch.ops.aten

Source = tuple[str, int]
"""Where an argument comes from: the number of a tensor `port`, of an `output`, of the `gradient` of an output, or a
place in what was left behind: in `saved_b` by F for B alone, in `saved_bw` by F for W too, in `saved_w` by B."""


@dataclass(frozen=True)
class Call:
    """A function cut out of the joint graph, and where its arguments come from."""

    function: Callable[..., Any]
    arguments: tuple[Source, ...]
    results: tuple[Tensor | None, ...]  # what they look like, without contents


@dataclass(frozen=True)
class WeightCall(Call):
    """One that gives weight gradients, after other results. The factors of products may be arguments that
    the function itself does not take: those after its own `num_taken`."""

    num_taken: int
    gradients: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Gradient]]  # from arguments and results


class Segment:
    """The functions of one template for one set of shapes. Tensor arguments are ports, in order. products: weight
    gradients that are products are not multiplied.

    saved_b, saved_bw, saved_w: what is left behind by F and by B, without what was given or put out. F gives outputs,
    saved_b and saved_bw; B gives the gradients of the ports `gives`, and saved_w.
    """

    def __init__(
        self,
        joint: Joint,
        is_parameter: Sequence[bool],
        saved: set[fx.Node],
        compiler: Compiler,
        products: bool = False,
    ) -> None:
        self.joint, self._products, self._compiler = joint, products, compiler
        self.parameters = tuple(n for n, p in zip(joint.inputs, is_parameter, strict=True) if p)
        free = policies.parameter_only(joint, self.parameters)
        self.gives = tuple(
            i for i, (g, p) in enumerate(zip(joint.gradients, is_parameter, strict=True)) if g is not None and not p
        )
        self._d_inputs = [joint.gradients[i] for i in self.gives]
        self._d_params = [g for g, p in zip(joint.gradients, is_parameter, strict=True) if p]
        parts = _Partition(joint, set(self.parameters), free, saved, self._d_inputs, self._d_params)
        given = {*joint.inputs, *joint.outputs}
        late = set(parts.w_saved)
        self.saved, self.w_saved = parts.saved, parts.w_saved
        self.saved_b = tuple(n for n in parts.saved if n not in given and n not in late)
        self.saved_bw = tuple(n for n in parts.saved if n not in given and n in late)
        self.saved_w = tuple(n for n in parts.w_saved if n not in {*parts.saved, *given, *joint.tangents})
        self._sources = self._find_sources()
        self._looks: dict[Source, Tensor] | None = None

    def _find_sources(self) -> dict[fx.Node, Source]:
        taken = (i for i, needed in enumerate(self.joint.differentiable) if needed)
        found: dict[fx.Node, Source] = {node: ("gradient", i) for node, i in zip(self.joint.tangents, taken)}
        for kind in ("saved_w", "saved_bw", "saved_b"):
            found |= {node: (kind, place) for place, node in enumerate(getattr(self, kind))}
        found |= {node: ("output", i) for i, node in enumerate(self.joint.outputs)}
        return found | {node: ("port", i) for i, node in enumerate(self.joint.inputs)}

    @cached_property
    def forward(self) -> Call:
        return self._cut([*self.joint.outputs, *self.saved_b, *self.saved_bw], self.joint.inputs)

    @cached_property
    def run(self) -> Call:
        """The outputs alone, where no backward comes or the forward is done again before it."""
        return self._cut(self.joint.outputs, self.joint.inputs)

    @cached_property
    def again(self) -> Call:
        """What a backward needs alone, where nobody reads the outputs of a forward done again."""
        return self._cut([*self.saved_b, *self.saved_bw], self.joint.inputs)

    @cached_property
    def backward(self) -> Call:
        return self._cut([*self._d_inputs, *self.saved_w], self._given)

    @cached_property
    def weight(self) -> WeightCall:
        return self._weight_cut([], [*self.parameters, *self.w_saved])

    @cached_property
    def backward_weight(self) -> WeightCall:
        return self._weight_cut(self._d_inputs, self._given)

    @property
    def _given(self) -> list[fx.Node]:
        """To a backward."""
        return [*self.parameters, *self.saved, *self.joint.tangents]

    @property
    def trains(self) -> bool:
        return any(g is not None for g in self._d_params)

    @property
    def d_parameters(self) -> list[fx.Node | None]:
        return self._d_params

    @property
    def d_inputs(self) -> list[fx.Node | None]:
        return self._d_inputs

    def like(self, source: Source) -> Tensor:
        """What an argument looks like, without contents."""
        if self._looks is None:
            self._looks = {place: node.meta["val"] for node, place in self._sources.items()}
        return self._looks[source]

    @cached_property
    def working(self) -> Working:
        graph, own = self.joint.graph, [*self.joint.outputs, *self.saved_b, *self.saved_bw]
        left = [*(node for node in self._d_inputs if node is not None), *self.saved_w]
        weight = Forms(self._d_params, {*self.parameters, *self.w_saved}, self._products).nodes
        fused = Forms(self._d_params, set(self._given), self._products).nodes
        odd = {size for node in self.parameters for size in node.meta["val"].shape if size % _ALIGNED}

        def bytes_of(
            outputs: Sequence[fx.Node | None], sources: Sequence[fx.Node], left: Sequence[fx.Node]
        ) -> list[int]:  # fmt: skip
            values = total_bytes(left, besides=sources)
            return [held - values for held in running_bytes(graph, outputs, sources, self._compiler.fuses, odd)]

        return Working(
            bytes_of(own, self.joint.inputs, own),
            bytes_of(left, self._given, left),
            bytes_of(weight, [*self.parameters, *self.w_saved], ()),
            bytes_of([*self._d_inputs, *fused], self._given, left[: len(self._d_inputs)]),
        )

    def _cut(self, outputs: Sequence[fx.Node | None], sources: Sequence[fx.Node]) -> Call:
        with torch.no_grad():
            function, nodes = _cut(self.joint.graph, outputs, sources, self._compiler)
        return Call(function, tuple(self._sources[node] for node in nodes), _looks(outputs))

    def _weight_cut(self, others: Sequence[fx.Node | None], sources: Sequence[fx.Node]) -> WeightCall:
        forms = Forms(self._d_params, set(sources), self._products)
        with torch.no_grad():
            function, nodes = _cut(self.joint.graph, [*others, *forms.nodes], sources, self._compiler)
        further = [node for node in forms.given if node not in nodes]
        arguments = (*nodes, *further)
        where = tuple(self._sources[node] for node in arguments)
        looks = _looks([*others, *forms.nodes])
        return WeightCall(function, where, looks, len(nodes), forms.reader(arguments, len(others)))


class _Partition:
    """Which nodes are saved for the backward and, of those and what B computes, which W needs. Never a view: what it is
    a view of is saved, or known already, and looking at it again costs nothing."""

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
        stop = {base(node) for node in chosen - free - parameters} - free - parameters | set(joint.tangents)
        everything = [g for g in (*d_inputs, *d_params) if g is not None]
        reached = closure(everything, stop)
        leaves = (reached & stop) | (reached & set(joint.inputs))
        self.saved = tuple(sorted(leaves - parameters - set(joint.tangents), key=order.__getitem__))
        in_b = closure([g for g in d_inputs if g is not None], set(self.saved) | set(joint.tangents))
        computed = {part for node in in_b for part in tensors_of(node) if base(part) is part}
        available = (computed | set(self.saved) | set(joint.tangents)) - free - parameters
        in_w = closure([g for g in d_params if g is not None], available)
        self.w_saved = tuple(sorted(in_w & available, key=order.__getitem__))


def _looks(nodes: Iterable[fx.Node | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if node is None else node.meta["val"] for node in nodes)


def _cut(
    graph: fx.Graph, outputs: Iterable[fx.Node | None], sources: Sequence[fx.Node], compiler: Compiler
) -> tuple[Callable[..., Any], tuple[fx.Node, ...]]:
    """The part of `graph` that computes `outputs` from `sources`, as a function of those sources it really uses."""
    outputs = list(outputs)
    needed = closure([node for node in outputs if node is not None], set(sources))
    arguments = tuple(node for node in dict.fromkeys(sources) if node in needed)
    part, copies = fx.Graph(), {}
    for node in arguments:
        copies[node] = part.placeholder(node.name)
        copies[node].meta.update(node.meta)
    for node in graph.nodes:
        if node in needed and node not in copies:
            assert node.op != "placeholder", f"{node} is needed but not given"
            copies[node] = part.node_copy(node, lambda n: copies[n])
    part.output(tuple(None if node is None else copies[node] for node in outputs))
    return compiler(part), arguments


def build(
    graph: fx.Graph,
    arguments: Sequence[Any],
    is_parameter: Sequence[bool],
    wants_gradient: Sequence[bool],
    *,
    compiler: Compiler,
    products: bool = False,
    light: bool = False,
) -> Segment:
    """Traces a template for these arguments. Flags are per tensor argument. products: see `Segment`. light: what is
    cheap to compute is computed again."""
    joint = trace(graph, arguments, wants_gradient, is_parameter, compiler.decompositions)
    if light:
        saved = policies.light(joint, [n for n, p in zip(joint.inputs, is_parameter, strict=True) if p])
    else:
        saved = policies.min_cut(joint) if compiler.fuses else policies.used_by_backward(joint)
    return Segment(joint, is_parameter, saved, compiler, products)


@dataclass(frozen=True)
class Working:
    """Bytes at each operator of F, B, W, and B with W, beyond what was there before and the values that are left: all
    that F and B put out, nothing of W, whose gradients are added to sums."""

    forward: list[int]
    backward: list[int]
    weight: list[int]
    together: list[int]


def running_bytes(
    graph: fx.Graph, outputs: Iterable[fx.Node | None], sources: Sequence[fx.Node], fuses: bool = False,
    odd: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """While `outputs` are computed from `sources`, which do not count, at each operator; views cost nothing. fuses:
    nor does what is computed element by element and read by nothing but such operators and reductions, or what is
    written over what is read for the last time. odd: sizes that suit no tensor core, of parameters only: the numbers
    of samples and tokens are taken to suit."""
    given = set(sources)
    wanted = [node for node in outputs if node is not None]
    needed = closure(wanted, given)
    order = [node for node in graph.nodes if node in needed and node not in given]
    held = {storage for node in sources for storage, _ in _storages(node)}
    fixed = held | {storage for node in wanted for storage, _ in _storages(node)}
    if fuses:
        held |= _never_written(order, wanted)
    last = {storage: place for place, node in enumerate(order) for used in (node, *node.all_input_nodes)
            for storage, _ in _storages(used)}  # fmt: skip
    last.update({storage: len(order) for node in wanted for storage, _ in _storages(node)})
    alive: dict[int, int] = {}
    found: list[int] = []
    for place, node in enumerate(order):
        new = {storage: size for storage, size in _storages(node) if storage not in held}
        if fuses and _is_pointwise(node):
            ending = {size: storage for storage, size in alive.items() if last[storage] == place}
            for size in set(new.values()) & ending.keys():
                del alive[ending[size]]
        alive.update(new)
        found.append(sum(alive.values()) + (_padding(node, fixed, odd) if fuses else 0))
        alive = {storage: size for storage, size in alive.items() if last[storage] > place}
    return found


def _never_written(order: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> set[int]:
    """The storages that a compiler which fuses keeps in registers."""
    written = {storage for node in wanted for storage, _ in _storages(node)}
    for node in order:
        own = {storage for storage, _ in _storages(node)}
        sources = node.all_input_nodes[1:] if node.target in _CHANGES_A_COPY else node.all_input_nodes
        read = {storage for source in sources for storage, _ in _storages(source)}
        is_view = own <= read
        if not _is_pointwise(node) and not is_view:
            written |= own
            written |= read if torch.Tag.reduction not in _tags(node) else set()
    return {storage for node in order for storage, _ in _storages(node)} - written


# Of their first argument, which is computed right where it is changed.
_CHANGES_A_COPY = (
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.index_put.default,
    aten._unsafe_masked_index_put_accumulate.default,
)  # fmt: skip


_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_ALIGNED = 8  # elements of half precision, for tensor cores


def _padding(node: fx.Node, fixed: set[int], odd: Collection[int]) -> int:
    """Bytes of the copies that a compiler makes of a product's factors where their sizes suit no tensor core. What is
    summed over has room behind it from the beginning, unless it is `fixed` how that storage lies."""
    if node.target not in _PRODUCTS or node.meta["val"].itemsize != 2:
        return 0
    left, right = node.all_input_nodes[-2:] if len(node.all_input_nodes) > 1 else node.all_input_nodes * 2
    (rows, inner), columns = left.meta["val"].shape[-2:], right.meta["val"].shape[-1]
    is_fixed = any(storage in fixed for storage, _ in _storages(left))
    copied = [left] if (rows in odd and rows % 2) or (inner in odd and is_fixed) else []
    copied += [right] if inner in odd or columns in odd else []
    return sum(own.meta["val"].numel() * 2 for own in copied)


def _is_pointwise(node: fx.Node) -> bool:
    """Computed element by element, each from one of every source."""
    return torch.Tag.pointwise in _tags(node) or node.target in (aten.gather.default, aten.full.default)


def _tags(node: fx.Node) -> Sequence[torch.Tag]:
    return node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()


def total_bytes(nodes: Iterable[fx.Node], besides: Iterable[fx.Node] = ()) -> int:
    """Of what these hold, each storage once, without what others hold."""
    own = {storage: size for node in nodes for storage, size in _storages(node)}
    return sum(own.values()) - sum(own.pop(storage, 0) for node in besides for storage, _ in _storages(node))


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    """Which it holds, and how many bytes each has."""
    tensors = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return [(tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()) for tensor in tensors]

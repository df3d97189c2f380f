"""The joint graph of a segment: its forward and its gradients in one graph, made once per shape without contents.

That computes nothing and allocates nothing; it takes well under a second for a layer. On a CPU it is recorded
(`record.py`), elsewhere and where something is not plain it is traced by torch. What computes nothing is taken
out (detached copies, double transposes, first powers, the same view twice): each costs a call per step when a segment
runs as it is. What is kept from forward to backward is decided on this graph (`policies.py`), and the functions are cut
out of it (`segments.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from phalanx.model.ops.operators import looks_only
from phalanx.model.segment.record import NotPlain, Recorder

aten = torch.ops.aten
Function = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
_VIEWS = (
    aten.view.default, aten.t.default, aten.transpose.int, aten.slice.Tensor, aten.unsqueeze.default,
    aten.expand.default,
)  # fmt: skip
_LAID_OUT_OTHERWISE = (
    aten.softplus_backward.default, aten.elu_backward.default, aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
)  # fmt: skip


def simplify(graph: fx.Graph) -> None:
    """What the graph puts out stays as it is, so that outputs share memory with nothing new."""
    views: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _same_as(node)
        if same is None and node.target in _VIEWS:
            first = views.setdefault(f"{node.target}{node.args}{node.kwargs}", node)
            same = None if first is node else first
        if same is not None:
            node.replace_all_uses_with(same, delete_user_cb=lambda user: user.op != "output")
            if not node.users:
                graph.erase_node(node)


def _same_as(node: fx.Node) -> fx.Node | None:
    """The earlier node that has the same value, if this one adds nothing to it."""
    source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if source is None:
        return None
    if node.target is aten.detach.default:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        inner = source.args[0]
        return inner if isinstance(inner, fx.Node) else None
    return source if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1 else None


@dataclass(frozen=True)
class Joint:
    """One graph: inputs and output gradients (`tangents`) in; outputs and gradients out."""

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]  # the segment's tensor inputs, in port order
    tangents: tuple[fx.Node, ...]  # one per differentiable output
    outputs: tuple[fx.Node, ...]
    differentiable: tuple[bool, ...]  # per output
    gradients: tuple[fx.Node | None, ...]  # per input; None where no gradient is wanted or none flows


@dataclass(frozen=True)
class Outline:
    """What a tensor that crosses a cut looks like, and whether its gradient is taken back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def outline(graph: fx.Graph, arguments: Sequence[Any], wants_gradient: Sequence[bool]) -> tuple[Outline, ...]:
    """The outlines of the outputs of `graph` called with `arguments`, of which nothing but their looks is used."""
    function = _as_function(graph, arguments)
    try:
        recorder = Recorder()
        with unset_fake_temporarily(), torch.enable_grad(), looks_only():
            given = _placeholders(recorder, arguments, wants_gradient)
            with recorder:
                outputs = function(given)
    except NotPlain:
        mode = _fake_mode(arguments)
        tensors = [_fake(mode, a, w) for a, w in zip(_tensors(arguments), wants_gradient, strict=True)]
        with mode, torch.enable_grad(), looks_only():
            outputs = function(tensors)
    return tuple(Outline(tuple(out.shape), out.dtype, out.requires_grad) for out in outputs)


def trace(
    graph: fx.Graph,
    arguments: Sequence[Any],
    wants_gradient: Sequence[bool],
    is_parameter: Sequence[bool],
    decompositions: dict[Any, Any] | None,
) -> Joint:
    """Traces `graph` called with `arguments` (tensors or ints, real or fake) and the gradients of what is wanted.

    wants_gradient, is_parameter: per tensor argument. Gradients of parameters share memory with nothing.
    """
    mode, function = _fake_mode(arguments), _as_function(graph, arguments)
    gradients = _Gradients(wants_gradient, is_parameter)
    try:
        if decompositions:
            raise NotPlain("decompositions")
        with unset_fake_temporarily(), torch.enable_grad():
            found, differentiable = _recorded(function, gradients, arguments, mode)
    except NotPlain:
        tensors = [_fake(mode, a, w) for a, w in zip(_tensors(arguments), wants_gradient, strict=True)]
        with mode, torch.enable_grad():
            found, differentiable = _traced(function, gradients, tensors, decompositions)
    found.eliminate_dead_code()
    settle_strides(found)
    simplify(found)
    joint = _describe(found, len(wants_gradient), differentiable)
    wide = tuple(_before_rounding(g, joint) if p else g for g, p in zip(joint.gradients, is_parameter, strict=True))
    found.output_node().args = ((*joint.outputs, *wide),)
    found.eliminate_dead_code()
    return replace(joint, gradients=wide)


def _recorded(
    function: Function, gradients: _Gradients, arguments: Sequence[Any], mode: FakeTensorMode
) -> tuple[fx.Graph, tuple[bool, ...]]:
    """The joint graph, not yet simplified, and which outputs are differentiable."""
    recorder = Recorder()
    tensors = _placeholders(recorder, arguments, gradients.wants)
    with recorder:
        outputs = function(tensors)
    if not tensors:
        raise NotPlain("no tensors")
    with recorder.graph.inserting_after(recorder.node(tensors[-1])):
        tangents = [
            recorder.placeholder(f"tangent_{i}", torch.empty(out.shape, dtype=out.dtype, device="meta"))
            for i, out in reversed(list(enumerate(out for out in outputs if out.requires_grad)))
        ][::-1]
    with recorder:
        found = gradients(tensors, outputs, tangents)
        results = [*(out.detach() for out in outputs), *found]
    recorder.graph.output(tuple(None if result is None else recorder.node(result) for result in results))
    recorder.describe(mode)
    return recorder.graph, tuple(out.requires_grad for out in outputs)


def _placeholders(recorder: Recorder, arguments: Sequence[Any], wants: Sequence[bool]) -> list[Tensor]:
    pairs = enumerate(zip(_tensors(arguments), wants, strict=True))
    return [recorder.placeholder(f"input_{i}", tensor, wanted) for i, (tensor, wanted) in pairs]


def _traced(
    function: Function, gradients: _Gradients, tensors: Sequence[Tensor], decompositions: dict[Any, Any] | None
) -> tuple[fx.Graph, tuple[bool, ...]]:
    """The same by torch's tracer, which also knows constants, operators made of others, and such as change what they
    are given."""
    with looks_only():
        looks = function(tensors)
    tangents = _tangents(looks)

    def joint(tensors: list[Tensor], tangents: list[Tensor]) -> list[Tensor | None]:
        outputs = function(tensors)
        found = gradients(tensors, outputs, tangents)
        return [*[out.detach() for out in outputs], *found]

    module = make_fx(joint, decomposition_table=decompositions)(tensors, tangents)
    if any(_mutates(node) for node in module.graph.nodes):
        plain = [t.detach() for t in tensors]
        module = make_fx(torch.func.functionalize(module), decomposition_table=decompositions)(plain, tangents)
    return module.graph, tuple(out.requires_grad for out in looks)


def _tangents(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [
        torch.empty_like(out, memory_format=torch.contiguous_format).detach() for out in outputs if out.requires_grad
    ]


def settle_strides(graph: fx.Graph) -> None:
    """Of some operators torch foretells another memory layout than they give where the gradient they get is not
    contiguous; what is traced after them relies on it, so the gradient is made contiguous."""
    for node in list(graph.nodes):
        gradient = node.args[0] if node.target in _LAID_OUT_OTHERWISE else None
        if isinstance(gradient, fx.Node) and not gradient.meta["val"].is_contiguous():
            with graph.inserting_before(node):
                copied = graph.call_function(
                    aten.clone.default, (gradient,), {"memory_format": torch.contiguous_format}
                )
            copied.meta["val"] = gradient.meta["val"].contiguous()
            node.update_arg(0, copied)


def _before_rounding(gradient: fx.Node | None, joint: Joint) -> fx.Node | None:
    """A weight gradient that was summed in float32 stays so: accumulators are wide anyway."""
    casts = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
    if gradient is None or gradient.target not in casts:
        return gradient
    source = gradient.all_input_nodes[0]
    value: Tensor = source.meta["val"]
    inputs = {node.meta["val"].untyped_storage()._cdata for node in (*joint.inputs, *joint.tangents)}
    own = len(source.users) == 1 and value.is_contiguous() and value.untyped_storage()._cdata not in inputs
    widens = value.dtype == torch.float32 and gradient.meta["val"].dtype in (torch.bfloat16, torch.float16)
    return source if own and widens else gradient


@dataclass(frozen=True)
class _Gradients:
    """wants, is_parameter: per tensor argument."""

    wants: Sequence[bool]
    is_parameter: Sequence[bool]

    def __call__(
        self, tensors: Sequence[Tensor], outputs: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> list[Tensor | None]:
        wanted = [t for t, wants in zip(tensors, self.wants, strict=True) if wants]
        sources = [out for out in outputs if out.requires_grad]
        found = iter(torch.autograd.grad(sources, wanted, tangents, allow_unused=True) if sources else [])
        gradients = [next(found, None) if wants else None for wants in self.wants]
        gradients = [None if g is None else g.contiguous() for g in gradients]
        _separate(gradients, self.is_parameter, [*tensors, *tangents, *outputs])
        return gradients


def _separate(gradients: list[Tensor | None], is_parameter: Sequence[bool], others: Sequence[Tensor]) -> None:
    """Copies a parameter's gradient that is also something else (`a + b` gives both the same one): sums over
    micro-batches and clipping change gradients in place."""
    inputs = [g for g, parameter in zip(gradients, is_parameter, strict=True) if g is not None and not parameter]
    seen = {tensor.untyped_storage()._cdata for tensor in (*others, *inputs)}
    for i, gradient in enumerate(gradients):
        if gradient is None or not is_parameter[i]:
            continue
        if gradient.untyped_storage()._cdata in seen:
            gradients[i] = gradient.clone()
        seen.add(gradient.untyped_storage()._cdata)


def _as_function(graph: fx.Graph, arguments: Sequence[Any]) -> Function:
    """The graph as a function of its tensor arguments; sizes are constants of this shape. Activations leave
    contiguous."""
    module = fx.GraphModule({}, graph)

    def function(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        remaining = iter(tensors)
        values = [next(remaining) if isinstance(a, Tensor) else a for a in arguments]
        return tuple(out.contiguous() for out in module(*values))

    return function


def _tensors(arguments: Sequence[Any]) -> list[Tensor]:
    return [a for a in arguments if isinstance(a, Tensor)]


def _fake_mode(arguments: Sequence[Any]) -> FakeTensorMode:
    for argument in arguments:
        if isinstance(argument, FakeTensor):
            return argument.fake_mode
    return FakeTensorMode()


def _fake(mode: FakeTensorMode, tensor: Tensor, wants_gradient: bool) -> Tensor:
    fake = tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor.detach(), static_shapes=True)
    return fake.detach().requires_grad_(wants_gradient)


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _describe(graph: fx.Graph, num_inputs: int, differentiable: tuple[bool, ...]) -> Joint:
    placeholders = tuple(node for node in graph.nodes if node.op == "placeholder")
    output = next(iter(reversed(graph.nodes)))
    results: Any = tuple(output.args[0])  # pyright: ignore
    num_outputs = len(differentiable)
    return Joint(
        graph, placeholders[:num_inputs], placeholders[num_inputs:],
        results[:num_outputs], differentiable, results[num_outputs:],
    )  # fmt: skip


def closure(outputs: Iterable[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
    """All nodes needed for `outputs`, not looking behind nodes in `stop`."""
    seen: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in stop:
            stack.extend(node.all_input_nodes)
    return seen


def base(node: fx.Node) -> fx.Node:
    """What a node is a view of, at the end; itself if it has memory of its own."""
    while node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
        made_of = node.all_input_nodes[0] if node.target is operator.getitem else node  # several views at once
        sources = made_of.all_input_nodes
        seen = [s for s in sources if isinstance(s.meta.get("val"), Tensor) and storage(s) == storage(node)]
        if not seen:
            return node
        node = seen[0]
    return node


def storage(node: fx.Node) -> int:
    """What tells the memory of one node's value from another's."""
    return node.meta["val"].untyped_storage()._cdata


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """The node itself or, where it gives several tensors, each of them: keeping the node would keep them all alive."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem]

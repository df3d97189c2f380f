"""A whole model as one graph, before it is cut, and the passes that take hidden effects out of it.

Nodes know the module they came from (`meta["path"]`), placeholders have roles instead of positions. After the passes
(gradient modes, random numbers, in-place operators) every node is a pure function of its arguments. What cannot be made
pure exactly is refused with the module and source line it came from; nothing is approximated.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from phalanx.errors import CaptureError


@dataclass
class FlatGraph:
    """A whole model as one graph. `roles` says what each placeholder is: (kind, name) with kind one of
    parameter, buffer, constant, input, size (an expression over dynamic dims), dropout (a site's keys)."""

    graph: fx.Graph
    roles: dict[fx.Node, tuple[str, str]]
    symbols: dict[str, str]  # the exporter's size symbols → names of dynamic dims ('s34' → 'tokens')
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    loss: fx.Node | None = None  # a sum over items, once `normalise` is done
    count: fx.Node | None = None  # the number of items in that sum, computed from inputs alone
    conditions: tuple[str, ...] = ()  # on the number of samples, under which the model computes this
    never_ignored: tuple[tuple[str, int], ...] = ()  # (input, value): of which parts may be cut only without this value
    assumed: str = ""  # why it is not known that sum and count of a batch are those of its parts together

    def placeholder(self, kind: str, name: str) -> fx.Node:
        """The placeholder with this role, added after the existing ones when it is new."""
        for node, role in self.roles.items():
            if role == (kind, name):
                return node
        anchor = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        with self.graph.inserting_after(anchor):
            node = self.graph.placeholder(f"{kind}_{len(self.roles)}")
        node.meta["path"] = ""
        self.roles[node] = (kind, name)
        return node

    def dims_in(self, value: Any) -> set[str | None]:
        """The dynamic dims that a size depends on."""
        symbols = value.node.expr.free_symbols if isinstance(value, torch.SymInt) else ()
        return {self.symbols.get(str(symbol)) for symbol in symbols}

    def size(self, value: Any) -> fx.Node | int:
        """A size as a number, or as the placeholder named by its expression over the dynamic dims."""
        expression = value.node.expr if isinstance(value, torch.SymInt | torch.SymBool) else value
        if getattr(expression, "is_number", True):
            return int(expression)
        if unknown := {str(s) for s in expression.free_symbols} - set(self.symbols):
            raise CaptureError(
                f"a size depends on the data ({self._first_with(unknown)})",
                "shapes must follow from the shapes of the inputs alone: multiply by a mask instead of selecting by it",
            )
        names = {symbol: self.symbols[str(symbol)] for symbol in expression.free_symbols}
        return self.placeholder("size", str(expression.subs(names)))

    def _first_with(self, symbols: set[str]) -> str:
        """Where a size of these comes from."""
        for node in self.graph.nodes:
            for value in tree_leaves(node.meta.get("val")):
                sizes = value.shape if isinstance(value, torch.Tensor) else [value]
                found = {
                    str(x) for size in sizes if isinstance(size, torch.SymInt) for x in size.node.expr.free_symbols
                }
                if found & symbols:
                    return where(node)
        return "unknown line"


def where(node: fx.Node) -> str:
    """The module and source line a node came from, for error messages."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.strip().splitlines() if line.strip()]
    source = " ".join(lines[-2:]) if lines else "unknown line"
    return f"module '{node.meta.get('path') or '<root>'}', {source}"


def replace(graph: fx.Graph, node: fx.Node, new: Any) -> None:
    """Every use of `node` becomes `new`, a node or a number; `node` is gone."""
    if isinstance(new, fx.Node):
        node.replace_all_uses_with(new)
    else:
        for user in list(node.users):
            user.args = map_arg(user.args, lambda n: new if n is node else n)
            user.kwargs = map_arg(user.kwargs, lambda n: new if n is node else n)
    graph.erase_node(node)


aten = torch.ops.aten
_COPIES = (aten.alias.default, aten.clone.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)
# Views or copies, depending on strides; and operators with several results.
_UNSURE = (
    aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints, aten.to.dtype, aten.to.device,
    aten.to.dtype_layout, aten.to.other, operator.getitem,
)  # fmt: skip
_KEYED = (aten.dropout.default, aten.dropout_.default, aten.scaled_dot_product_attention.default)


def inline_modes(flat: FlatGraph) -> None:
    """Bodies of `with torch.no_grad()` and of switched-off autocast become part of the graph."""
    assert flat.graph.owning_module is not None
    _inline(flat.graph, flat.graph.owning_module)


def _inline(graph: fx.Graph, owner: torch.nn.Module) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or str(node.target) not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        if str(node.target) == "wrap_with_autocast" and node.args[2]:
            raise CaptureError(
                f"the model switches autocast on by itself (module '{node.meta.get('path') or '<root>'}')",
                "cast explicitly with .to(dtype), or leave the dtype to the run's precision",
            )
        position = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
        body = getattr(owner, str(node.args[position].target))  # pyright: ignore
        _inline(body.graph, body)
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        copies: dict[fx.Node, Any] = dict(zip(inner, node.args[position + 1 :], strict=True))
        with graph.inserting_before(node):
            results = graph.graph_copy(body.graph, copies)
        gradients_off = str(node.target) == "wrap_with_set_grad_enabled" and not node.args[0]
        for getter in list(node.users):
            result = results[getter.args[1]]  # pyright: ignore
            if gradients_off:
                getter.target, getter.args = aten.detach.default, (result,)
            else:
                replace(graph, getter, result)
        graph.erase_node(node)


def refuse_coupling(flat: FlatGraph) -> None:
    """Dropout gets keys later; other random numbers, values read by Python and statistics over the batch would change
    with how a batch is split."""
    for node in flat.graph.nodes:
        if getattr(node.target, "__name__", "") == "_add_batch_dim":
            raise CaptureError(
                f"torch.vmap cannot be read as a graph ({where(node)})", "write the function for whole batches instead"
            )
        if not isinstance(node.target, torch._ops.OpOverload) or _is_recurrent_without_dropout(node):
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags and node.target not in _KEYED:
            raise CaptureError(
                f"{node.target._schema.name} draws random numbers that no plan could repeat ({where(node)})",
                "use dropout, or compute the random values outside the model and pass them as an input",
            )
        if node.target is aten.item.default:
            raise CaptureError(
                f"the model reads a tensor's value as a Python number ({where(node)})",
                "keep it a tensor: no .item(), float(x) or int(x) in the forward pass",
            )
        if node.target is aten.instance_norm.default and node.args[3] is not None and node.args[5]:
            raise CaptureError(
                f"instance normalisation keeps running statistics ({where(node)}), which training does not update",
                "make it without them (track_running_stats=False), or put it in eval mode, where it only uses them",
            )
        if node.target is aten.batch_norm.default and node.args[5]:
            flat.assumed = f"batch normalisation mixes the samples of a batch ({where(node)})"
        if node.target is aten.batch_norm.default and node.args[5] and node.args[3] is not None:
            raise CaptureError(
                f"batch normalisation keeps running statistics of batches ({where(node)}), which training does not "
                "update; and it mixes the samples of a batch, so that a split batch would differ",
                "use a normalisation that keeps samples apart, such as GroupNorm or LayerNorm, or put it in eval mode, "
                "where it uses the statistics as they are",
            )


def _is_recurrent_without_dropout(node: fx.Node) -> bool:
    """Recurrent layers count as random because of the dropout between them."""
    if node.target not in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
        return False
    dropout, train = node.args[5], node.args[6]  # after input, states, weights, has_biases, num_layers
    return not dropout or not train


def make_functional(flat: FlatGraph) -> None:
    """x.op_(…) becomes y = op(x, …), and later uses of x become y. What x is a view of gets y written into it, out of
    place, and later uses of its other views become views of that."""
    for node in list(flat.graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            _replace_in_place(flat, node)
    for node in list(flat.graph.nodes):
        if node.target in _COPIES:
            replace(flat.graph, node, node.args[0])


def _replace_in_place(flat: FlatGraph, node: fx.Node) -> None:
    changed, twin = node.kwargs.get("out", node.args[0]), _functional_twin(node.target)  # pyright: ignore
    assert isinstance(changed, fx.Node)
    base = _storage(changed)
    kind, name = flat.roles.get(base, ("constant", ""))
    if kind != "constant":
        why = "which another part of the batch would see" if kind == "input" else "which training does not carry on"
        raise CaptureError(
            f"the forward pass changes {kind} '{name}' in place ({where(node)}), {why}",
            "keep running state out of the model; write the operation out of place",
        )
    if "out" in node.kwargs:
        raise CaptureError(
            f"the model has a result written into another tensor with out= ({where(node)})", "use what the call returns"
        )
    earlier = set(_before(node))
    views = [n for n in flat.graph.nodes if n in earlier and n is not base and _storage(n) is base]
    earlier_or_it = {*earlier, node}
    seen = [n for n in (base, *views) if n is not changed and any(user not in earlier_or_it for user in n.users)]
    rewritten = {step for view in (changed, *seen) for step in _path(base, view)} if seen else set[fx.Node]()
    if twin is None or any(view.target in _UNSURE for view in rewritten):
        raise CaptureError(
            f"the model changes a tensor in place that others still see ({where(node)})",
            "write the operation out of place, for example `x = x + y` instead of `x[...] += y`",
        )
    new = {changed: _out_of_place(flat, node, twin, changed)}
    with flat.graph.inserting_before(new[changed].next):
        for view in reversed(_path(base, changed) if seen else []):
            new[view.args[0]] = _written(flat, node, view, new[view])  # pyright: ignore[reportArgumentType]
        for view in views:
            if view in rewritten and view not in new:
                new[view] = _like(flat, node, view, view.target, (new[view.args[0]], *view.args[1:]))  # pyright: ignore
                new[view].kwargs = view.kwargs
    made = {node, *new.values()}
    for old, fresh in new.items():
        old.replace_all_uses_with(fresh, delete_user_cb=lambda user: user not in earlier and user not in made)


def _before(node: fx.Node) -> Iterator[fx.Node]:
    node = node.prev
    while node.op != "root":
        yield node
        node = node.prev


def _path(base: fx.Node, view: fx.Node) -> list[fx.Node]:
    """The views from `base` to `view`, which is the last of them."""
    steps: list[fx.Node] = []
    while view is not base:
        steps.append(view)
        view = _viewed(view)  # pyright: ignore[reportAssignmentType]
    return steps[::-1]


def _like(flat: FlatGraph, node: fx.Node, shape: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    new = flat.graph.call_function(target, args)
    new.meta.update(node.meta)
    new.meta["val"] = shape.meta["val"]
    return new


def _written(flat: FlatGraph, node: fx.Node, view: fx.Node, value: fx.Node) -> fx.Node:
    """What `view` is a view of, with `value` in that place."""
    parent: Any = view.args[0]
    if view.target is aten.slice.Tensor:
        return _like(flat, node, parent, aten.slice_scatter.default, (parent, value, *view.args[1:]))
    if view.target is aten.select.int:
        return _like(flat, node, parent, aten.select_scatter.default, (parent, value, *view.args[1:]))
    if view.target in (aten.transpose.int, aten.t.default):
        return _like(flat, node, parent, view.target, (value, *view.args[1:]))
    if view.target is aten.permute.default:
        order: Any = view.args[1]
        inverse = sorted(range(len(order)), key=lambda place: order[place] % len(order))
        return _like(flat, node, parent, aten.permute.default, (value, inverse))
    if view.target in (aten.view.default, aten.unsqueeze.default):
        shape = parent.meta["val"].shape
        if all(isinstance(size, int) for size in shape[1:]):
            return _like(flat, node, parent, aten._unsafe_view.default, (value, [-1, *shape[1:]]))  # no view of it
    if view.target in (aten.alias.default, aten.lift_fresh.default):
        return value
    raise CaptureError(
        f"the model changes a part of a tensor in place that was taken by {view.target} ({where(node)})",
        "write the operation out of place, for example with torch.where or torch.cat",
    )


def _functional_twin(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """aten.add.Tensor for aten.add_.Tensor, aten.__and__.Tensor for aten.__iand__.Tensor."""
    namespace, name = target._schema.name.split("::")
    name = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    return getattr(getattr(getattr(torch.ops, namespace), name, None), target._overloadname, None)


def _out_of_place(flat: FlatGraph, node: fx.Node, twin: torch._ops.OpOverload, changed: fx.Node) -> fx.Node:
    if twin is not aten.copy.default:
        node.target = twin
        return _keep_dtype(flat, node, changed)
    # Copying has no derivative: its result is what is copied, as large and of the dtype as where it goes.
    value, shape = changed.meta["val"], node.args[1].meta["val"].shape  # pyright: ignore
    node.target, node.args = aten.to.dtype, (node.args[1], value.dtype)
    if tuple(map(str, value.shape)) == tuple(map(str, shape)):
        return node
    with flat.graph.inserting_after(node):
        wide = flat.graph.call_function(aten.expand_as.default, (node, changed))
    wide.meta.update(node.meta)
    node.meta["val"] = value.new_empty(shape)
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)
    return wide


def _keep_dtype(flat: FlatGraph, node: fx.Node, changed: fx.Node) -> fx.Node:
    """An in-place result has the dtype of what it was written into; the functional one may be promoted."""
    dtypes = [n.meta["val"].dtype for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    kept, promoted = changed.meta["val"].dtype, reduce(torch.promote_types, dtypes)
    if kept == promoted:
        return node
    with flat.graph.inserting_after(node):
        cast = flat.graph.call_function(aten.to.dtype, (node, kept))
    cast.meta.update(node.meta)
    node.meta["val"] = node.meta["val"].to(promoted)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast


def _storage(node: fx.Node) -> fx.Node:
    """The node whose memory this one may share: itself, or what it is a view of."""
    while (source := _viewed(node)) is not None:
        node = source
    return node


def _viewed(node: fx.Node) -> fx.Node | None:
    if node.target is operator.getitem:
        return _viewed(node.args[0])  # pyright: ignore  (one of several results: a view where the operator makes views)
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if not schema.returns or schema.returns[0].alias_info is None or schema.returns[0].alias_info.is_write:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = node.meta.get("val")
    is_cast = isinstance(value, torch.Tensor) and value.dtype != source.meta["val"].dtype
    return None if is_cast else source

"""What a segment keeps from forward to backward.

A policy is a function from the joint graph to the set of nodes to keep; anything the backward needs beyond them is
recomputed. Keeping nothing is full recomputation; keeping everything the backward reads is none; where pointwise
chains are fused by a compiler, the minimum cut keeps the fewest bytes at no cost in time. Between them, `light` keeps
the fewest bytes from which no product and no attention has to be computed again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

import phalanx.model.ops.operators  # noqa: F401  (defines operators named below)
from phalanx.model.segment.joint import Joint, base, storage, tensors_of

aten, own = torch.ops.aten, torch.ops.phalanx
# Besides what works element by element or looks at memory otherwise: norms, reductions, copies, constants.
_CHEAP: frozenset[Any] = frozenset((
    aten.native_layer_norm, aten.native_group_norm, aten._fused_rms_norm, aten._softmax, aten._log_softmax,
    aten.logsumexp, aten.sum, aten.mean, aten.var, aten.var_mean, aten.amax, aten.amin, aten.linalg_vector_norm,
    aten.cumsum, aten._to_copy, aten.clone, aten.cat, aten.stack, aten.constant_pad_nd, aten.repeat, aten.index,
    aten.index_select, aten.gather, aten.slice_scatter, aten.flip, aten.roll, aten.masked_fill, aten.tril,
    aten.triu, aten.arange, aten.full, aten.full_like, aten.zeros, aten.zeros_like, aten.ones, aten.ones_like,
    aten.scalar_tensor, aten.one_hot, torch.ops.prims.convert_element_type, torch.ops.prims.iota, own.dropout,
    own.dropout_part,
))  # fmt: skip


def parameter_only(joint: Joint, parameters: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes computed from parameters and constants alone (casts, transposes): recomputed, never kept."""
    free: set[fx.Node] = set(parameters)
    for node in joint.graph.nodes:
        if node.op == "call_function" and all(source in free for source in node.all_input_nodes):
            free.add(node)
    return free


def _forward_nodes(joint: Joint) -> set[fx.Node]:
    """Nodes that the outputs need, and the parts of their results (an attention's log-sum-exp) that only backward
    reads."""
    found: set[fx.Node] = set()
    stack = list(joint.outputs)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    parts = {user for node in found for user in node.users if user.target is operator.getitem}
    return found | parts | set(joint.inputs)


def used_by_backward(joint: Joint) -> set[fx.Node]:
    """Every value of the forward that the backward reads directly; what only the backward computes is its
    own affair."""
    forward = _forward_nodes(joint)
    used = {source for node in joint.graph.nodes if node not in forward for source in node.all_input_nodes}
    used.update(gradient for gradient in joint.gradients if gradient is not None)
    return used & forward


def light(joint: Joint, parameters: Collection[fx.Node]) -> set[fx.Node]:
    """A minimum cut between what is given or expensive to compute and what the backward reads. What a segment has put
    out costs nothing; what it was given costs its bytes where it would else be freed."""
    import networkx

    free, wanted = parameter_only(joint, parameters), used_by_backward(joint)
    outputs = {storage(node) for node in joint.outputs}
    network: Any = networkx.DiGraph()
    for node in _forward_nodes(joint):
        enters, leaves = (node, "enters"), (node, "leaves")
        is_tensor = isinstance(node.meta.get("val"), Tensor)
        if not is_tensor or base(node) is not node:
            network.add_edge(enters, leaves)  # without a capacity, so that it is never cut: what it is a part of is
        elif node in free or storage(node) in outputs or (node in joint.inputs and not _has_gradient(joint, node)):
            network.add_edge(enters, leaves, capacity=0)
        else:
            network.add_edge(enters, leaves, capacity=node.meta["val"].untyped_storage().nbytes())
        if node.op == "placeholder" or not _is_cheap(node):
            network.add_edge("given", enters)
        else:
            network.add_edges_from(((source, "leaves"), enters) for source in node.all_input_nodes)
        if node in wanted:
            network.add_edge(leaves, "backward")
    if "backward" not in network or "given" not in network:
        return set()
    _, (before, _) = networkx.minimum_cut(network, "given", "backward")
    return {node for node, end in before - {"given"} if end == "enters" and (node, "leaves") not in before}


def _has_gradient(joint: Joint, placeholder: fx.Node) -> bool:
    return joint.gradients[joint.inputs.index(placeholder)] is not None


def _is_cheap(node: fx.Node) -> bool:
    if node.target is operator.getitem or any(base(part) is not part for part in tensors_of(node)):
        return True
    target = node.target
    is_operator = isinstance(target, torch._ops.OpOverload)
    return is_operator and (torch.Tag.pointwise in target.tags or target.overloadpacket in _CHEAP)


def min_cut(joint: Joint) -> set[fx.Node]:
    """The fewest bytes from which a fusing compiler can rebuild the rest for free.

    PyTorch's own partitioner chooses; it is semi-private, so this is the only place that knows it. It finds its way by
    placeholder names and a flat list of outputs, which is why it is given a copy.
    """
    from functorch.compile import min_cut_rematerialization_partition

    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for i, node in enumerate(joint.inputs):
        copies[node] = graph.placeholder(f"primals_{i + 1}")
    for i, node in enumerate(joint.tangents):
        copies[node] = graph.placeholder(f"tangents_{i + 1}")
    for node in (*joint.inputs, *joint.tangents):
        copies[node].meta.update(node.meta)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    outputs = [copies[n] for n in joint.outputs]
    gradients = [None if g is None else copies[g] for g in joint.gradients]
    graph.output([*outputs, *gradients])
    module = fx.GraphModule({}, graph)
    examples = [node.meta["val"] for node in (*joint.inputs, *joint.tangents)]
    with torch.no_grad():
        forward, _ = min_cut_rematerialization_partition(module, examples, num_fwd_outputs=len(outputs))
    kept = next(iter(reversed(forward.graph.nodes))).args[0][len(outputs) :]  # pyright: ignore
    by_name = {copy.name: node for node, copy in copies.items()}
    return {by_name[node.name] for node in kept}  # pyright: ignore

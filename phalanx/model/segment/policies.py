"""What a segment keeps from forward to backward.

A policy is a function from the joint graph to the set of nodes to keep; anything the backward needs beyond them is
recomputed. Keeping nothing is full recomputation; keeping everything the backward reads is none; where pointwise
chains are fused by a compiler, the minimum cut keeps the fewest bytes at no cost in time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from phalanx.model.segment.joint import Joint


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

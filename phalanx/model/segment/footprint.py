"""What memory a function cut out of a joint graph needs while it runs, from its graph: nothing runs or is allocated.

As an interpreter runs it, each operator by itself: a value lives until nothing needs it any more. Compiled functions
fuse operators and need less. What kernels need inside is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from phalanx.model.segment.joint import closure


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

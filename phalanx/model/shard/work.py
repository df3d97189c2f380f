"""What one rank of a tensor-parallel group really computes: the matrix FLOPs and heads of each of its segments.

Counted on the rank's own graphs, so what several ranks do alike is counted on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from phalanx.model.captured import Captured
from phalanx.model.graph.flops import flops
from phalanx.model.graph.sharded import Sharded
from phalanx.model.shard.canonical import annotate
from phalanx.model.shard.local_tensors import LocalTensors


@dataclass(frozen=True)
class Work:
    """Of one block on one rank. attention: heads and key/value heads of each attention in it."""

    flops: int
    attention: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankWork:
    blocks: tuple[Work, ...]
    wires: Mapping[str, Tensor]  # without contents


_Counted = tuple[Work, tuple[Tensor, ...]]


def work_of(
    captured: Captured, sharded: Sharded, tp: int, dtype: torch.dtype, dims: Mapping[str, int]
) -> RankWork:  # fmt: skip
    """Runs every distinct segment once on tensors without contents."""
    tensors = LocalTensors(captured, sharded, tp, dtype, dims)
    counted: dict[tuple[object, ...], _Counted] = {}
    found = [Work(0, ()) for _ in sharded.parts]
    for number, part in tensors.parts():
        if part.segment is None:
            continue
        segment = tensors.segment(part)
        arguments = tensors.arguments(segment, part.degree)
        shapes = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments)
        key = (segment.template, shapes)
        if key not in counted:
            with tensors.mode, torch.no_grad():
                counted[key] = _count(tensors.graph(segment), arguments)
        work, outputs = counted[key]
        tensors.put(segment, iter(outputs))
        found[number] = Work(found[number].flops + work.flops, found[number].attention + work.attention)
    return RankWork(tuple(found), tensors.wires)


def _count(graph: fx.Graph, arguments: list[Tensor | int]) -> _Counted:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    annotate(graph, dict(zip(placeholders, arguments, strict=True)), {})
    attending = [node for node in graph.nodes if node.target is torch.ops.phalanx.attention.default]
    heads = tuple((_heads(node, 0), _heads(node, 1)) for node in attending)
    outputs = tuple(node.meta["val"] for node in graph.output_node().args[0])  # pyright: ignore
    return Work(int(sum(flops(node) for node in graph.nodes)), heads), outputs


def _heads(node: fx.Node, argument: int) -> int:
    value = node.args[argument]
    assert isinstance(value, fx.Node)
    return value.meta["val"].shape[1]

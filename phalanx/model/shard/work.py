"""What one rank of a tensor-parallel group really computes: matrix FLOPs and heads.

Counted on the rank's own graphs at one shape of micro-batch, on tensors without contents, so what several ranks do
alike is counted on each of them. Nothing is computed and nothing allocated, whatever the size of the model. What
segments keep for the backward is `engine/trace.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.captured import Captured
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block
from phalanx.model.graph.graphs import flops
from phalanx.model.interpret import Values, without_contents
from phalanx.model.shard.canonical import annotate
from phalanx.model.shard.sharded import Part, Redistribution, Sharded


class LocalTensors:
    """The tensors of one rank, without contents: gives segments their arguments and carries activations over
    redistributions.

    dims: of the whole micro-batch; a unit of smaller degree sees its part of the samples.
    """

    def __init__(
        self, captured: Captured, sharded: Sharded, tp: int, dtype: torch.dtype, dims: Mapping[str, int]
    ) -> None:
        self._captured, self._sharded, self._tp, self._dtype, self._dims = captured, sharded, tp, dtype, dims
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.activations: dict[str, Tensor] = {}
        self._values: dict[int, Values] = {}  # by degree; activations are the same in all

    def parts(self) -> Iterator[tuple[int, Part]]:
        """The parts of all blocks in order; activations of redistributions are moved, those of segments are left to the
        caller."""
        for number, parts in enumerate(self._sharded.parts):
            for part in parts:
                if part.redistribution is not None:
                    self._move(part.redistribution, self._dims_of(part.degree))
                yield number, part

    def segment(self, part: Part) -> Block:
        assert part.segment is not None
        return self._sharded.blocks.blocks[part.segment]

    def values(self, degree: int) -> Values:
        """What the segments of units of this degree are called with."""
        if degree not in self._values:
            shapes = {name: parameter.local.local_shape for name, parameter in self._sharded.parameters.items()}
            dims = self._dims_of(degree)
            found = without_contents(self._captured, self._sharded.blocks, shapes, self._dtype, dims, self.mode)
            found.tables["activation"] = self.activations
            self._values[degree] = found
        return self._values[degree]

    def _dims_of(self, degree: int) -> dict[str, int]:
        return {**self._dims, "batch": self._dims["batch"] * degree // self._tp}

    def _move(self, redistribution: Redistribution, dims: Mapping[str, int]) -> None:
        source = self.activations[redistribution.source]
        with self.mode:
            self.activations[redistribution.target] = torch.empty(
                redistribution.shape_after(source.shape, dims), dtype=source.dtype
            )


@dataclass(frozen=True)
class Work:
    """Of one block on one rank. attention: heads and key/value heads of each attention in it."""

    flops: int
    attention: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankWork:
    blocks: tuple[Work, ...]
    activations: Mapping[str, Tensor]  # without contents


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
        values = tensors.values(part.degree)
        arguments = values.arguments(segment.ports)
        shapes = tuple((a.shape, a.dtype) if isinstance(a, Tensor) else a for a in arguments)
        key = (segment.template, shapes)
        if key not in counted:
            with tensors.mode, torch.no_grad():
                counted[key] = _count(graphs.load(sharded.blocks.templates[segment.template].text), arguments)
        work, outputs = counted[key]
        values.put_alike(segment, outputs, tensors.mode)
        found[number] = Work(found[number].flops + work.flops, found[number].attention + work.attention)
    return RankWork(tuple(found), tensors.activations)


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

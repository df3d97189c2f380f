"""Blocks outside training: their ports resolved against named values, and their graphs run on these.

Values may be tensors with contents (to check a capture against the model it came from) or without (to learn shapes,
whatever the size of the model, with nothing computed or allocated). What segments keep and need, and how they are
trained, is `engine/trace.py`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.expressions import evaluate
from phalanx.model.captured import Captured
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Blocks, Port

Change = Callable[[fx.Graph], None]


def _unchanged(graph: fx.Graph) -> None:
    pass


class Values:
    """What the ports of blocks stand for, at one shape of micro-batch. tables: by kind of port, then by name."""

    def __init__(self, dims: Mapping[str, int], tables: Mapping[str, dict[str, Any]]) -> None:
        self.dims = dims
        self.tables: dict[str, dict[str, Any]] = {"activation": {}, "value": {}, **tables}

    def arguments(self, ports: Iterable[Port]) -> list[Any]:
        return [self._argument(port) for port in ports]

    def _argument(self, port: Port) -> Any:
        if port.kind == "size":
            return evaluate(port.name, self.dims)
        # A slice's whole micro-batch looks like what it is a slice of.
        return self.tables[port.kind.removeprefix("whole_")][port.name]

    def put(self, block: Block, outputs: Iterable[Any]) -> None:
        self.tables["activation"].update(zip(block.outputs, outputs, strict=True))

    def put_alike(self, block: Block, outputs: Iterable[Tensor], mode: FakeTensorMode) -> None:
        """Tensors without contents that look like these, but lie by themselves."""
        with mode:
            self.put(block, [torch.empty(tuple(t.shape), dtype=t.dtype) for t in outputs])

    def run_prologue(self, blocks: Blocks, change: Change = _unchanged) -> None:
        """What is made of the inputs alone."""
        outputs = _call(blocks.prologue, self.arguments(blocks.prologue_ports), change)
        self.tables["value"].update(zip(blocks.values, outputs, strict=True))

    def run(self, blocks: Blocks, block: Block, change: Change) -> None:
        self.put(block, _call(blocks.templates[block.template].text, self.arguments(block.ports), change))


def _call(text: str, arguments: Sequence[Any], change: Change) -> tuple[Any, ...]:
    graph = graphs.load(text)
    change(graph)
    return fx.GraphModule({}, graph)(*arguments)


def sum_and_count(
    blocks: Blocks,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    dims: dict[str, int],
    dropout: Mapping[str, Tensor],
    *,
    change: Change = _unchanged,
) -> tuple[Tensor, Tensor]:
    """The loss as a sum over items, and their number: node by node under autograd, in one process, with nothing saved,
    cut or compiled. `change` is applied to every graph before it is run."""
    values = Values(dims, {
        "parameter": dict(parameters), "buffer": dict(buffers), "constant": dict(blocks.constants),
        "input": dict(inputs), "dropout": dict(dropout),
    })  # fmt: skip
    values.run_prologue(blocks, change)
    for block in blocks.blocks:
        values.run(blocks, block, change)
    return values.tables["activation"][blocks.loss], values.tables["value"][blocks.count]


def without_contents(
    captured: Captured,
    blocks: Blocks,
    shapes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    dims: Mapping[str, int],
    mode: FakeTensorMode,
) -> Values:
    """Fake tensors for all that blocks are given but activations. shapes: of the parameters. blocks: those of the
    model, or what was made of them; past and start of a slice are numbers in tensors."""

    def empty(shape: Iterable[int], of: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=of)

    def numbers(kind: str, *shape: int) -> dict[str, Tensor]:
        return {name: empty(shape, torch.int64) for block in blocks.blocks for name in block.names(kind)}

    with mode, torch.no_grad():
        values = Values(dims, {
            "parameter": {name: empty(shape, dtype) for name, shape in shapes.items()},
            "buffer": {name: empty(tensor.shape, tensor.dtype) for name, tensor in captured.buffers.items()},
            "constant": {name: empty(tensor.shape, tensor.dtype) for name, tensor in blocks.constants.items()},
            "input": {
                spec.name: empty(
                    (dims[dim] if isinstance(dim, str) else dim for dim in spec.dims),
                    torch.int64 if spec.dtype == "int64" else dtype,
                )
                for spec in captured.inputs
            },
            "dropout": numbers("dropout", dims["batch"]), "past": numbers("past"), "start": numbers("start"),
        })  # fmt: skip
        values.run_prologue(blocks)
    return values


def tensor_ports(block: Block) -> list[Port]:
    return [port for port in block.ports if port.kind != "size"]

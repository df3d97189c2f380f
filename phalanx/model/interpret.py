"""Blocks run the plain way: node by node under autograd, in one process, with nothing saved, cut or compiled.

Used to check a capture against the model it came from; training goes through segments and the engine instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from phalanx.expressions import evaluate
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Blocks, Port


def sum_and_count(
    blocks: Blocks,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    dims: dict[str, int],
    dropout: Mapping[str, Tensor],
    *,
    change: Callable[[fx.Graph], None] = lambda graph: None,
) -> tuple[Tensor, Tensor]:
    """The loss as a sum over items, and their number. `change` is applied to every graph before it is run."""
    sources: dict[str, dict[str, Any]] = {
        "parameter": dict(parameters), "buffer": dict(buffers), "constant": dict(blocks.constants),
        "input": dict(inputs), "dropout": dict(dropout), "wire": {}, "value": {},
    }  # fmt: skip

    def argument(port: Port) -> Any:
        return evaluate(port.name, dims) if port.kind == "size" else sources[port.kind][port.name]

    def call(text: str, ports: tuple[Port, ...]) -> tuple[Any, ...]:
        graph = graphs.load(text)
        change(graph)
        return fx.GraphModule({}, graph)(*[argument(port) for port in ports])

    sources["value"].update(zip(blocks.values, call(blocks.prologue, blocks.prologue_ports), strict=True))
    for block in blocks.blocks:
        outputs = call(blocks.templates[block.template].text, block.ports)
        sources["wire"].update(zip(block.outputs, outputs, strict=True))
    return sources["wire"][blocks.loss], sources["value"][blocks.count]

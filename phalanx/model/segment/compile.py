"""How a cut-out graph becomes something callable: as it is, or compiled.

Graphs arrive with concrete shapes and no autograd, so one compilation serves every block that shares a template.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

MODES = ("off", "aot_eager", "inductor")


@dataclass(frozen=True)
class Compiler:
    """mode: 'off' runs PyTorch's kernels one by one; 'aot_eager' the same through the compiler's front end (for tests);
    'inductor' fuses."""

    mode: str

    @property
    def fuses(self) -> bool:
        return self.mode != "off"

    @property
    def decompositions(self) -> dict[Any, Callable[..., Any]] | None:
        if self.mode == "off":
            return None
        from torch._inductor.decomposition import select_decomp_table

        return select_decomp_table()

    def __call__(self, graph: fx.Graph) -> Callable[..., Any]:
        """Placeholders of `graph` carry example values in their metadata, as traced graphs do.

        The backend is called directly: the graph is already captured, and the guards that torch.compile would check on
        every call cost more than launching the work of a small segment.
        """
        module = fx.GraphModule({}, graph)
        has_work = any(node.op == "call_function" for node in graph.nodes)
        if self.mode == "off" or not has_work:
            return module.forward
        from torch._dynamo.backends.registry import lookup_backend

        examples = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
        return lookup_backend(self.mode)(module, examples)


def resolve_mode(choice: str, device: torch.device) -> str:
    """'auto' compiles on GPUs and runs as it is on CPUs, where compiling costs more than it gains for short runs."""
    if choice == "auto":
        return "inductor" if device.type == "cuda" else "off"
    return choice

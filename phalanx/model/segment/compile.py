"""How a cut-out graph becomes something callable: as it is, or compiled.

Graphs arrive with concrete shapes and no autograd, so one compilation serves every block that shares a template.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.compiler.config
from torch import Tensor, fx
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from phalanx.config import cache_folder
from phalanx.model.our_code import our_code
from phalanx.model.segment.eager import as_function

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
        """Nodes of `graph` carry example values in their metadata, as traced graphs do. What the function takes and
        gives has the strides of those.

        The backend is called directly: the graph is already captured, and the guards that torch.compile would check on
        every call cost more than launching the work of a small segment.
        """
        has_work = any(node.op == "call_function" for node in graph.nodes)
        if self.mode == "off" or not has_work:
            return as_function(graph)
        module = fx.GraphModule({}, graph)
        # What was compiled is found again by later runs, also after the machine was started anew.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
        from torch._dynamo.backends.registry import lookup_backend

        examples = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
        (results,) = (node.args[0] for node in graph.nodes if node.op == "output")
        assert isinstance(results, tuple)
        with _findable_again(examples):
            function = lookup_backend(self.mode)(module, examples)
        return _Declared(function, [_strides(node) for node in results])


@contextmanager
def _findable_again(examples: Sequence[Any]) -> Iterator[None]:
    """While it is open, torch keeps what it compiles on disk and takes it from there: it does so only where it knows
    how shapes were assumed. Ours are numbers. Of our own operators torch knows the names alone: what was compiled for
    others of the same names is not taken."""
    mode, config = detect_fake_mode(examples) or FakeTensorMode(), cast(Any, torch.compiler.config)
    before, mode.shape_env = mode.shape_env, mode.shape_env or ShapeEnv()
    try:
        with config.patch(cache_key_tag=f"{config.cache_key_tag}{our_code()}"), tracing(TracingContext(mode)):
            yield
    finally:
        mode.shape_env = before


class _Declared:
    """A compiled function that gives its results with the strides that were declared.

    Inductor computes a product with an odd number of columns (GPT-2's vocabulary) with padding, where that is faster,
    and gives a part of it. Others were compiled for strides without, and collectives want none.
    """

    def __init__(self, function: Callable[..., Any], strides: Sequence[tuple[int, ...] | None]) -> None:
        self._function, self._strides = function, strides
        self._others: list[int] | None = None  # results with other strides: the same in every call

    def __call__(self, *arguments: Any) -> Any:
        results = self._function(*arguments)
        if self._others is None:
            self._others = [i for i, (r, s) in enumerate(zip(results, self._strides, strict=True)) if _differs(r, s)]
        if not self._others:
            return results
        results = list(results)
        for index in self._others:
            strides = self._strides[index]
            assert strides is not None
            results[index] = results[index].new_empty_strided(results[index].shape, strides).copy_(results[index])
        return tuple(results)


def _strides(node: Any) -> tuple[int, ...] | None:
    value = node.meta["val"] if isinstance(node, fx.Node) else None
    return value.stride() if isinstance(value, Tensor) else None


def _differs(result: Any, strides: tuple[int, ...] | None) -> bool:
    """Strides of dims with one element mean nothing."""
    if strides is None or not isinstance(result, Tensor):
        return False
    return any(n > 1 and a != b for n, a, b in zip(result.shape, result.stride(), strides, strict=True))


def resolve_mode(choice: str, device: torch.device) -> str:
    """'auto' compiles on GPUs and runs as it is on CPUs, where compiling costs more than it gains for short runs."""
    if choice != "auto":
        return choice
    if device.type != "cuda":
        return "off"
    missing = _missing_for_inductor()
    if missing:
        warnings.warn(f"{missing}, so segments are not compiled and training is slower", stacklevel=2)
    return "off" if missing else "inductor"


@cache
def _missing_for_inductor() -> str:
    """What a slim machine lacks to compile for a GPU: kernels are written in Triton and launched through C."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "no C compiler was found (install gcc or set CC)"
    return ""

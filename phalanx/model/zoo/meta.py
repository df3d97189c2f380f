"""Modules whose parameters have shape and dtype but no storage, while their buffers keep their values.

torch's own meta device would empty the buffers too (rotary tables, causal masks, position ids), and no checkpoint
could bring them back. Loading values into such a module is `weights/weights.py`'s business.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from phalanx.errors import ModelError

_FILLS = {
    "normal_", "uniform_", "trunc_normal_", "zero_", "fill_", "zeros_", "ones_", "constant_", "kaiming_uniform_",
    "kaiming_normal_", "xavier_uniform_", "xavier_normal_",
}  # fmt: skip


@contextmanager
def parameters_on_meta(*, enabled: bool = True) -> Iterator[None]:
    """Within it every parameter that a module registers is moved to the meta device at once.

    So at most one parameter has storage at a time, and initialisation, which comes after registration, is left out.
    """
    if not enabled:
        yield
        return
    register = nn.Module.register_parameter
    # A parameter registered twice is a tie: it must become one parameter again.
    moved = WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in moved:
                moved[param] = _on_meta(param)
            param = moved[param]
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        with _NothingToFill():
            yield
    finally:
        nn.Module.register_parameter = register


class _NothingToFill(TorchFunctionMode):
    """Within it what fills tensors leaves those alone that have no storage: to no effect it would take milliseconds,
    twice for every parameter of a model."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in _FILLS:
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **given)


def twin(module: nn.Module, dtype: torch.dtype, device: str, name: str) -> nn.Module:
    """A copy of a module the user built, with the wanted dtype and device; theirs is left as it is.

    Parameters that need no change are shared, so training the copy trains the user's module. Buffers of HuggingFace
    models keep their dtype, as they do when the model is built in that dtype.
    """
    keeps_buffer_dtype = isinstance(module, PreTrainedModel)
    try:
        copies: dict[int, object] = {id(p): _converted(p, dtype, device) for p in module.parameters()}
        for buffer in module.buffers():
            wanted = buffer.dtype if keeps_buffer_dtype or not buffer.is_floating_point() else dtype
            copies[id(buffer)] = buffer if buffer.is_meta else buffer.detach().to("cpu", wanted, copy=True)
        return copy.deepcopy(module, copies)
    except (TypeError, RuntimeError) as error:
        raise ModelError(
            f"module {name!r} cannot be copied: {error}",
            hint="hand over a factory, and keep what cannot be copied (locks, files, processes) out of the module",
        ) from error


def require_readable(module: nn.Module, name: str) -> None:
    """What torch.jit made is no Python any more; lazy modules of torch's have no shapes before they are called."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelError(
            f"module {name!r} is a script or trace of torch.jit, whose code cannot be read as a graph",
            hint="hand over the module that it was made of",
        )
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"'{path}' of module {name!r} has no shape yet, as in lazy modules before their first call",
                hint="call the module once with a batch before it is trained",
            )


def require_real_buffers(module: nn.Module, name: str) -> None:
    for path, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {path!r} of {name!r} is computed from parameters while the module is built, "
                "so it has no value on the meta device",
                hint="compute the buffer in forward, or make it a parameter",
            )


def _converted(parameter: nn.Parameter, dtype: torch.dtype, device: str) -> nn.Parameter:
    wanted = dtype if parameter.is_floating_point() else parameter.dtype
    if parameter.dtype == wanted and parameter.device.type == device:
        return parameter
    if device == "meta":
        return _on_meta(parameter, wanted)
    return nn.Parameter(parameter.detach().to(device, wanted), requires_grad=parameter.requires_grad)


def _on_meta(parameter: nn.Parameter, dtype: torch.dtype | None = None) -> nn.Parameter:
    empty: Tensor = torch.empty_like(parameter, device="meta", dtype=dtype, requires_grad=False)
    moved = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    vars(moved).update(vars(parameter))
    return moved

"""The plain model in plain PyTorch: unpatched classes, eager attention, raw labels. What every plan must equal.

Two things are put into it from outside. Dropout decisions come from the same keys as ours, found by module path and
call index, because independent random streams cannot be compared. In float64 the casts to float32 that models carry
inside are widened, because their rounding would hide real errors; ours are widened by a graph pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel

from phalanx.errors import CaptureError
from phalanx.model.ops import random
from phalanx.model.zoo.zoo import ModelSpec, build


class Widen(TorchDispatchMode):
    """Every request for float32 gets float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        kwargs = {key: swap(value) for key, value in (kwargs or {}).items()}
        return func(*[swap(arg) for arg in args], **kwargs)


class KeyedDropout(TorchFunctionMode):
    """Replaces each dropout decision by the keyed one of its place. `attention`: module paths whose 4-d dropout is that
    of attention probabilities."""

    def __init__(self, model: nn.Module, keys: Tensor, attention: Sequence[str]) -> None:
        super().__init__()
        self.keys, self.attention = keys, attention
        self._paths: list[str] = []
        self._calls: dict[str, int] = {}
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, path=path: self._paths.append(path)))
            self._handles.append(module.register_forward_hook(lambda *_: self._leave()))

    def _leave(self) -> None:
        self._paths.pop()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for handle in self._handles:
            handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.dropout:
            names = ("input", "p", "training")
            given = {"p": 0.5, "training": True, **dict(zip(names, args, strict=False)), **kwargs}
            return self._drop(given["input"], given["p"], given["training"])
        return func(*args, **kwargs)

    def _drop(self, x: Tensor, p: float, training: bool) -> Tensor:
        if not p or not training:
            return x
        path = self._paths[-1] if self._paths else ""
        attending = [site for site in self.attention if path == site or path.startswith(site + ".")]
        if x.dim() == 4 and attending:
            keys = self._site_keys(max(attending, key=len))
            heads, queries = (torch.arange(size) for size in x.shape[1:3])
            keep = random.keep_attention(keys, heads, queries, x.shape[3], p)
        else:
            keep = random.keep_features(self._site_keys(path), x.shape, p)
        return torch.where(keep, x * random.scale(p), 0.0)

    def _site_keys(self, path: str) -> Tensor:
        index = self._calls[path] = self._calls.get(path, -1) + 1
        return random.site_keys(self.keys, torch.tensor([random.site_hash(f"{path}#{index}")]))[0]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within, tensors whose dtype a model leaves open are in float64, if that is what the model computes in."""
    before = torch.get_default_dtype()
    try:
        if dtype == torch.float64:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def injected(model: nn.Module, keys: Tensor, attention: Sequence[str], dtype: torch.dtype) -> Iterator[None]:
    """Within, `model`'s forward draws keyed dropout and, in float64, computes in float64 throughout."""
    widen = Widen() if dtype == torch.float64 else contextlib.nullcontext()
    with KeyedDropout(model, keys, attention), default_dtype(dtype), widen:
        yield


def plain(spec: ModelSpec, dtype: torch.dtype, dropout: float | None, *, pretrained: bool = False) -> nn.Module:
    """The unpatched model: eager attention, and for mixtures the loop over experts. pretrained: with the weights of its
    folder, read by transformers."""
    model = build(spec, dtype=dtype, device="meta" if pretrained else "cpu", attention="eager", dropout=dropout)
    if pretrained:
        assert isinstance(model, PreTrainedModel) and spec.folder is not None
        model = type(model).from_pretrained(
            spec.folder, config=model.config, dtype=dtype, attn_implementation="eager", local_files_only=True,
        ).train()  # fmt: skip
    if dtype == torch.float64:
        model = model.double()  # tables that a model keeps in float32 whatever its dtype
    if isinstance(config := getattr(model, "config", None), PretrainedConfig):
        config._experts_implementation = "eager"
    return model


def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The model's own loss for a batch."""
    return loss_of(model(**inputs))


def loss_of(output: Any) -> Any:
    """Of what a model returns: the number itself, what is named so, or the first of several; None for no loss."""
    if output is None or isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    if hasattr(output, "loss"):  # a dataclass or a named tuple
        return output.loss
    if isinstance(output, tuple | list):
        return output[0] if output else None
    raise CaptureError(
        f"the model returned {type(output).__name__}, in which nothing is named loss",
        "return one floating-point number, a dict or an object with one under 'loss', or a tuple that begins with it",
    )

"""The update of one step: clipping, skipping of non-finite gradients, the optimizer, refreshed copies.

On the way that is fused nothing waits for the device: clipping and skipping are decided there. State goes in and out as
named tensors. Which optimizer it is was decided in `optimizer_choice.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.params.streams import Streams
from phalanx.runtime.parameters import Weight

_GROUP = "group."
_PLAIN = bool | int | float | str | None
_NUM_STREAMS = 2  # more of them gain nothing
_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping equals it


class Optimizer:
    """Updates the pieces in `weights` by their gradients and rounds them into the copies that the model computes with.

    A weight and its copy are one tensor unless weights are kept in higher precision.
    """

    def __init__(self, inner: torch.optim.Optimizer, weights: Mapping[str, Weight], clip: float | None) -> None:
        self.inner, self.weights, self.clip = inner, weights, clip
        apart = [weight for weight in weights.values() if weight.copy is not weight.exact]
        self._copies, self._copied = [weight.copy for weight in apart], [weight.exact for weight in apart]
        # Only these start from zeroed state: fused SGD, told to skip its first step, leaves its momentum undefined.
        adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        self._skips_on_device = adam and bool(inner.defaults.get("fused"))
        # A step of torch's own Adam is one of each weight that has a gradient, so it can be made in parts.
        divisible = self._skips_on_device and type(inner) in (torch.optim.Adam, torch.optim.AdamW)
        device = next((weight.exact.device for weight in weights.values()), torch.device("cpu"))
        self._streams = Streams(device, _NUM_STREAMS if divisible and device.type == "cuda" else 1)

    def step(
        self, gradients: Mapping[str, Tensor], lr: float, norm: Tensor, finite: Tensor, loss_scale: Tensor | None = None
    ) -> None:
        """One update. A weight without a gradient is left alone; if not all is finite, nothing changes.

        norm: of the gradients of all ranks, before clipping. loss_scale: what gradients are still multiplied by.
        """
        for group in self.inner.param_groups:
            group["lr"] = lr
        factor = self._divisor(norm, loss_scale)
        if self._skips_on_device:
            self._update_on_device(gradients, factor, finite)
        elif bool(finite):
            _divide(gradients, factor)
            self._update(gradients)
        if self._copied:
            torch._foreach_copy_(self._copies, self._copied)

    def squared_norm(self, gradients: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The squared norm of these gradients as one vector; zero, on the device of `like`, if there are none."""
        squares = self._streams.run(lambda part: squared_norm(list(part.values())), gradients)
        return torch.stack(squares).sum() if squares else torch.zeros_like(like)

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """The state's tensors as (slot, parameter, tensor)."""
        for name, weight in self.weights.items():
            for slot, value in self.inner.state.get(weight.exact, {}).items():
                if isinstance(value, Tensor):
                    yield slot, name, value

    def scalars(self) -> dict[str, Any]:
        """What else the state holds, by the same names; JSON."""
        found = {key: value for key, value in self._state() if not isinstance(value, Tensor)}
        for key, value in found.items():
            if not isinstance(value, _PLAIN):
                raise CheckpointError(
                    f"{type(self.inner).__name__} keeps a {type(value).__name__} in {key}, which cannot be saved",
                    "choose an optimizer whose state holds tensors and numbers by parameter",
                )
        return found

    def load(
        self, slots: Iterable[tuple[str, str]], read: Callable[[str, str], Tensor], scalars: Mapping[str, Any]
    ) -> None:
        """Takes back what `tensors` and `scalars` gave. slots: the (slot, parameter) pairs of all ranks; `read` gives
        this rank's piece of one."""
        groups = {id(weight): group for group in self.inner.param_groups for weight in group["params"]}
        for slot, name in slots:
            if name in self.weights:
                weight = self.weights[name].exact
                self.inner.state[weight][slot] = read(slot, name).to(_home(slot, weight, groups[id(weight)]))
        for key, value in scalars.items():
            _, slot, name = key.split("/", 2)
            if slot.startswith(_GROUP):
                self.inner.param_groups[int(slot.removeprefix(_GROUP))][name] = value
            elif name in self.weights:
                self.inner.state[self.weights[name].exact][slot] = value

    def _state(self) -> Iterator[tuple[str, Any]]:
        for number, group in enumerate(self.inner.param_groups):
            for name, value in group.items():
                # Lists and tuples are arguments (betas), which the options give again.
                if isinstance(value, Tensor | _PLAIN):
                    yield f"optimizer/{_GROUP}{number}/{name}", value
        for name, weight in self.weights.items():
            for slot, value in self.inner.state.get(weight.exact, {}).items():
                yield f"optimizer/{slot}/{name}", value

    def _divisor(self, norm: Tensor, loss_scale: Tensor | None) -> Tensor | None:
        """What gradients are to be divided by before they are used; None for nothing."""
        if self.clip is None:
            return loss_scale
        clipping = ((norm + _EPSILON) / self.clip).clamp(min=1.0)
        return clipping if loss_scale is None else clipping * loss_scale

    def _update_on_device(self, gradients: Mapping[str, Tensor], divisor: Tensor | None, finite: Tensor) -> None:
        # torch's fused optimizers divide gradients by `grad_scale` as they read them, and do nothing on `found_inf`.
        inner: Any = self.inner
        inner.found_inf = (~finite).float()
        inner.grad_scale = None
        if any(gradient.dtype == torch.float64 for gradient in gradients.values()):
            _divide(gradients, divisor)  # their scale is float32, too coarse here
        elif divisor is not None:
            inner.grad_scale = divisor.float()
        self._streams.run(self._update, gradients)

    def _update(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            weight = self.weights[name].exact
            weight.grad = gradient.to(weight.dtype)
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)


def squared_norm(gradients: list[Tensor]) -> Tensor:
    norms: list[Tensor] = []
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):  # torch fuses only over one dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms += torch._foreach_norm([g for g in gradients if g.dtype == dtype], 2, dtype=wide)
    return torch.stack(norms).double().square().sum()


def _divide(gradients: Mapping[str, Tensor], divisor: Tensor | None) -> None:
    if divisor is not None and gradients:
        torch._foreach_mul_(list(gradients.values()), divisor.reciprocal())


def _home(slot: str, weight: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where torch's optimizers keep a state: beside its weight, but plain step counters on the host."""
    if slot == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return weight.device

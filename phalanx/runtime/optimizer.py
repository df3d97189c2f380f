"""The update of one step: global norm, clipping, skipping of non-finite gradients, the optimizer, refreshed copies.

On the way that is fused nothing waits for the device: clipping and skipping are decided there. State goes in and out as
named tensors. Which optimizer it is was decided in `optimizer_choice.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError
from phalanx.runtime.lanes import Lanes

_GROUP = "group."
_PLAIN = bool | int | float | str | None
_LANES = 2  # more of them gain nothing
_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping equals it


class Optimizer:
    """Updates `weights` by their gradients and writes them into `copies`, which the engine computes with.

    A weight and its copy are one tensor unless weights are kept in higher precision.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        weights: Mapping[str, Tensor],
        copies: Mapping[str, Tensor],
        clip: float | None,
    ) -> None:
        self.inner, self.weights, self.clip = inner, weights, clip
        apart = [name for name, weight in weights.items() if copies[name] is not weight]
        self._copies, self._copied = [copies[name] for name in apart], [weights[name] for name in apart]
        # Only these start from zeroed state: fused SGD, told to skip its first step, leaves its momentum undefined.
        adam = isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        self._skips_on_device = adam and bool(inner.defaults.get("fused"))
        # A step of torch's own Adam is one of each weight that has a gradient, so it can be made in parts.
        divisible = self._skips_on_device and type(inner) in (torch.optim.Adam, torch.optim.AdamW)
        device = next((weight.device for weight in weights.values()), torch.device("cpu"))
        self._lanes = Lanes(device, _LANES if divisible and device.type == "cuda" else 1)

    def step(self, gradients: Mapping[str, Tensor], lr: float, loss: Tensor) -> tuple[Tensor, Tensor]:
        """One update; returns the gradients' norm before clipping and whether the update was made, both on the device.

        A weight without a gradient is left alone. If the loss or any gradient is not finite, nothing changes.
        """
        if not gradients:
            raise ConfigError("no trainable parameter takes part in the loss", "unfreeze one that does")
        norm = self._norm(gradients)
        finite = norm.isfinite() & loss.isfinite()
        for group in self.inner.param_groups:
            group["lr"] = lr
        if self._skips_on_device:
            self._update_on_device(gradients, norm, finite)
        elif bool(finite):
            self._clip_in_place(gradients, norm)
            self._update(gradients)
        if self._copied:
            torch._foreach_copy_(self._copies, self._copied)
        return norm, finite

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The state's tensors as `optimizer/<slot>/<parameter>`; what a group keeps has the slot `group.<number>`."""
        for key, value in self._state():
            if isinstance(value, Tensor):
                yield key, value

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

    def load(self, names: Iterable[str], read: Callable[[str], Tensor], scalars: Mapping[str, Any]) -> None:
        """Takes back what `tensors` and `scalars` gave; `names` lists the tensors there are, others among them."""
        groups = {id(weight): group for group in self.inner.param_groups for weight in group["params"]}
        for key in (*(name for name in names if name.startswith("optimizer/")), *scalars):
            _, slot, name = key.split("/", 2)
            value = scalars[key] if key in scalars else read(key)
            if slot.startswith(_GROUP):
                self.inner.param_groups[int(slot.removeprefix(_GROUP))][name] = value
                continue
            weight = self.weights[name]
            if isinstance(value, Tensor):
                value = value.to(_home(slot, weight, groups[id(weight)]))
            self.inner.state[weight][slot] = value

    def _state(self) -> Iterator[tuple[str, Any]]:
        for number, group in enumerate(self.inner.param_groups):
            for name, value in group.items():
                # Lists and tuples are arguments (betas), which the options give again.
                if isinstance(value, Tensor | _PLAIN):
                    yield f"optimizer/{_GROUP}{number}/{name}", value
        for name, weight in self.weights.items():
            for slot, value in self.inner.state.get(weight, {}).items():
                yield f"optimizer/{slot}/{name}", value

    def _norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        norms = self._lanes.run(lambda part: global_norm(list(part.values())), gradients)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _update_on_device(self, gradients: Mapping[str, Tensor], norm: Tensor, finite: Tensor) -> None:
        # torch's fused optimizers divide gradients by `grad_scale` as they read them, and do nothing on `found_inf`.
        inner: Any = self.inner
        inner.found_inf = (~finite).float()
        inner.grad_scale = None
        if norm.dtype == torch.float64:
            self._clip_in_place(gradients, norm)  # their scale is float32, too coarse here
        elif self.clip is not None:
            inner.grad_scale = ((norm + _EPSILON) / self.clip).clamp(min=1.0)
        self._lanes.run(self._update, gradients)

    def _clip_in_place(self, gradients: Mapping[str, Tensor], norm: Tensor) -> None:
        if self.clip is not None:
            torch._foreach_mul_(list(gradients.values()), (self.clip / (norm + _EPSILON)).clamp(max=1.0))

    def _update(self, gradients: Mapping[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            weight = self.weights[name]
            weight.grad = gradient.to(weight.dtype)
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients as one vector, in their precision (float32 at least)."""
    norms: list[Tensor] = []
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):  # torch fuses only over one dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms += torch._foreach_norm([g for g in gradients if g.dtype == dtype], 2, dtype=wide)
    return torch.linalg.vector_norm(torch.stack(norms))


def _home(slot: str, weight: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where torch's optimizers keep a state: beside its weight, but plain step counters on the host."""
    if slot == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu")
    return weight.device

"""The gradients of a session in a loop of the user's own, between the call that makes them and the update.

They lie in the `grad` of what a rank updates, where any optimizer finds them. Where the plan keeps the state of the
optimizer on the host, gradients go there while the backward runs; then they stay in the step's run until it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from phalanx.engine.reductions import StepRun
from phalanx.errors import ConfigError
from phalanx.params.parameters import Weight
from phalanx.session.session import Session

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Gradients(Protocol):
    """norm: a number that is finite if all gradients are; None where there are none."""

    norm: Tensor | None

    def add(self, session: Session, run: StepRun, scale: float) -> None: ...

    def clip(self, session: Session, max_norm: float) -> Tensor: ...

    def update(self, session: Session) -> Tensor:
        """By the session's own optimizer; whether it was made."""
        ...

    def forget(self, session: Session) -> None: ...

    def begin(self) -> None:
        """Refuses a batch whose gradients could not be kept as the loop wants them."""
        ...


class InWeights:
    """In the `grad` of every weight. stand_in: what a rank without weights updates."""

    def __init__(self, weights: Mapping[str, Weight], stand_in: Tensor | None = None) -> None:
        self._weights, self._stand_in = weights, stand_in
        self._last: StepRun | None = None
        self.norm: Tensor | None = None

    def begin(self) -> None:
        """Any number of batches add up."""

    @torch.no_grad()
    def add(self, session: Session, run: StepRun, scale: float) -> None:
        """Free of the scale of the loss."""
        loss_scale = session.state.loss_scale
        factor = scale if loss_scale is None else scale / loss_scale.value
        for name, gradient in run.gradients.items():
            weight = self._weights[name].exact
            if not weight.requires_grad:  # frozen by the loop
                continue
            own = (gradient * factor).to(weight.dtype).view(weight.shape)
            weight.grad = own if weight.grad is None else weight.grad.add_(own)
        assert run.norm is not None
        norm = run.norm * scale
        self.norm = norm if self.norm is None else self.norm + norm
        if len(session.connected.world.ranks) > 1:
            self._spread(norm)
        session.step.engine.abandon(run)
        session.step.engine.parts.sends.settle()
        self._last = run

    def _spread(self, norm: Tensor) -> None:
        """What is not finite on one rank is so on all, in one gradient at least: whoever looks at this rank's gradients
        alone (torch's GradScaler) then decides as on the others."""
        there = list(self._there().values())
        if self._stand_in is not None:
            there = [torch.zeros_like(self._stand_in) if self._stand_in.grad is None else self._stand_in.grad]
            self._stand_in.grad = there[0]
        if there:
            min(there, key=Tensor.numel).mul_(norm * 0.0 + 1.0)

    @torch.no_grad()
    def clip(self, session: Session, max_norm: float) -> Tensor:
        gradients = self._there()
        totals = session.step.engine.parts.totals
        assert totals is not None
        norm = totals.norm_of(gradients, torch.zeros((), dtype=torch.float64, device=session.compiled.device))
        if gradients:
            torch._foreach_mul_(list(gradients.values()), (max_norm / (norm + _EPSILON)).clamp(max=1.0))
        return norm

    def update(self, session: Session) -> Tensor:
        assert self._last is not None and self.norm is not None
        return session.step.update(self._last, self._there(), self.norm)

    def forget(self, session: Session) -> None:
        for weight in self._weights.values():
            weight.exact.grad = None
        if self._stand_in is not None:
            self._stand_in.grad = None
        self.norm = None

    def _there(self) -> dict[str, Tensor]:
        return {name: w.exact.grad for name, w in self._weights.items() if w.exact.grad is not None}


def taken(session: Session, run: StepRun) -> dict[str, Tensor]:
    """The gradients of a run that nobody uses further, as far as they lie on this rank."""
    if session.compiled.device.type == "cuda":
        torch.cuda.synchronize()  # some may be on their way to the host
    found = {name: gradient.detach().clone() for name, gradient in run.gradients.items()}
    session.step.engine.abandon(run)
    session.step.engine.parts.sends.settle()
    return found


class InRun:
    """In the run that made them, some of them on the host."""

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        self._weights = weights
        self._run: StepRun | None = None
        self._clip: float | None = None
        self.norm: Tensor | None = None

    def begin(self) -> None:
        if self._run is not None:
            raise ConfigError(
                "session.forward_backward: the plan keeps the optimizer's state on the host, where gradients of "
                "several batches do not add up",
                "call session.step() after every batch; a larger batch in more micro-batches (mb=…) does the same",
            )
        for name, weight in self._weights.items():
            if not weight.exact.requires_grad:
                raise ConfigError(
                    f"session.forward_backward: {name} was frozen by requires_grad_(False), where the plan keeps the "
                    "optimizer's state on the host and every weight is updated",
                    "freeze it from the beginning, in the module or by phalanx.open(…, freeze=…), or choose a plan "
                    "that keeps nothing of the optimizer on the host",
                )

    def add(self, session: Session, run: StepRun, scale: float) -> None:
        if scale != 1.0:
            session.step.engine.abandon(run)
            raise ConfigError(
                f"session.forward_backward: scale = {scale:g}, where the plan keeps the optimizer's state on the host",
                "leave scale out; batches are not accumulated there",
            )
        self._run, self._clip, self.norm = run, None, run.norm

    def clip(self, session: Session, max_norm: float) -> Tensor:
        """When the update is made."""
        assert self.norm is not None
        self._clip = max_norm
        return self.norm

    def update(self, session: Session) -> Tensor:
        run, hosted, optimizer = self._run, session.state.hosted, session.state.optimizer
        assert run is not None and hosted is not None
        optimizer.clip = self._clip
        optimizer.inner._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]  # for torch's schedulers
        hosted.follow(optimizer, self._clip)
        session.step.engine.run(session.step.program, run)
        self._run = self.norm = None
        assert run.updated is not None
        return run.updated

    def forget(self, session: Session) -> None:
        if self._run is not None:
            session.step.engine.abandon(self._run)
            session.step.engine.parts.sends.settle()
        self._run = self.norm = None

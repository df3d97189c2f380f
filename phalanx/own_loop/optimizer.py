"""What updates the parameters of a session in a loop of the user's own: the session's optimizer, or one that the user
made and steps.

One of the user's knows nothing of sessions, so torch is asked to tell of every step that any optimizer makes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.errors import ConfigError
from phalanx.own_loop.gradients import Gradients, InRun, InWeights
from phalanx.params.optimizer import Optimizer, require_element_wise
from phalanx.session.session import Session


class Updates:
    """is_given: whether the session was opened with an optimizer of its own. makes_gradients: the call before an
    update, for messages."""

    gradients: Gradients

    def __init__(self, session: Session, is_given: bool, makes_gradients: str) -> None:
        self.steps = 0
        self.optimizer: torch.optim.Optimizer | None = session.state.optimizer.inner if is_given else None
        self.is_users = not is_given  # whether the user steps it
        self._makes_gradients = makes_gradients
        self._is_updating = self._is_in_step = False
        if self.optimizer is not None and session.state.hosted is not None:
            self.optimizer.register_step_pre_hook(self._require_whole_step)
        self.take(session)
        self._hooks = _watch_optimizers(self)

    def take(self, session: Session, frozen: Collection[str] = ()) -> None:
        """From now on with this one, whose state lies elsewhere than that of the one before. frozen: by the loop, on
        whichever ranks it was."""
        self._session, self.weights = session, session.state.parameters.trained
        for name, weight in self.weights.items():
            weight.exact.requires_grad_(name not in frozen)
        self._stand_in = None if self.weights else torch.zeros(1, device=session.compiled.device, requires_grad=True)
        self._ids = {id(tensor) for tensor in self.parameters()}
        is_here = session.state.hosted is None
        self.gradients = InWeights(self.weights, self._stand_in) if is_here else InRun(self.weights)

    def parameters(self) -> list[Tensor]:
        """What an optimizer is made of. torch refuses one of nothing, so a rank that has nothing to update, as where
        all of its stage is frozen, has a zero that stays one."""
        return [weight.exact for weight in self.weights.values()] or [cast(Tensor, self._stand_in)]

    def frozen(self) -> list[str]:
        """What the loop froze of what lies here."""
        return [name for name, weight in self.weights.items() if not weight.exact.requires_grad]

    def under(self, session: Session) -> None:
        """From now on with this one, which has the same state."""
        self.forget()
        self._session = session

    def close(self) -> None:
        self._ids.clear()
        for hook in self._hooks:
            hook.remove()

    # What a loop asks for.

    def step(self) -> Tensor:
        """One update by the gradients there are, which it uses up; whether it was made."""
        if self.optimizer is None:
            raise ConfigError(
                "session.step() has no optimizer",
                "give one to phalanx.open(…, optimizer='adamw', lr=…), or make your own of session.parameters() and "
                "call its step()",
            )
        norm = self._norm("session.step()")
        if self.is_users:
            self.optimizer.step()
            return norm.isfinite()
        self._is_updating = True
        try:
            updated = self.gradients.update(self._session)
        finally:
            self._is_updating = False
        self.forget()
        self.steps += 1
        return updated

    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients of all ranks; those above `max_norm` are scaled down to it."""
        self._norm("session.clip_grad_norm_()")
        return self.gradients.clip(self._session, max_norm)

    def forget(self) -> None:
        """All gradients."""
        self.gradients.forget(self._session)

    def refresh(self) -> None:
        """What the model computes with follows parameters that were changed."""
        state, plan = self._session.state, self._session.plan
        with torch.no_grad():
            state.optimizer.refresh()
            if plan.zero in (1, 2):
                state.parameters.share_all(self._session.connected.gather)

    def use(self, given: torch.optim.Optimizer) -> None:
        """An optimizer of the user's is from now on the one that updates, and is saved and loaded."""
        state, kind = self._session.state, type(given).__name__
        if not isinstance(given, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"session.optimizer = {given!r} is no optimizer", "make one of session.parameters()")
        if not any(id(tensor) in self._ids for group in given.param_groups for tensor in group["params"]):
            raise ConfigError(f"{kind} updates no parameter of this session", "make it of session.parameters()")
        if state.hosted is not None:
            raise ConfigError(
                f"{kind}: plan {self._session.plan.shown} keeps the optimizer's state on the host, which an "
                "optimizer of your own cannot do",
                "open the session with optimizer=its class and lr=…, and call session.step()",
            )
        require_element_wise(type(given), self.weights, given.defaults, has_all=self._session.plan.pp == 1)
        self.optimizer, self.is_users = given, True
        state.optimizer = Optimizer(given, self.weights, None)

    def before_batch(self) -> None:
        """Inside a step, whose closure asks for gradients again, at weights that were changed by then."""
        if self._is_in_step:
            self.refresh()

    def require_changeable(self) -> None:
        """Refuses to change the plan where something would be left behind."""
        self.require_own_optimizer()
        if self.gradients.norm is not None:
            raise ConfigError(
                "session.change() found gradients that no update has used", "call session.step() or zero_grad() before"
            )

    def require_own_optimizer(self) -> None:
        if self.is_users:
            raise ConfigError(
                "session.change() moves the state of the session's own optimizer, and this session has none",
                "open it with phalanx.open(…, optimizer='adamw'); or save it, open another one with the new plan, and "
                "load",
            )

    def _norm(self, asked: str) -> Tensor:
        if self.gradients.norm is None:
            raise ConfigError(f"{asked} found no gradients", f"call {self._makes_gradients} before")
        return self.gradients.norm

    # What torch tells of.

    def is_updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it updates parameters of this session, and it is not the session that steps."""
        if self._is_updating:
            return False
        return any(id(tensor) in self._ids for group in optimizer.param_groups for tensor in group["params"])

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer is not self.optimizer:
            self.use(optimizer)
        self._is_in_step = True
        loss_scale = self._session.state.loss_scale
        if loss_scale is not None and self.gradients.norm is not None:
            finite = self.gradients.norm.isfinite()
            loss_scale.update(finite)
            if not bool(finite):  # with nothing to go by it changes nothing
                self.forget()

    def after_step(self) -> None:
        self._is_in_step = False
        self.refresh()
        self.steps += 1
        self.gradients.norm = None

    def _require_whole_step(self, *given: Any) -> None:
        if not self._is_updating:
            raise ConfigError(
                f"the optimizer of this session was asked for a step, and plan {self._session.plan.shown} keeps its "
                "state on the host",
                "call session.step(), which brings state and gradients together",
            )


def _watch_optimizers(updates: Updates) -> list[Any]:
    known = weakref.ref(updates)

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = known()
        if own is not None and own.is_updated_by(optimizer):
            own.before_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = known()
        if own is not None and own.is_updated_by(optimizer):
            own.after_step()

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

"""The model under its plan, as the loop of a Trainer uses it: gradients of a batch, its loss, its outputs.

Where the loss is the model's own it is computed inside of the session. Where the user computes it (`compute_loss`,
`compute_loss_func`, label smoothing) outputs leave and gradients come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from phalanx.config import RunConfig
from phalanx.errors import ConfigError
from phalanx.hf.data import Batch, as_large_as, rows_of
from phalanx.launch.context import RankContext
from phalanx.own_loop.open import open as open_session
from phalanx.own_loop.open import open_on
from phalanx.own_loop.session import OwnSession

UserLoss = Callable[[Any, dict[str, Any], int | None], Tensor]  # model, inputs, items of the step → loss


class Computation:
    """Opened with the first batch that comes. loss: the user's own, called with this as the model. labels: of a batch,
    what a model whose outputs leave does not get."""

    def __init__(
        self, model: nn.Module, plan: str, options: Mapping[str, Any], context: RankContext | None,
        loss: UserLoss | None, labels: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.module, self._plan, self._options, self._context = model, plan, dict(options), context
        self._loss, self._labels = loss, labels
        self.session: OwnSession | None = None
        self._learns: set[str] = set()  # what required a gradient when the session was made
        self._frozen: set[str] = set()  # what of it required none when it was last looked at

    def opened(self, batch: Batch) -> OwnSession:
        """The session; made with this batch where there is none."""
        if self.session is None:
            example = self._of_model(batch) if self._loss else dict(batch)
            loss = "outer" if self._loss else None
            self._learns = {name for name, parameter in self._named() if parameter.requires_grad}
            if self._context is None:
                self.session = open_session(self.module, example=example, plan=self._plan, loss=loss, **self._options)
            else:
                config = RunConfig.create(plan=self._plan, clip=None, **self._options)
                self.session = open_on(self._context, self.module, config, example, loss)
        return self.session

    def freeze_as_the_model(self) -> None:
        """Follows callbacks that freeze parameters of the model, or let them learn again."""
        assert self.session is not None
        wanted = {name for name, parameter in self._named() if parameter.requires_grad}
        if late := sorted(wanted - self._learns):
            raise ConfigError(
                f"Trainer: {late[0]} requires a gradient now, and required none when the model was put under its plan",
                "let it require one from the beginning, and freeze it (requires_grad_(False)) in a callback until it "
                "is to learn",
            )
        before, self._frozen = self._frozen, self._learns - wanted
        if not (changed := before ^ self._frozen):
            return
        for name, tensor in self.session.named_parameters():
            if name in changed:
                tensor.requires_grad_(name in wanted)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(remove_duplicate=False)

    def backward(self, batch: Batch, share: float | None, items: int | None) -> Tensor:
        """Adds the gradients of a batch, and returns what the step's loss has of it. share: of the step's loss, what
        the mean loss of this batch is; None where the user's loss is divided by the items of the step already."""
        if self._loss is None:
            session, factor = self.opened(batch), 1.0 if share is None else share
            return session.forward_backward(as_large_as(session.plan, batch), scale=factor) * factor
        loss = self._loss(self, dict(batch), items)
        loss = loss if share is None else loss * share
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def loss(self, batch: Batch, items: int | None) -> Tensor:
        """Without dropout; nothing is learned from it."""
        if self._loss is not None:
            return self._loss(self, dict(batch), items).detach()
        session = self.opened(batch)
        return torch.tensor(session.evaluate(as_large_as(session.plan, batch)))

    @torch.no_grad()
    def outputs(self, batch: Batch) -> Any:
        """Whole, on every rank, without dropout."""
        session = self.opened(batch)
        given = as_large_as(session.plan, batch if self._loss is None else self._of_model(batch))
        return _first_rows(session.outputs(given), rows_of(batch))

    def __call__(self, **inputs: Any) -> Any:
        """As the model is called in a loss of the user's own. Labels stay outside: a loss cannot leave, only outputs
        with a row for every sample can."""
        given = self._of_model(inputs)
        session = self.opened(given)
        return _first_rows(session(as_large_as(session.plan, given)), rows_of(given))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def _of_model(self, batch: Batch) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in self._labels}


def _first_rows(outputs: Any, rows: int) -> Any:
    """Of the samples that were asked for, by name and by attribute, as HuggingFace's models return them."""
    if isinstance(outputs, Mapping):
        found = ModelOutput()
        for name, value in outputs.items():
            found[name] = _first_rows(value, rows)
        return found
    if isinstance(outputs, tuple | list):
        return tuple(_first_rows(each, rows) for each in outputs)
    return outputs[:rows]

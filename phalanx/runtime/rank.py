"""What lives on this rank's device: parameters, buffers, the optimizer's state, and the engines that run on them.

It is built from values that are read one at a time and gives them back as named tensors; where they come from and go to
is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config import RunConfig
from phalanx.data import Batches
from phalanx.model.captured import Captured
from phalanx.model.segment.compile import Compiler, resolve_mode
from phalanx.plan.plan import Plan
from phalanx.runtime.engine import Engine
from phalanx.runtime.optimizer import Optimizer
from phalanx.runtime.optimizer_choice import make_optimizer
from phalanx.runtime.parameters import load_parameters
from phalanx.runtime.step import Feeder, Step, evaluate, split
from phalanx.state.checkpoint import Checkpoint
from phalanx.tasks.base import Batch


class Rank:
    """Trains and evaluates one captured model under one plan. `step` is called with (batch, stream position, lr)."""

    def __init__(
        self,
        captured: Captured,
        config: RunConfig,
        plan: Plan,
        *,
        device: torch.device,
        trainable: Sequence[str],
        read: Callable[[str, bool], Tensor],
        buffers: Mapping[str, Tensor],
        optimizer_class: type[Any] | None = None,
    ) -> None:
        self.captured, self.device, self.dtype = captured, device, getattr(torch, config.dtype)
        self.compiler = Compiler(resolve_mode(config.compile, device))
        self._seed, self._buffers = config.seed, buffers
        self._sizes = split(config.batch_size, plan.mb)
        self.parameters = load_parameters(
            captured.shapes, read, trainable=trainable, dtype=self.dtype, master_weights=config.master_weights,
            device=device,
        )  # fmt: skip
        weights = self.parameters.weights
        inner = make_optimizer(weights, config, optimizer_class)
        self.optimizer = Optimizer(inner, weights, self.parameters.values, config.clip)
        self.step = Step(self._feeder(trainable, recompute=plan.recompute, dropout=True), self.optimizer, plan)
        self._evaluator = self._feeder((), recompute=False, dropout=False)

    def evaluate(self, batches: Batches, samples: int) -> float:
        """The mean loss over the first `samples` samples, in micro-batches of the size that training uses."""
        size = self._sizes[0]

        def parts() -> Iterator[tuple[int, Batch]]:
            for first in range(0, samples, size):
                yield first, batches.batch(first, min(size, samples - first))

        return evaluate(self._evaluator, parts())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything a checkpoint holds, by name."""
        yield from self.parameters.tensors()
        yield from self.optimizer.tensors()

    def restore_optimizer(self, found: Checkpoint, scalars: Mapping[str, Any]) -> None:
        self.optimizer.load(found.names(), found.read, scalars)

    @torch.no_grad()
    def fill(self, module: nn.Module) -> None:
        """Copies the values of parameters into a module that names them alike."""
        for name, parameter in module.named_parameters():
            parameter.copy_(self.parameters.exact(name))

    def _feeder(self, trainable: Sequence[str], *, recompute: bool, dropout: bool) -> Feeder:
        engine = Engine(
            self.captured.blocks, self.parameters.values, self._buffers, trainable=set(trainable), device=self.device,
            compiler=self.compiler, recompute=recompute, dropout=dropout,
        )  # fmt: skip
        return Feeder(self.captured, engine, seed=self._seed, dtype=self.dtype)

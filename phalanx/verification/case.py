"""What one verification runs: the model, the plan, the batches. Both sides derive everything from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx import tasks
from phalanx.data.batches import check_length
from phalanx.errors import ConfigError, VerifyError
from phalanx.model.segment.compile import MODES
from phalanx.model.zoo.zoo import Model, ModelSpec, resolve, with_config
from phalanx.plan import fields
from phalanx.plan.complete import with_micro_batches
from phalanx.plan.plan import Plan
from phalanx.state.layout import Box
from phalanx.tasks.base import Task
from phalanx.tasks.custom import Custom, infer_inputs

DTYPES = {"float64": torch.float64, "float32": torch.float32}
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}


@dataclass(frozen=True)
class Training:
    """The optimizer both sides use. A larger epsilon than usual keeps rounding noise in tiny gradients from being
    amplified into visible updates; everything else is as in training."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-4
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class Case:
    """model: whatever names one. Steps alternate between two shapes, so one capture is proven for both."""

    model: Model
    plan: str = ""
    tiny: bool = False
    task: str | None = None
    dtype: str = "float64"
    steps: int = 2
    batch: int | None = None  # samples of the first step; None: at least 4, and as many as the plan has parts
    tokens: int = 24
    dropout: float | None = None  # None: the model's own
    padding: bool = False
    documents: bool = False
    seed: int = 0
    compile: str = "off"
    device: str = "cpu"
    data: tuple[dict[str, Tensor], ...] = ()  # the user's own batches, taken in turn, instead of synthetic ones
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"verify: dtype '{self.dtype}' has no tolerance", f"allowed: {', '.join(DTYPES)}")
        for name, allowed in (("compile", ("auto", *MODES)), ("device", ("auto", "cpu", "cuda"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"verify: {name} '{getattr(self, name)}' is unknown", f"allowed: {', '.join(allowed)}"
                )
        if self.data and (self.padding or self.documents):
            raise ConfigError(
                "verify: padding and documents shape synthetic batches only", "put them into your own data"
            )
        for name, least in (("steps", 1), ("batch", 2), ("tokens", 8)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"verify: {name}={getattr(self, name)} is too small", f"use {least} or more")

    @property
    def num_samples(self) -> int:
        """Samples of the first step; every second step has fewer."""
        if self.data or self.batch:
            return self.batch or min(next(iter(batch.values())).shape[0] for batch in self.data) + 1
        return 2 * self._parts if self._multiple > 1 else max(4, self._parts + 1)

    @property
    def fewest_samples(self) -> int:
        """Samples of every second step: one less, or as many less as the plan cannot divide further; but never fewer
        than it has parts for."""
        if self.data:
            return self.num_samples - 1
        plan = with_micro_batches(Plan.parse(self.plan), "mb" in fields.read(self.plan), self.num_samples, {})
        least = plan.dp * plan.mb * plan.multiple
        fewer = self.num_samples - (least if plan.multiple > 1 else 1)
        return fewer if fewer >= least else self.num_samples

    @property
    def _parts(self) -> int:
        """The parts that a plan cuts a batch into, each of as few samples as it needs."""
        given = fields.read(self.plan)
        return given.get("dp", 1) * given.get("mb", 4 * given.get("pp", 1)) * self._multiple

    @property
    def _multiple(self) -> int:
        return Plan.parse(self.plan).multiple

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def spec(self) -> ModelSpec:
        spec = with_config(resolve(self.model, task=self.task, tiny=self.tiny))
        if not self.data and spec.task in tasks.TASKS:
            check_length(tasks.get(spec.task), spec.config, self.tokens, option="tokens")
        return spec

    def task_of(self, spec: ModelSpec) -> Task:
        """What the model is called with: by its task, or by what the user's batches hold."""
        if self.data:
            return Custom(infer_inputs(self.data[0]))
        if spec.task not in tasks.TASKS:
            raise VerifyError(
                f"verify cannot make batches for '{spec.name}': its task is unknown",
                f"give batches of your own with data=[…], or name its task; known: {', '.join(tasks.TASKS)}",
            )
        return tasks.get(spec.task)

    def batches(self, spec: ModelSpec) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """(samples consumed before it, batch) of each step, floats in the case's dtype."""
        consumed = 0
        for step in range(self.steps):
            batch = self.data[step % len(self.data)] if self.data else self._synthetic(spec, step)
            yield consumed, {k: v.to(self.torch_dtype) if v.is_floating_point() else v for k, v in batch.items()}
            consumed += next(iter(batch.values())).shape[0]

    def _synthetic(self, spec: ModelSpec, step: int) -> dict[str, Tensor]:
        samples, tokens = self._shape(step)
        return self.task_of(spec).synthetic(
            spec.config, batch=samples, tokens=tokens, seed=self.seed + step,
            padding=self.padding, documents=self.documents,
        )  # fmt: skip

    def _shape(self, step: int) -> tuple[int, int]:
        return (self.num_samples, self.tokens) if step % 2 == 0 else (self.fewest_samples, self.tokens * 2 // 3)


@dataclass
class Step:
    """What a side did in one step. losses: what each rank says the loss is; the plain side is one."""

    losses: list[float]
    gradients: dict[str, Tensor]  # before clipping
    parameters: dict[str, Tensor]  # after the update

    @property
    def loss(self) -> float:
        return self.losses[0]


@dataclass(frozen=True)
class Noise:
    """How far rounding alone moves what the plain side computes in one step."""

    loss: float
    gradients: dict[str, float]  # the largest change of an element
    num_terms: int  # elements of the batch, over which gradients are sums


@dataclass
class Plain:
    """What the plain side did. optimizer: its state after the last step, as `exp_avg/NAME`."""

    initial: dict[str, Tensor]
    steps: list[Step]
    noise: list[Noise]  # of each step
    optimizer: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    """The elements of some boxes of a tensor, one box after the other."""

    name: str
    boxes: tuple[Box, ...]
    data: Tensor


@dataclass(frozen=True)
class Copy:
    """What one rank holds of a tensor after the last step, whether it is the one that counts or not."""

    rank: int
    quantity: str  # copy (of a parameter), optimizer, buffer
    part: Part


@dataclass
class Execution:
    """What the plan side did, and what proves that the plan was really executed."""

    plan: Plan
    initial: dict[str, Tensor]
    steps: list[Step]
    copies: list[Copy]  # on all ranks
    facts: dict[str, Any]  # measured, by name
    implied: dict[str, Any]  # what the plan implies for the same names
    attention_sites: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """Where both sides begin. given: the initial values that only a seed determines, so that one side hands them to
    the other. All others each side reads for itself, from the model's folder or the user's module."""

    given: dict[str, Tensor]
    loads: bool  # whether anything is read besides
    notes: tuple[str, ...] = ()

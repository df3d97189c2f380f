"""Metrics of an evaluation besides the loss: accuracy, further values that the model returns, functions of the user's.

The model is read once more with its outputs leaving it, under the same plan and with the same parameters; every replica
computes metrics of its part of the samples where outputs lie, and sums are added up. Training is not touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config import RunConfig
from phalanx.data.batches import Batches
from phalanx.engine.compiled import Compiled
from phalanx.errors import CaptureError, ConfigError, PhalanxError, counted, nearest
from phalanx.model.attach import Inputs, arguments_of, attached
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.ops.leave import ROWS, Outbox, leave, outbox
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.prepare.prepare import Prepared
from phalanx.session.outputs import join_parts
from phalanx.session.session import Session
from phalanx.tasks.base import IGNORE, Batch, Input, Task

Metric = Callable[[Mapping[str, Tensor], Batch], Any]  # outputs and batch → one value per sample, or (sum, count)
NAMED = ("accuracy", "values")
_OF_TOKENS = ("causal-lm", "masked-lm", "text-to-text", "speech-to-text")  # whose loss is one of tokens


def perplexity(task: Task, loss: float) -> dict[str, float]:
    """Of a loss that is a mean over tokens."""
    known = task.name in _OF_TOKENS and math.isfinite(loss) and loss < 700
    return {"eval_perplexity": math.exp(loss)} if known else {}


def require_metrics(config: RunConfig, own: Mapping[str, Metric]) -> None:
    """Before anything is prepared."""
    for name in config.metrics:
        if name not in NAMED:
            raise ConfigError(f"option metrics = {name!r} is unknown", nearest(name, NAMED))
    if (config.metrics or own) and not config.eval_data:
        given = ", ".join((*config.metrics, *own))
        raise ConfigError(f"option metrics = {given!r} has nothing to evaluate", "set eval_data as well")
    for name, metric in own.items():
        if not callable(metric) or name in NAMED or not name.isidentifier():
            raise ConfigError(
                f"metrics: {name!r} is no metric of your own",
                f"give a function under a name that is none of {', '.join(NAMED)}",
            )


def accuracy(task: Task) -> Metric:
    """The share of labels that the model finds likeliest."""
    shift = 1 if task.name == "causal-lm" else 0

    def measure(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        if "logits" not in outputs or "labels" not in batch:
            raise ConfigError(
                f"metric accuracy needs logits and labels; the model returns {', '.join(outputs)}",
                "give a function of your own (metrics={name: function})",
            )
        logits, labels = outputs["logits"], batch["labels"]
        if labels.dim() > 1:
            logits, labels = logits[:, : logits.shape[1] - shift], labels[:, shift:]
        known = labels != IGNORE
        return ((logits.argmax(-1) == labels) & known).sum(), known.sum()

    return measure


class Ending:
    """What is done with a model's outputs: those that are tensors leave, scalars once for every sample. names: of the
    outputs, in order; scalars: those of them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.scalars: set[str] = set()

    def __call__(self, output: Any, rest: Inputs) -> Tensor:
        rows = rest[ROWS]
        found = {name: each for name, each in _named(output).items() if _leaves(each, rows)}
        if not found:
            raise CaptureError(
                "metrics need what the model returns, and it returns nothing but its loss",
                "return a dict with further values, one per sample or one for all; or leave metrics out",
            )
        self.names, self.scalars = list(found), {name for name, each in found.items() if each.dim() == 0}
        whole = [each.expand(rows.shape[0]) if each.dim() == 0 else each for each in found.values()]
        losses = [leave(each, rows, number) for number, each in enumerate(whole)]
        return sum(losses[1:], start=losses[0]) / rows.shape[0]


def _named(output: Any) -> dict[str, Any]:
    """Outputs by name, without the loss."""
    if isinstance(output, Mapping):
        return {name: value for name, value in output.items() if name != "loss"}
    parts = list(output)[1:] if isinstance(output, tuple | list) else []
    return {f"output_{number}": value for number, value in enumerate(parts, 1)}


def _leaves(value: Any, rows: Tensor) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return value.dim() == 0 or value.shape[0] == rows.shape[0]


class Metrics:
    """Computes metrics. Every rank makes one, and those with a place in the plan call it."""

    def __init__(
        self, run: Prepared, config: RunConfig, own: Mapping[str, Metric]
    ) -> None:  # fmt: skip
        self._run, self._ending = run, Ending()
        self._metrics = {**({"accuracy": accuracy(run.task)} if "accuracy" in config.metrics else {}), **own}
        self._values = "values" in config.metrics
        self._captured = self._read(config)
        self._of: Compiled | None = None  # what trains, for which these were made:
        self._compiled: Compiled | None = None
        self._session: Session | None = None

    def under(self, compiled: Compiled) -> Compiled:
        """What computes outputs beside what trains; refuses a plan under which that cannot be."""
        if self._compiled is None or self._of is not compiled:
            self._session = None  # which would keep state that is about to move
            self._of, self._compiled = compiled, compiled.reading(self._captured)
        return self._compiled

    def forget(self) -> None:
        """What trained is gone."""
        self._session = None

    def _read(self, config: RunConfig) -> Captured:
        """The model as a graph whose outputs leave."""
        run, assumed = self._run, self._run.eval_batches
        assert assumed is not None
        inputs = run.task.inputs(run.spec.config, padding=assumed.padding, documents=assumed.documents)
        spec = replace(run.spec, task="custom", factory=lambda: self._ended(config, inputs), folder=None)
        return capture(
            spec, (*inputs, Input(ROWS, "int64", ("batch",))), dtype=run.dtype, dropout=config.dropout, check=False
        )

    def _ended(self, config: RunConfig, inputs: Sequence[Input]) -> nn.Module:
        spec: ModelSpec = self._run.spec
        made = spec.factory() if spec.factory is not None else build(replace(spec, lora=None), dropout=config.dropout)
        known = arguments_of(made.forward)
        return attached(made, [each.name for each in inputs if known is None or each.name in known], self._ending)

    @torch.no_grad()
    def __call__(self, trains: Session, batches: Batches, samples: int) -> dict[str, float]:
        """Each metric over the first `samples` samples, by its name with eval_ before it, with the parameters of the
        session that trains."""
        own = self.under(trains.compiled)
        session = self._session = self._session or trains.computing(own)
        compiled, plan = session.compiled, session.plan
        size, mine = compiled.samples * plan.mb, compiled.formation.dp_index
        ends_here = plan.num_stages - 1 in compiled.formation.stages and compiled.formation.is_tp_leader
        sums: dict[str, Tensor] = {}
        for begin in range(0, samples, size * plan.dp):
            first = begin + mine * size
            counted = max(0, min(size, samples - first))
            batch = batches.at(torch.arange(first, first + size).remainder(samples).numpy())
            outputs = self._outputs(session, batch, first, size)
            if counted and ends_here:
                self._add(sums, outputs, batch, counted)
        return self._totals(session, sums)

    def _outputs(self, session: Session, batch: Batch, first: int, size: int) -> dict[str, Tensor]:
        with outbox(Outbox(size)) as box:
            session.forward({**batch, ROWS: torch.arange(size)}, first)
        join_parts(session, box)
        return {self._ending.names[number]: output for number, output in sorted(box.outputs.items())}

    def _add(self, sums: dict[str, Tensor], outputs: dict[str, Tensor], batch: Batch, counted: int) -> None:
        device = next(iter(outputs.values())).device
        shown = {name: output[:counted] for name, output in outputs.items()}
        given = {name: tensor[:counted].to(device) for name, tensor in batch.items()}
        found = {name: _measured(name, metric, shown, given) for name, metric in self._metrics.items()}
        if self._values:
            found |= {name: (shown[name].double().sum(), counted) for name in self._ending.scalars}
        for name, pair in found.items():
            value = torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in pair])
            sums[name] = sums[name] + value if name in sums else value

    def _totals(self, session: Session, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Over all ranks; those that add nothing know the names as well, because all have read the model."""
        names = sorted({*self._metrics, *(self._ending.scalars if self._values else ())})
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=session.compiled.device)
        table = torch.stack([sums.get(name, nothing) for name in names])
        session.connected.world.all_reduce(table).wait("the evaluation's metrics")
        session.connected.world.confirm(table, "the evaluation's metrics")
        return {
            f"eval_{name}": total / count if count else math.nan for name, (total, count) in zip(names, table.tolist())
        }


def _measured(name: str, metric: Metric, outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Any, Any]:
    """A metric's sum and how many it is a sum over."""
    try:
        found = metric(outputs, batch)
    except PhalanxError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in outputs.items())
        raise ConfigError(
            f"metric {name!r} failed: {type(error).__name__}: {error}",
            f"it is called with the model's outputs ({shapes}) and the batch, both dicts of tensors",
        ) from error
    samples = next(iter(batch.values())).shape[0]
    if isinstance(found, Tensor) and found.shape == (samples,):
        return found.double().sum(), samples
    if isinstance(found, tuple) and len(found) == 2:
        return found
    shown = f"shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
    raise ConfigError(
        f"metric {name!r} gave {shown} for {counted(samples, 'sample')}",
        "return one value per sample, or a pair (sum, count)",
    )

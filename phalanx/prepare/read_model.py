"""A model as a graph, proven on samples, with what of it is trained and a plan that suits it, the ranks and the batch.

Nothing is trained here, and of data only the first samples are looked at.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.data.batches import Batches
from phalanx.engine.inputs import require_inputs
from phalanx.errors import ConfigError, DataError, PlanError
from phalanx.launch.context import RankContext
from phalanx.model.capture import capture, capture_for_check
from phalanx.model.captured import Captured
from phalanx.model.lora import Lora, is_adapter
from phalanx.model.selfcheck import num_samples, prove
from phalanx.model.separable import NUM_CANDIDATES, require_separable
from phalanx.model.zoo.zoo import Model, ModelSpec, resolve, with_config
from phalanx.params.groups import Groups, ParameterGroup, group_parameters
from phalanx.params.parameters import choose_trainable
from phalanx.plan import fields
from phalanx.plan.complete import Completed, complete, needed_ranks, usable_ranks
from phalanx.plan.plan import Plan
from phalanx.prepare.auto import Choice, Subject, choose, measure_together
from phalanx.prepare.did_not_fit import NONE_TRIED, Tried
from phalanx.tasks.base import Task

Phase = Callable[[str], contextlib.AbstractContextManager[None]]  # around a part whose seconds are shown by its name


def untimed(name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


MOST_STAGES = 16  # on one rank: for what can be said about a plan before the model is known


def find_model(model: Model, config: RunConfig) -> ModelSpec:
    spec = with_config(resolve(model, task=config.task, tiny=config.tiny, overrides=config.model_options or None))
    return spec if config.lora is None else replace(spec, lora=Lora.read(config.lora))


@dataclass(frozen=True)
class ReadModel:
    """A model as a graph, what of it is trained, and the plan. `reasons`, `choice`, `subject` as in `Prepared`.
    may_cut: whether it is known that batches may be cut."""

    captured: Captured
    trainable: tuple[str, ...]
    groups: Groups
    plan: Plan
    reasons: dict[str, str]
    may_cut: bool
    choice: Choice | None = None
    subject: Subject | None = None


def read_model(
    spec: ModelSpec, task: Task, batches: Batches, config: RunConfig, context: RankContext,
    groups: Sequence[ParameterGroup] = (), step: int = 1, optimizer_class: type[Any] | None = None,
    given: str | None = None, phase: Phase = untimed, tried: Tried = NONE_TRIED, eval_samples: int = 0,
) -> ReadModel:  # fmt: skip
    """Captured, proven on samples of these batches, and with a plan that suits it. step: whose plan it is; given: the
    one that is taken instead; tried: those that did not fit; eval_samples: of every evaluation."""
    dtype, period = getattr(torch, config.dtype), config.periods.at(step)
    inputs = task.inputs(spec.config, padding=batches.padding, documents=batches.documents)
    with phase("graph"):
        captured = capture(spec, inputs, dtype=dtype, dropout=config.dropout, check=False)
    with phase("check of the graph"):
        checked = _proof(spec, task, captured, batches, period.batch_size, dtype) if context.rank == 0 else ""
    wanted = [*groups, *map(ParameterGroup.read, config.groups)]
    found = group_parameters(wanted, captured.shapes, captured.aliases, dtype)
    frozen = {*found.frozen, *(name for name in captured.shapes if spec.lora is not None and not is_adapter(name))}
    trainable = choose_trainable(captured.trainable, captured.shapes, captured.aliases, config.freeze, frozen)
    if not set(trainable) & set(captured.blocks.parameters()):
        raise ConfigError("no trainable parameter takes part in the loss", "unfreeze one that does")
    costs = captured.blocks.flops(captured.dims(batches.batch(0, 1)))
    # Ranks that come to a run that has a plan may be more or fewer than its options speak of.
    world = context.world if given is None else _most_ranks(config, given, context.world)
    plan, reasons = plan_for(config, given or period.plan, world, period.batch_size, costs, whole=given is None)
    subject, choice = None, None
    if config.searches_plan and period.plan == config.given_plan and given is None:
        current = config.override(batch_size=period.batch_size)
        subject = Subject(spec, captured, trainable, batches, current, plan, optimizer_class, tried, eval_samples)
    if subject is not None and context.world > 1:
        with phase("measuring"):
            measure_together(subject, context)
        with phase("plan"):
            choice = choose(subject, context)
        plan, reasons = choice.plan, {} if choice.plan != plan else reasons
    later = [
        plan_for(config, each.plan, world, each.batch_size, costs, whole=given is None).plan
        for each in config.periods
        if each.step > step
    ]
    cutting = next((each for each in (plan, *later) if _cuts(each)), plan)
    captured = _without_coupling(spec, captured, batches, cutting, period.batch_size)
    may_cut = _is_known(spec, captured) or _cuts(cutting)
    return ReadModel(captured, trainable, found, plan, {**reasons, "check": checked}, may_cut, choice, subject)


def plan_for(
    config: RunConfig, given: str, world: int, batch_size: int, costs: Sequence[float], whole: bool = True
) -> Completed:  # fmt: skip
    """A plan of the run with nothing left open. Where the plan changes while it runs, or ranks may take the places of
    lost ones, it may leave some without a place; else it has to use them all, unless that is not asked for."""
    may_spare = config.plan_at or config.on_loss in ("shrink", "regrow")
    usable = world if whole and not may_spare else usable_ranks(given, world)
    return complete(given, world=usable, batch_size=batch_size, costs=costs, slot=config.slot)


def _most_ranks(config: RunConfig, given: str, world: int) -> int:
    """That a plan of the run needs, or that there are."""
    return max(world, *(needed_ranks(plan) or 0 for plan in (given, *(period.plan for period in config.periods))))


def choose_num_ranks(config: RunConfig) -> int:
    """How many ranks to start on this machine: as asked for, as the plan needs, or one per GPU."""
    usable = torch.cuda.is_available() and config.device != "cpu"
    found = max(1, torch.cuda.device_count()) if usable else 1
    needed = [needed_ranks(period.plan) or 0 for period in config.periods]
    ranks = config.ranks or max(needed) or found
    require_fit(config, ranks)  # before any is started
    return ranks


def require_fit(config: RunConfig, world: int) -> None:
    """Whatever the model's blocks cost, this much of the plan must fit ranks and batch."""
    if config.ranks not in (None, world):
        raise ConfigError(
            f"option ranks = {config.ranks}, but the launcher started {world}",
            "leave ranks out where a launcher starts them, or have it start as many",
        )
    for period in config.periods:
        num_blocks = sum(fields.read(period.plan).get("stages", ())) or world * MOST_STAGES
        plan_for(config, period.plan, world, period.batch_size, [1.0] * num_blocks)


def _proof(
    spec: ModelSpec, task: Task, captured: Captured, batches: Batches, batch_size: int, dtype: torch.dtype
) -> str:
    """That the graph is the model, on the first samples. One rank finds out for all."""
    first, second = num_samples(captured, batch_size)
    samples = [batches.batch(0, first), batches.batch(first, second)]
    for batch in samples:
        require_inputs(captured, batch)
        _refuse_rounding(batch, dtype)
    return prove(spec, task, captured, samples, capture_for_check)


def _refuse_rounding(batch: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Samples in float64 would become float32 without a word; torch itself refuses to mix the two."""
    for name, tensor in batch.items():
        if tensor.dtype == torch.float64 != dtype and not torch.equal(tensor, tensor.float().double()):
            raise DataError(
                f"input {name!r} is in float64, whose values would be rounded to {str(dtype).removeprefix('torch.')}",
                "convert it in the dataset (.float()) if that is meant, or train with dtype=float64",
            )


def _without_coupling(spec: ModelSpec, captured: Captured, batches: Batches, plan: Plan, batch_size: int) -> Captured:
    """Samples may depend on each other only where the plan leaves batches whole. Asked of modules of the user's own,
    and wherever the loss is not known to be a mean."""
    if _is_known(spec, captured) or not _cuts(plan):
        return captured
    candidates = batches.batch(0, min(batches.num_samples or NUM_CANDIDATES, NUM_CANDIDATES))
    require_inputs(captured, candidates)
    return require_separable(spec, captured, candidates, batch_size, plan.shown)


def _is_known(spec: ModelSpec, captured: Captured) -> bool:
    """Whether samples are known not to depend on each other."""
    return spec.factory is None and not captured.blocks.assumed


def _cuts(plan: Plan) -> bool:
    """Whether a plan computes parts of a batch by themselves."""
    return plan.dp * plan.mb * plan.multiple > 1


def require_may_cut(may_cut: bool, spec: ModelSpec, plan: Plan) -> None:
    if _cuts(plan) and not may_cut:
        raise PlanError(
            f"plan {plan.shown} cuts batches, and whether the samples of {spec.name} depend on each other was not "
            "looked into: it began with a plan that leaves batches whole",
            "begin with a plan that cuts batches (mb=2), or name this one from the beginning on (plan_at)",
        )

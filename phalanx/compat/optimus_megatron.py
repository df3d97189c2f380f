"""Optimus-Megatron's interface: profilers, a selector that chooses a plan from what they found, and a manager that a
training loop tells its metrics and that plans again from them.

The loop may be anyone's: the manager advises it, hands plans over as configurations of other frameworks, and changes a
session of ours where that can change its plan while it runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from phalanx.compat.profilers import SEQ_LEN, DatasetProfiler, HardwareProfiler, ModelProfiler
from phalanx.errors import ConfigError, nearest
from phalanx.own_loop.open import open as open_session
from phalanx.own_loop.session import OwnSession
from phalanx.params.groups import ParameterGroup
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.cost import Software
from phalanx.planning.estimate import Estimate, estimate
from phalanx.planning.explain import what_limits, why_lost
from phalanx.planning.export import Exported, Job, export
from phalanx.planning.search import search

__all__ = [
    "DatasetProfiler", "DynamicStrategySelector", "HardwareProfiler", "ModelProfiler", "ParallelismManager",
    "setup_model_and_optimizer",
]  # fmt: skip

METRICS = ("throughput", "convergence_rate", "communication_overhead", "load_imbalance", "gpu_utilization", "memory")
BATCH = 8  # samples for each device, where nothing says more
WINDOW = 10  # steps that are measured before it is planned again
GAIN = 0.05  # by which another plan must be faster, as predicted from what was measured

Condition = Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class Strategy:
    """A plan and why it was chosen."""

    plan: Plan
    step_seconds: float
    why: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """What came of one `step`. action: keep; advised (the loop would have to restart with this plan); changed."""

    step: int
    action: Literal["keep", "advised", "changed"]
    plan: str
    why: str
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class DynamicStrategySelector:
    """Chooses a plan from what the profilers found. Profilers that are not given are made."""

    def __init__(
        self,
        model: nn.Module | str,
        model_profiler: ModelProfiler | None = None,
        hardware_profiler: HardwareProfiler | None = None,
        parallelism_manager: ParallelismManager | None = None,
        dataset_profiler: DatasetProfiler | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.model = model
        self.hardware = hardware_profiler or HardwareProfiler()
        self.dataset = dataset_profiler
        self.profiler = model_profiler or ModelProfiler(model, _tokens_of(dataset_profiler))
        self.batch_size = batch_size or (dataset_profiler.batch_size if dataset_profiler is not None else None)
        if parallelism_manager is not None:
            parallelism_manager.selector = self

    @property
    def batch(self) -> int:
        return self.batch_size or BATCH * self.hardware.cluster.world

    def select(self, cluster: Cluster | None = None, fixed: Mapping[str, Any] | None = None) -> Strategy:
        """The best plan, and why others lost. cluster: as measured meanwhile. fixed: given fields of a plan."""
        where = cluster or self.hardware.cluster
        found = search(self.profiler.work, where, Software(), self.batch, fixed, all_devices=True)
        best, *others = found.plans
        lost = tuple(f"{other.plan.shown}: {why_lost(best, other)}" for other in others)
        return Strategy(best.plan, best.step_seconds, what_limits(best), lost)

    def estimate(self, plan: Plan, cluster: Cluster | None = None) -> Estimate:
        return estimate(self.profiler.work, plan, cluster or self.hardware.cluster, Software(), self.batch)


class ParallelismManager:
    """Plans, is told how training goes, and plans again where `enable_dynamic_adaptation` is set.

    Without arguments it waits for a `DynamicStrategySelector` to be made with it. cluster: in words, where it is not
    this machine. session: one of ours that trains, whose plan may be changed.
    """

    def __init__(
        self,
        model: nn.Module | str | None = None,
        dataset: Any = None,
        batch_size: int | None = None,
        enable_dynamic_adaptation: bool = False,
        *,
        cluster: str | Cluster | None = None,
        session: OwnSession | None = None,
        window: int = WINDOW,
    ) -> None:
        if window < 1:
            raise ConfigError(f"ParallelismManager: window = {window} is below 1", "give a number of steps")
        self.selector: DynamicStrategySelector | None = None
        self.enable_dynamic_adaptation, self.session, self.window = enable_dynamic_adaptation, session, window
        if model is not None:
            data = DatasetProfiler(dataset, batch_size) if dataset is not None else None
            self.selector = DynamicStrategySelector(
                model, hardware_profiler=HardwareProfiler(cluster), dataset_profiler=data, batch_size=batch_size
            )
        self.strategy: Strategy | None = None
        self.history: list[Record] = []
        self._measured: list[dict[str, float]] = []

    def initialize(self) -> Strategy:
        """Profiles and plans."""
        self.strategy = self._selector.select()
        if self.session is not None:
            self.strategy = replace(self.strategy, plan=self.session.plan)
        return self.strategy

    def step(self, metrics: Mapping[str, float]) -> Record:
        """One step of the loop is over. throughput: samples per second; communication_overhead: seconds of a step that
        were spent waiting for others."""
        if self.strategy is None:
            raise ConfigError("ParallelismManager.step: there is no plan yet", "call initialize() before")
        self._measured.append(_checked(metrics))
        record = Record(
            len(self.history) + 1, "keep", self.strategy.plan.full_text, self._why_kept(), self._measured[-1]
        )
        if self.enable_dynamic_adaptation and len(self._measured) >= self.window:
            record = self._planned_again(record)
        self.history.append(record)
        return record

    def cleanup(self) -> list[Record]:
        """Forgets what was measured; gives back what was decided."""
        self._measured.clear()
        self.strategy = None
        return self.history

    # What was chosen, for people and for other frameworks.

    def status(self) -> str:
        """In a few lines."""
        strategy = self._strategy
        last = self.history[-1] if self.history else None
        lines = [f"plan       {strategy.plan.shown}", f"why        {strategy.why}"]
        return "\n".join([*lines, *([f"step {last.step:<6}{last.action}: {last.why}"] if last is not None else [])])

    def export_history(self, path: Path | str) -> Path:
        """Every step's metrics and decision, as JSON."""
        target = Path(path).expanduser()
        target.write_text(json.dumps([asdict(record) for record in self.history], indent=1) + "\n", "utf-8")
        return target

    def deepspeed_config(self) -> dict[str, Any]:
        """For `deepspeed.initialize(config=…)`; `cannot_express` says what of the plan is not in it."""
        return json.JSONDecoder().raw_decode(self._exported("deepspeed").text)[0]

    def megatron_arguments(self) -> list[str]:
        return [word for word in self._exported("megatron").text.replace("\\\n", " ").split() if word != "\\"]

    def cannot_express(self, framework: Literal["deepspeed", "megatron"]) -> tuple[str, ...]:
        return self._exported(framework).cannot

    def _exported(self, framework: str) -> Exported:
        selector, cluster = self._selector, self._selector.hardware.cluster
        work = selector.profiler.work
        job = Job(self._strategy.plan, selector.batch, work.tokens, len(work.layers), cluster.slots)
        return export(framework, job)

    # Planning again.

    def _planned_again(self, record: Record) -> Record:
        """From the cluster as these steps showed it."""
        selector, strategy = self._selector, self._strategy
        throughputs = [each["throughput"] for each in self._measured if "throughput" in each]
        waits = [each["communication_overhead"] for each in self._measured if "communication_overhead" in each]
        self._measured.clear()
        if not throughputs:
            return replace(record, why="no throughput was measured, without which nothing can be planned again")
        seconds = selector.batch / statistics.median(throughputs)
        expected = selector.estimate(strategy.plan)
        seen = as_measured(selector.hardware.cluster, expected, seconds, statistics.median(waits) if waits else None)
        current, best = selector.estimate(strategy.plan, seen), selector.select(seen)
        gain = current.step_seconds / best.step_seconds - 1
        if best.plan == strategy.plan or gain < GAIN:
            said = f"{seconds:.3g} s per step measured, {expected.step_seconds:.3g} s expected"
            return replace(record, why=f"{said}; no plan is {GAIN:.0%} faster")
        why = f"{best.plan.shown} should be {gain:.0%} faster, by {seconds:.3g} s per step as measured: {best.why}"
        return self._applied(record, best, why)

    def _applied(self, record: Record, best: Strategy, why: str) -> Record:
        change = getattr(self.session, "change", None)
        if change is None:
            whose = "this loop is not a session of ours" if self.session is None else "its session cannot do that"
            why += f". Nothing was changed: {whose}; start again with this plan from a checkpoint"
            return replace(record, action="advised", plan=best.plan.full_text, why=why)
        change(best.plan)
        self.strategy = best
        return replace(record, action="changed", plan=best.plan.full_text, why=why)

    def _why_kept(self) -> str:
        if not self.enable_dynamic_adaptation:
            return "enable_dynamic_adaptation is not set"
        return f"{len(self._measured)} of {self.window} steps are measured"

    @property
    def _selector(self) -> DynamicStrategySelector:
        if self.selector is None:
            raise ConfigError(
                "ParallelismManager: there is no model to plan for",
                "give one: ParallelismManager(model=…), or DynamicStrategySelector(model, parallelism_manager=this)",
            )
        return self.selector

    @property
    def _strategy(self) -> Strategy:
        if self.strategy is None:
            raise ConfigError("ParallelismManager: there is no plan yet", "call initialize() before")
        return self.strategy


def as_measured(cluster: Cluster, expected: Estimate, seconds: float, waited: float | None) -> Cluster:
    """The cluster with devices and links as slow or fast as a step of `seconds` says, of which `waited` were spent on
    communication; without that, both alike."""
    waits = expected.exposed * expected.step_seconds
    if waited is None or waited <= 0 or waits <= 0 or waited >= seconds:
        device = link = expected.step_seconds / seconds
    else:
        device, link = (expected.step_seconds - waits) / (seconds - waited), waits / waited

    def scaled(kind: Nodes) -> Nodes:
        own = kind.device
        rates = {name: figure._replace(value=figure.value * device, known="measured")
                 for name, figure in own.figures.items() if name in ("flops", "bandwidth")}  # fmt: skip
        return replace(kind, device=replace(own, **rates), link=kind.link * link, network=kind.network * link)

    return Cluster(tuple(map(scaled, cluster.nodes)))


def setup_model_and_optimizer(
    model_provider_func: Callable[[], nn.Module],
    model_type: Any = None,
    no_wd_decay_cond: Condition | None = None,
    scale_lr_cond: Condition | None = None,
    lr_mult: float = 1.0,
    *,
    example: Any,
    lr: float,
    plan: str = "",
    lr_lambda: Callable[[int], float] | None = None,
    **options: Any,
) -> tuple[list[OwnSession], torch.optim.Optimizer, Any]:
    """The model under a plan, its optimizer and its schedule; the model has a `strategy_selector` for planning.

    Conditions are of a parameter's name and shape, as Megatron's. model_type is taken and not needed: the graph says
    it. lr_lambda: of the number of steps, what the learning rate is multiplied by. options: those of phalanx.open.
    """
    model = model_provider_func()
    if not hasattr(model, "strategy_selector"):
        object.__setattr__(model, "strategy_selector", DynamicStrategySelector(model))
    groups = _groups(model, no_wd_decay_cond, scale_lr_cond, lr_mult)
    session = open_session(
        model, example=example, plan=plan, optimizer=options.pop("optimizer", "adamw"), lr=lr, groups=groups, **options
    )
    optimizer = session.optimizer
    assert optimizer is not None
    return [session], optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda or (lambda step: 1.0))


def _groups(
    model: nn.Module, undecayed: Condition | None, scaled: Condition | None, lr_mult: float
) -> list[ParameterGroup]:
    """Decayed or not, scaled or not; those that have parameters."""
    first, second = undecayed or _nobody, scaled or _nobody
    wanted: Sequence[tuple[Condition, float, float | None]] = (
        (lambda name, tensor: first(name, tensor) and second(name, tensor), lr_mult, 0.0),
        (first, 1.0, 0.0),
        (second, lr_mult, None),
    )
    named = list(model.named_parameters())
    taken: set[str] = set()
    found: list[ParameterGroup] = []
    for which, rate, decay in wanted:
        mine = {name for name, tensor in named if name not in taken and which(name, tensor)}
        taken |= mine
        if mine:
            found.append(ParameterGroup(which, lr=rate, decay=decay))
    return found


def _nobody(name: str, tensor: Tensor) -> bool:
    return False


def _checked(metrics: Mapping[str, float]) -> dict[str, float]:
    for name, value in metrics.items():
        if name not in METRICS:
            raise ConfigError(f"ParallelismManager.step: metric {name!r} is unknown", nearest(name, METRICS))
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ConfigError(f"ParallelismManager.step: {name} = {value!r} is not a number", "give a number")
    if metrics.get("throughput", 1.0) <= 0:
        raise ConfigError(
            f"ParallelismManager.step: throughput = {metrics['throughput']!r} is not above zero",
            "give samples per second, or leave it out",
        )
    return {name: float(value) for name, value in metrics.items()}


def _tokens_of(dataset: DatasetProfiler | None) -> int:
    """As long as the longest sample of the data, where there is any."""
    return SEQ_LEN if dataset is None else max(2, int(dataset.profile()["max_length"]))

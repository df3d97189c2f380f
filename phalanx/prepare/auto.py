"""The plan of a run that leaves it open (`plan=auto`): the search of `phalanx plan`, for this model on these devices.

With several ranks, rank 0 searches and tells the others (one rank: `auto_alone.py`). Whatever the search cannot judge
gets the simple plan, and the reason is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from phalanx.config import RunConfig
from phalanx.data.batches import Batches
from phalanx.engine.compiled import Compiled
from phalanx.engine.compose import compose
from phalanx.engine.work import work_of_graph
from phalanx.errors import PhalanxError, PlanError
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.model.facts.facts import heads_of
from phalanx.model.zoo.zoo import ModelSpec
from phalanx.observe.format import seconds_text
from phalanx.plan import fields
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import Estimate, estimate
from phalanx.planning.problem import Problem
from phalanx.planning.search import faster_part, search
from phalanx.planning.work import ModelWork
from phalanx.prepare.blocks_here import measure_blocks, sizes_of
from phalanx.prepare.did_not_fit import NONE_TRIED, Tried
from phalanx.prepare.here import planned_here, to_stderr, usable_store
from phalanx.prepare.turns import let_others_come, wait_for
from phalanx.profile.model import Size, of_every_block, times_here
from phalanx.profile.model import Subject as Measured
from phalanx.profile.store import rows_here

_KEY = "plan"
ALIKE = 1.01


@dataclass(frozen=True)
class Choice:
    """A plan, why it is this one, and what a record of the log says of it: seconds that were predicted, runners-up."""

    plan: Plan
    reason: str
    record: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def how(self) -> str:
        return "measured" if "measured" in self.record else "auto"

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"plan": self.plan.to_json()})

    @staticmethod
    def from_json(text: str) -> Choice:
        given = json.loads(text)
        return Choice(Plan.from_json(given["plan"]), given["reason"], given["record"])


@dataclass(frozen=True)
class Subject:
    """What is planned for. simple: the plan that is taken where nothing can be judged. tried: what did not fit.
    eval_samples: of every evaluation; 0 where there is none."""

    spec: ModelSpec
    captured: Captured
    trainable: Sequence[str]
    batches: Batches
    config: RunConfig
    simple: Plan
    optimizer_class: type[Any] | None = None
    tried: Tried = NONE_TRIED
    eval_samples: int = 0

    @property
    def cuts(self) -> bool:
        """Whether batches may surely be cut: of modules of the user's own, that is found out for a given plan."""
        known = self.spec.factory is None and not self.captured.blocks.assumed
        return known or self.simple.dp * self.simple.mb * self.simple.multiple > 1

    @property
    def fixed(self) -> dict[str, Any]:
        """The fields of the plan that are not searched for."""
        given = fields.read(self.config.given_plan)
        return given if self.config.slot is None else {**given, "sums": "exact"}

    @property
    def heads(self) -> int:
        config = self.spec.config
        return heads_of(lambda name: getattr(config, name, None)) if config is not None else 0

    def costs(self) -> list[float]:
        dims = self.captured.dims(self.batches.batch(0, 1))
        return [float(flops) for flops in self.captured.blocks.flops(dims)]


def choose(subject: Subject, context: RankContext) -> Choice:
    """With several ranks: all of them come here, rank 0 first."""
    assert context.world > 1
    if context.rank > 0:
        return Choice.from_json(wait_for(context, _KEY))
    found = _or_simple(subject, lambda: _searched(subject, context))
    context.store.set(_KEY, found.to_json())
    return found


def measure_together(subject: Subject, context: RankContext) -> None:
    """By all ranks, before one of them chooses. What cannot be measured ends no run: it is planned for by rates."""
    let_others_come(context)
    per_node, sizes = _sizes(subject, context) if context.rank == 0 else (0, [])
    store = usable_store() if sizes else None
    measured = Measured(
        subject.spec, subject.captured, subject.config.dtype, torch.device(context.device), per_node,
        lambda count: subject.batches.batch(0, count), subject.config.compile,
    )  # fmt: skip
    try:
        measure_blocks(context, measured, store, sizes, to_stderr)
    except Exception as error:  # whatever a model of the user's own leads to
        if context.rank == 0:
            to_stderr(f"the blocks of {subject.spec.name} could not be measured: {type(error).__name__}: {error}")


def _sizes(subject: Subject, context: RankContext) -> tuple[int, list[Size]]:
    """Ranks of a node, and at which sizes its blocks are measured; none where that says nothing of plans."""
    if not subject.cuts:
        return 0, []
    try:
        cluster, software = planned_here(context, subject.config.memory_bytes, subject.config.dtype)
        rate = software.products * min(kind.device.flops.value for kind in cluster.nodes)
        flops = max(subject.costs())
    except Exception:  # the search says of the same what it is
        return 0, []
    return cluster.per_node, sizes_of(context.world, subject.config.batch_size, subject.heads, flops, rate)


def _or_simple(subject: Subject, make: Callable[[], Choice]) -> Choice:
    """A run that would go on with the simple plan never ends because of the search for a better one; one whose plan
    did not fit does, where nothing needs less."""
    try:
        return make()
    except PhalanxError as error:
        why = error.message
    except Exception as error:  # whatever a model of the user's own leads to
        why = f"{type(error).__name__}: {error}"
    if subject.tried.plans:
        raise subject.tried.nothing_else()
    return Choice(subject.simple, f"simple, because the search cannot judge this: {why}", {"unsearched": why})


def _searched(subject: Subject, context: RankContext) -> Choice:
    config, fixed = subject.config, subject.fixed
    if not subject.cuts:
        raise PlanError("whether samples depend on each other is not known, and the simple plan does not cut batches")
    cluster, software = planned_here(context, config.memory_bytes, config.dtype)
    software = replace(software, slack=1 - subject.tried.share * (1 - software.slack))
    compiled = whole_model(subject, torch.device(context.device))
    if not subject.heads or compiled.formation.facts.slots is None:  # heads, or how elements are updated, are not known
        fixed = {"tp": 1, **fixed}
    if compiled.formation.facts.slots is None:
        fixed = {"zero": 0, "offload": (), **fixed}  # state whose form is not known cannot lie elsewhere
    work, found = _best(subject, compiled, cluster, software, fixed)
    if not found and fixed.get("tp") != 1:
        fixed = {**fixed, "tp": 1}
        work, found = _best(subject, compiled, cluster, software, fixed)
    if not found:
        raise PlanError("the model cannot be split as the best plans would")
    return _choice(subject, work, cluster, software, found, fixed)


def _best(
    subject: Subject, compiled: Compiled, cluster: Cluster, software: Software, fixed: Mapping[str, Any]
) -> tuple[ModelWork, list[Estimate]]:
    """The best plans that this model can run, best first. What `recompute=light` keeps is found out only where
    something has to be computed again."""
    for light in (False, True):
        work = work_of(subject, compiled, cluster.per_node, light)
        try:
            found = search(
                work, cluster, software, subject.config.batch_size, fixed, slot=subject.config.slot, all_devices=True
            ).plans  # fmt: skip
        except PlanError:
            if light:
                raise
            continue
        if light or not found[0].plan.recompute:
            break
    return work, _simplest_first([own for own in found if _can_run(subject, own.plan)])


def _simplest_first(found: list[Estimate]) -> list[Estimate]:
    """Of plans that take as long as the best, as far as can be told, the one that moves the least state."""
    alike = [own for own in found if own.step_seconds <= ALIKE * found[0].step_seconds]
    first = min(alike, key=lambda own: (own.plan.zero, own.plan.tp, own.plan.v), default=None)
    return [] if first is None else [first, *(own for own in found if own is not first)]


def whole_model(subject: Subject, device: torch.device) -> Compiled:
    """One rank with all of it."""
    whole = Plan(stages=(len(subject.captured.blocks.blocks),))
    return Compiled(
        subject.captured, subject.config, whole, rank=0, device=device, trainable=subject.trainable,
        buffers=subject.captured.buffers_on(device), optimizer_class=subject.optimizer_class,
    )  # fmt: skip


def work_of(subject: Subject, compiled: Compiled, ranks: int, light: bool = True) -> ModelWork:
    """ranks: of a node. With the seconds of its blocks, where `phalanx profile --model` measured them here."""
    causal = subject.spec.task == "causal-lm"
    work = work_of_graph(subject.spec.name, compiled, subject.batches.batch(0, 1), subject.heads, light, causal)
    config = subject.config
    times = times_here(
        rows_here(), subject.captured, config.dtype, compiled.device, ranks, work.tokens, config.compile
    )  # fmt: skip
    return work.measured(of_every_block(subject.captured, times))


def _can_run(subject: Subject, plan: Plan) -> bool:
    """Whether tensors and tokens can be split so, and evaluations cut; everything else can be done with every model."""
    if subject.eval_samples % plan.multiple:
        return False
    if plan.tp == 1 and not plan.slices:
        return True
    try:
        compose(subject.captured, plan, 0, getattr(torch, subject.config.dtype), subject.trainable)
    except PhalanxError:
        return False
    return True


def _choice(
    subject: Subject, work: ModelWork, cluster: Cluster, software: Software, found: Sequence[Estimate],
    fixed: Mapping[str, Any],
) -> Choice:  # fmt: skip
    best, *others = found
    plan = complete(
        best.plan, world=cluster.world, batch_size=subject.config.batch_size, costs=subject.costs(),
        slot=subject.config.slot,
    ).plan  # fmt: skip
    simple = estimate(work, subject.simple, cluster, software, subject.config.batch_size)
    problem = Problem(work, cluster, software, subject.config.batch_size, subject.config.slot, "degrees" in fixed)
    shown = {name: value for name, value in fixed.items() if value != ()}
    given = f" with {fields.write(shown)}" if shown else ""
    simply = f"{_shown(simple)}{'' if simple.fits else ', which would not fit'}"
    reason = (
        f"{plan.shown}: {seconds_text(best.step_seconds)} a step predicted on {shown_cluster(cluster)}{given}, "
        f"{known_of(cluster, work)}{_beside(best, others)}; simple {simply}{_fewer(problem, best, fixed)}"
        f"{subject.tried.words}"
    )
    return Choice(plan, reason, record_of(best, [*others, simple]) | subject.tried.record)


def shown_cluster(cluster: Cluster) -> str:
    return " + ".join(map(str, cluster.nodes))


def known_of(cluster: Cluster, work: ModelWork) -> str:
    """Where the seconds come from."""
    known = {figure.known for kind in cluster.nodes for figure in (kind.device.flops, kind.device.bandwidth)}
    blocks = " and measured blocks" if any(own.times for own in work.classes) else ""
    return f"by {' and '.join(sorted(known))} rates{blocks}"


def _beside(best: Estimate, others: Sequence[Estimate]) -> str:
    if not others:
        return ""
    word = "alike" if others[0].step_seconds <= ALIKE * best.step_seconds else "next"
    return f"; {word} {_shown(others[0])}"


def _fewer(problem: Problem, best: Estimate, fixed: Mapping[str, Any]) -> str:
    """What is said where some of the ranks would be faster by themselves: those that were started all take part."""
    own = faster_part(problem, best, fixed)
    if own is None:
        return ""
    return f"; {shown_cluster(own.cluster)} alone would be {best.step_seconds / own.step_seconds:.1f}× as fast"


def _shown(own: Estimate) -> str:
    return f"{own.plan.shown} {seconds_text(own.step_seconds)}"


def record_of(best: Estimate, others: Sequence[Estimate]) -> dict[str, Any]:
    return {
        "planned_step_seconds": best.step_seconds,
        "planned_memory_bytes": int(best.peak_bytes),
        "planned_budget_bytes": int(best.budget[best.fullest]),
        "runners_up": [{"plan": own.plan.text, "step_seconds": own.step_seconds, "fits": own.fits} for own in others],
    }

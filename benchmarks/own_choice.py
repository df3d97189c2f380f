"""What `phalanx train` would do without a plan, for `own_runs.py`: the plan that it chooses on these ranks, and what
its planning says of every other plan. Not for users.

Nothing is known beforehand: ranks measure as a run does that has to choose (`prepare/here.py`), and the search is the
product's own. Planning works with a few rates of devices and links, in a second or two for all plans there are; the
simulation of `foresight.py` needs each plan's program and a profile inside it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from own_runs_rank import Task

from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.data.given import given_batches
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.plan.plan import Plan
from phalanx.planning.estimate import estimate
from phalanx.prepare.auto import Subject, choose, measure_together, whole_model, work_of
from phalanx.prepare.here import announce, measure_here, planned_here

CHOSEN = "chosen by train"


@dataclass(frozen=True)
class Planned:
    """plan: that `train` chooses, why: what it says of it. seconds: of a step of every plan, by its planning."""

    plan: Plan
    why: str
    seconds: dict[str, float]


def planned(context: RankContext, task: Task, captured: Captured) -> Planned | None:
    """The job of one rank; the answer is rank 0's."""
    if context.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PHALANX_CACHE"] = folder  # nothing that was measured before counts
        measure_here(context, task.setting.dtype, lambda text: context.emit("planning", text))
        announce(context, None)
        subject = _subject(task, captured)
        measure_together(subject, context)
        choice = choose(subject, context)
        return _estimated(subject, context, task, choice.plan, choice.reason) if context.rank == 0 else None


def _subject(task: Task, captured: Captured) -> Subject:
    setting, spec = task.setting, task.setting.spec()
    config = RunConfig.create(
        dtype=setting.dtype, master_weights=setting.masters, batch_size=setting.size.samples, compile="off"
    )
    batches = given_batches(setting.batch(), tasks.get(spec.task))
    return Subject(spec, captured, captured.trainable, batches, config, next(iter(task.plans.values())))


def _estimated(subject: Subject, context: RankContext, task: Task, plan: Plan, why: str) -> Planned:
    cluster, software = planned_here(context, None, task.setting.dtype)
    work = work_of(subject, whole_model(subject, torch.device(context.device)), cluster.per_node)
    every = {**task.plans, CHOSEN: plan}
    batch = task.setting.size.samples
    seconds = {text: estimate(work, own, cluster, software, batch).step_seconds for text, own in every.items()}
    return Planned(plan, why, seconds)


def with_chosen(task: Task, found: Sequence[Planned | None]) -> tuple[dict[str, Plan], Planned]:
    """The plans with the one that `train` chooses, which may be one of them."""
    (own,) = (each for each in found if each is not None)
    return {**task.plans, CHOSEN: own.plan}, own

"""`measure_top`: a few real steps of the best plans that the search finds, of which the fastest is then trained with.

A trial is a whole run of a few steps in a folder that is thrown away: the same job, ranks, data and checks. What it
trained is forgotten, so that the run that follows begins as if there had been none. Ranks that a launcher started make
the trials together, and rank 0 tells the others what it saw.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from phalanx.comm.links import abort_all
from phalanx.config import RunConfig
from phalanx.errors import BeginAnew, ConfigError, LinkError, PhalanxError
from phalanx.launch.context import RankContext
from phalanx.launch.join import run_joined
from phalanx.observe.format import seconds_text
from phalanx.observe.runlog import read_log
from phalanx.plan.plan import Plan
from phalanx.plan.rules import divisors
from phalanx.prepare.auto import Choice
from phalanx.prepare.did_not_fit import run_joined_fitting
from phalanx.prepare.turns import wait_for
from phalanx.records import read_record
from phalanx.training.job import Job

STEPS = 4  # of which the first compiles, and the second may
_KEY = "trial"
_AS_IF_NOT_GIVEN = (
    "measure_top", "epochs", "warmup_steps", "lr_steps", "plan_at", "batch_size_at", "seq_len_at", "resume", "on_spike",
    "eval_data", "eval_every", "metrics", "early_stop", "keep_best", "generate_every", "generate_prompts", "export_dcp",
    "eval_samples", "generate_tokens", "keep_checkpoints", "remote", "report_to", "json_output", "profile_steps",
    "memory_snapshot", "timeline_step",
)  # fmt: skip
WITHOUT: dict[str, Any] = {name: RunConfig.model_fields[name].default for name in _AS_IF_NOT_GIVEN} | {
    "steps": STEPS, "checkpoint_every": "never", "export": False, "progress": "off",
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """plan, others: as text; those that the search found beside it and that fit. seconds: of a step."""

    plan: str
    seconds: float
    others: list[str]


class TrialFailed(PhalanxError):
    """A plan is out of the question, and others may be tried: on all ranks alike."""

    @property
    def again(self) -> str:
        return self.message


def with_fastest(job: Job, attempt: Callable[[Job], Trial]) -> Job:
    """The job with the fastest of its best plans. attempt: trains a job to its end, on the ranks that there are."""
    assert job.config.measure_top is not None
    made: list[Trial] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-trial-") as folder:
        made.append(attempt(_trial(job, None, Path(folder) / "first")))
        for plan in islice(_others(made[0], job.config.batch_size), job.config.measure_top - 1):
            try:
                made.append(attempt(_trial(job, plan, Path(folder) / str(len(made) + len(failed)))))
            except TrialFailed as error:
                failed.append(f"{plan.shown} failed: {error.message}")
    return _decided(job, made, failed)


def attempt_here(run: Callable[[Job], Any], job: Job) -> Trial:
    """On ranks that `run` starts, or on the only one."""
    with _told_as_failed(job):
        run(job)
    return _read(job)


def attempt_joined(context: RankContext, fit: Callable[[RankContext, Job], Any], job: Job) -> Trial:
    """As one of the ranks that a launcher started."""

    def trial(context: RankContext, job: Job) -> Trial:
        with _told_as_failed(job):
            fit(context, job)
        if context.rank > 0:
            return read_record(Trial, wait_for(context, _KEY))
        found = _read(job)
        context.store.set(_KEY, json.dumps(asdict(found)))
        return found

    if job.config.searches_plan:
        return run_joined_fitting(context, trial, job)
    try:
        return run_joined(context, trial, job, silence=job.config.silence, begins_anew=True)
    except BeginAnew as error:
        abort_all(context)
        raise TrialFailed(error.message, error.hint) from None


@contextmanager
def _told_as_failed(job: Job) -> Iterator[None]:
    """What only the plan of a trial may be to blame for; nothing where it is the first one, which the search found."""
    try:
        yield
    except (ConfigError, LinkError):  # a rank that waited for another one is sound
        raise
    except PhalanxError as error:
        if job.config.searches_plan:
            raise
        raise TrialFailed(error.message, error.hint) from error


def _trial(job: Job, plan: Plan | None, out: Path) -> Job:
    """plan: None for what the search finds first."""
    text = job.config.plan if plan is None else plan.full_text
    return replace(job, config=job.config.override(**WITHOUT, plan=text, out=str(out)), eval_data=None, metrics={})


def _read(job: Job) -> Trial:
    folder = Path(job.config.out)
    log = list(read_log(folder / "log-rank0.jsonl"))
    seconds = [record["step_seconds"] for record in log if record["kind"] == "step"]
    searched = (own for own in log if own["kind"] == "plan")
    others = [own["plan"] for record in searched for own in record.get("runners_up", ()) if own["fits"]]
    return Trial(Plan.from_json((folder / "plan.json").read_text(encoding="utf-8")).text, min(seconds[1:]), others)


def _others(first: Trial, batch_size: int) -> Iterator[Plan]:
    """The runners-up of a search; on one rank, which need not search, other numbers of micro-batches."""
    best = Plan.parse(first.plan)
    yield from (plan for plan in map(Plan.parse, first.others) if plan != best)
    if best.world == 1:
        yield from (replace(best, mb=mb) for mb in divisors(batch_size) if mb > best.mb)


def _decided(job: Job, made: list[Trial], failed: list[str]) -> Job:
    fastest, *others = sorted(made, key=lambda own: own.seconds)
    plan = Plan.parse(fastest.plan)
    beside = [f"{Plan.parse(own.plan).shown} {seconds_text(own.seconds)}" for own in others]
    reason = f"{plan.shown}: {seconds_text(fastest.seconds)} a step measured"
    reason = "; ".join([reason + (f", {', '.join(beside)}" if beside else ""), *failed])
    rows = [{"plan": own.plan, "measured_step_seconds": own.seconds} for own in made]
    choice = Choice(plan, reason, {"measured": rows, "failed": failed})
    return replace(job, config=job.config.override(plan=plan.full_text, measure_top=None), choice=choice)

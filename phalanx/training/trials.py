"""`measure_top`: a few real steps of the best plans that the search finds, of which the fastest is then trained with.

A trial is a whole run of a few steps in a folder that is thrown away: the same job, ranks, data and checks. What it
trained is forgotten, so that the run that follows begins as if there had been none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.errors import ConfigError, PhalanxError
from phalanx.observe.format import seconds_text
from phalanx.observe.runlog import read_log
from phalanx.plan.plan import Plan
from phalanx.plan.rules import divisors
from phalanx.prepare.auto import Choice
from phalanx.training.job import Job

STEPS = 4  # of which the first compiles, and the second may
_WITHOUT: dict[str, Any] = {
    "steps": STEPS, "epochs": None, "warmup_steps": 0, "lr_steps": None, "resume": "never", "checkpoint_every": "never",
    "export": False, "progress": "off", "json_output": False, "profile_steps": None, "timeline_step": None,
    "eval_every": 0, "eval_data": (), "measure_top": None,
}  # fmt: skip


class Trial(NamedTuple):
    plan: Plan
    seconds: float  # of a step


def with_fastest(job: Job, run: Callable[[Job], Any]) -> Job:
    """The job with the fastest of its best plans. run: trains a job to its end, on the ranks that there are."""
    assert job.config.measure_top is not None
    made: list[Trial] = []
    failed: list[str] = []
    candidates: Iterator[Plan] | None = None
    with tempfile.TemporaryDirectory(prefix="phalanx-trial-") as folder:
        while len(made) + len(failed) < job.config.measure_top:
            plan = next(candidates, None) if candidates is not None else None
            if candidates is not None and plan is None:
                break
            out = Path(folder) / str(len(made) + len(failed))
            try:
                run(_trial(job, plan, out))
            except ConfigError:
                raise
            except PhalanxError as error:
                if plan is None:
                    raise
                failed.append(f"{plan.shown} failed: {error.message}")
                continue
            found = _read(out)
            made.append(found)
            if candidates is None:
                candidates = _others(out, found.plan, job.config.batch_size)
    return _decided(job, made, failed)


def _trial(job: Job, plan: Plan | None, out: Path) -> Job:
    """plan: None for what the search finds first."""
    text = job.config.plan if plan is None else plan.full_text
    return replace(job, config=job.config.override(**_WITHOUT, plan=text, out=str(out)), eval_data=None)


def _read(folder: Path) -> Trial:
    log = list(read_log(folder / "log-rank0.jsonl"))
    seconds = [record["step_seconds"] for record in log if record["kind"] == "step"]
    return Trial(Plan.from_json((folder / "plan.json").read_text(encoding="utf-8")), min(seconds[1:]))


def _others(folder: Path, best: Plan, batch_size: int) -> Iterator[Plan]:
    """The runners-up of a search that fit; on one rank, which need not search, other numbers of micro-batches."""
    (record,) = (own for own in read_log(folder / "log-rank0.jsonl") if own["kind"] == "plan")
    texts = [own["plan"] for own in record.get("runners_up", ()) if own["fits"]]
    yield from (plan for plan in map(Plan.parse, texts) if plan != best)
    if best.world == 1:
        yield from (replace(best, mb=mb) for mb in divisors(batch_size) if mb > best.mb)


def _decided(job: Job, made: list[Trial], failed: list[str]) -> Job:
    fastest, *others = sorted(made, key=lambda own: own.seconds)
    beside = [f"{own.plan.shown} {seconds_text(own.seconds)}" for own in others]
    reason = f"{fastest.plan.shown}: {seconds_text(fastest.seconds)} a step measured"
    reason = "; ".join([reason + (f", {', '.join(beside)}" if beside else ""), *failed])
    rows = [{"plan": own.plan.text, "measured_step_seconds": own.seconds} for own in made]
    choice = Choice(fastest.plan, reason, {"measured": rows, "failed": failed})
    return replace(job, config=job.config.override(plan=fastest.plan.full_text, measure_top=None), choice=choice)

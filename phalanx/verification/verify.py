"""The one call: run the plan, run the plain model, compare (`compare.py`), report (`report.py`)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from phalanx.errors import ConfigError, nearest
from phalanx.launch.main_script import refuse_while_loading
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.zoo.zoo import Model
from phalanx.own_loop.session import OwnSession
from phalanx.plan.plan import Plan
from phalanx.verification.case import Case, Plain
from phalanx.verification.compare import compare
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.plan_side import prepare, run_plan
from phalanx.verification.report import Fact, Report
from phalanx.verification.verify_session import verify_session
from phalanx.written import plan_text


def verify(
    model: Model | OwnSession, plan: str | Plan = "", *, data: Sequence[Any] = (), **options: Any
) -> Report:  # fmt: skip
    """Proves, or refutes, that `plan` trains `model` exactly as the plain model is trained.

    Options are those of `Case`: tiny, dtype ("float64", "float32"), steps, batch, tokens, dropout, padding, documents,
    seed, compile, device, task. `data`: batches of your own (dicts of the model's inputs) instead of synthetic ones,
    needed for modules whose task is unknown.

    A session of `phalanx.open` is compared as it is: under its plan, with its weights, on batches as it takes them
    (`data`); `loss` is that of a session whose outputs leave. Every rank calls it.
    """
    if isinstance(model, OwnSession):
        return _verify_opened(model, plan, data, options)
    refuse_while_loading("phalanx.verify")
    _require_known(options)
    text = plan.full_text if isinstance(plan, Plan) else plan_text(plan)
    case = Case(model, text, data=tuple(data), **options)
    with PlainProcess() as process:
        return verify_case(case, process)


def _verify_opened(session: OwnSession, plan: str | Plan, data: Sequence[Any], options: dict[str, Any]) -> Report:
    loss = options.pop("loss", None)
    for name in ([f"plan = {plan!r}"] if plan else []) + [f"option {name!r}" for name in options]:
        raise ConfigError(f"verify: {name} is the session's own", "leave it out, or open a session with it")
    return verify_session(session, data, loss)


def verify_case(case: Case, process: PlainProcess, pool: WorkerPool | None = None) -> Report:
    """As `verify`, with a plain process and ranks that may serve many cases."""
    started = time.perf_counter()
    spec, captured, start = prepare(case)
    execution = run_plan(case, captured, start, pool)
    plain = process.run(case, start, execution.attention_sites)
    facts = tuple(Fact(name, execution.implied[name], measured) for name, measured in execution.facts.items())
    rows = tuple(compare(execution, plain, case.tolerance, case.training))
    return Report(
        spec.name, execution.plan.text, case.dtype, case.tolerance, rows, facts, time.perf_counter() - started,
        (*start.notes, *_never_clipped(plain, case)),
    )  # fmt: skip


def _never_clipped(plain: Plain, case: Case) -> list[str]:
    """Where no step's gradients are longer than the limit, clipping is not compared."""
    clip = case.training.clip
    norms = [sum(float(g.double().square().sum()) for g in step.gradients.values()) ** 0.5 for step in plain.steps]
    if any(norm > clip for norm in norms):
        return []
    return [f"no gradient was longer than clip = {clip:g}, so clipping was never compared"]


def _require_known(options: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(Case)} - {"model", "plan", "data"}
    for name in options:
        if name not in known:
            raise ConfigError(f"verify: unknown option {name!r}", nearest(name, known))

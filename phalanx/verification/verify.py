"""The one call: run the plan, run the plain model, compare, report."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.config_text import plan_text
from phalanx.errors import ConfigError, nearest
from phalanx.launch.crew import Crew
from phalanx.launch.main_script import refuse_while_loading
from phalanx.model.zoo.zoo import Model
from phalanx.plan.plan import Plan
from phalanx.verification.case import Case
from phalanx.verification.compare import Fact, Report, compare
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.plan_side import prepare, run_plan


def verify(model: Model, plan: str | Plan = "", *, data: Sequence[dict[str, Tensor]] = (), **options: Any) -> Report:
    """Proves, or refutes, that `plan` trains `model` exactly as the plain model is trained.

    Options are those of `Case`: tiny, dtype ("float64", "float32"), steps, batch, tokens, dropout, padding, documents,
    seed, compile, device, task. `data`: batches of your own (dicts of the model's inputs) instead of synthetic ones,
    needed for modules whose task is unknown.
    """
    refuse_while_loading("phalanx.verify")
    _require_known(options)
    text = plan.full_text if isinstance(plan, Plan) else plan_text(plan)
    case = Case(model, text, data=tuple(data), **options)
    with PlainProcess() as process:
        return verify_case(case, process)


def verify_case(case: Case, process: PlainProcess, crew: Crew | None = None) -> Report:
    """As `verify`, with a plain process and ranks that may serve many cases."""
    started = time.perf_counter()
    spec, captured, initial = prepare(case)
    execution = run_plan(case, captured, initial, crew)
    plain = process.run(case, initial, execution.attention_sites)
    facts = tuple(Fact(name, execution.implied[name], measured) for name, measured in execution.facts.items())
    return Report(
        spec.name, execution.plan.text, case.dtype, case.tolerance,
        tuple(compare(execution.steps, plain)), facts, time.perf_counter() - started,
    )  # fmt: skip


def _require_known(options: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(Case)} - {"model", "plan", "data"}
    for name in options:
        if name not in known:
            raise ConfigError(f"verify: unknown option {name!r}", nearest(name, known))

"""The one call: run the plan, run the plain model, compare (`compare.py`), report for people and for programs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from phalanx.errors import ConfigError, nearest
from phalanx.launch.main_script import refuse_while_loading
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.zoo.zoo import Model
from phalanx.plan.plan import Plan
from phalanx.verification.case import Case, Plain
from phalanx.verification.compare import Row, compare
from phalanx.verification.plain_side import PlainProcess
from phalanx.verification.plan_side import prepare, run_plan
from phalanx.written import plan_text


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


@dataclass(frozen=True)
class Fact:
    """Something the plan implies about its execution, and what was measured."""

    name: str
    implied: Any
    measured: Any

    @property
    def ok(self) -> bool:
        return self.implied == self.measured


@dataclass(frozen=True)
class Report:
    model: str
    plan: str
    dtype: str
    tolerance: float
    rows: tuple[Row, ...]
    facts: tuple[Fact, ...]
    seconds: float
    notes: tuple[str, ...] = ()  # what was not done as the model alone would do it

    @property
    def ok(self) -> bool:
        """Every error within tolerance, and the plan was really executed."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        wrong = [
            f"step {row.step}: {row.place} is off by {row.error:.2e} (tolerance {self.tolerance:.0e})"
            for row in self.rows
            if not row.error <= self.tolerance
        ]
        return wrong + [
            f"{f.name}: the plan implies {f.implied}, measured {f.measured}" for f in self.facts if not f.ok
        ]

    def worst(self, quantity: str) -> Row:
        return max((row for row in self.rows if row.quantity == quantity), key=lambda row: row.error)

    def to_dict(self) -> dict[str, Any]:
        facts = [{**asdict(fact), "ok": fact.ok} for fact in self.facts]
        return {**asdict(self), "facts": facts, "ok": self.ok, "failures": self.failures}

    def __str__(self) -> str:
        lines = [f"{self.model}  plan '{self.plan or 'default'}'  {self.dtype}, tolerance {self.tolerance:.0e}"]
        for quantity in dict.fromkeys(row.quantity for row in self.rows):
            row = self.worst(quantity)
            place = "" if quantity == "loss" else f"  in {row.tensor}{row.where}  ({row.compared} {row.unit})"
            lines.append(f"  {quantity:<10} worst relative error {row.error:.2e}  step {row.step}{place}")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  {f.name:<28} {f.measured}" + ("" if f.ok else f"  ≠ {f.implied}") for f in self.facts]
        lines += [f"  ✗ {failure}" for failure in self.failures]
        lines.append(f"  {'exact' if self.ok else 'NOT EQUAL'} ({self.seconds:.1f} s)")
        return "\n".join(lines)

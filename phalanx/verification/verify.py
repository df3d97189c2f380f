"""The one call: run the plan, run the plain model, compare tensor by tensor, report for people and for programs.

A gradient is compared relative to its own largest element; one that is zero in theory (a key projection's bias)
relative to the largest gradient of the model. An updated parameter is compared relative to its own largest element,
leaving out elements whose gradient is below the noise floor, where an adaptive optimizer turns rounding into an
arbitrary sign.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.config import plan_text
from phalanx.errors import ConfigError, nearest
from phalanx.launch.main_script import refuse_while_loading
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.zoo.zoo import Model
from phalanx.plan.plan import Plan
from phalanx.verification.case import Case, Step
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


def verify_case(case: Case, process: PlainProcess, pool: WorkerPool | None = None) -> Report:
    """As `verify`, with a plain process and ranks that may serve many cases."""
    started = time.perf_counter()
    spec, captured, initial = prepare(case)
    execution = run_plan(case, captured, initial, pool)
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


# Gradients below this share of the model's largest are rounding noise.
_NOISE = {torch.float64: 1e-13, torch.float32: 1e-5}


@dataclass(frozen=True)
class Row:
    """The worst case of one quantity in one step."""

    step: int
    quantity: str  # loss, gradient, parameter
    error: float
    tensor: str
    compared: int  # tensors
    left_out: int = 0  # elements below the noise floor


def compare(ours: Sequence[Step], plain: Sequence[Step]) -> list[Row]:
    rows: list[Row] = []
    for number, (mine, theirs) in enumerate(zip(ours, plain, strict=True), start=1):
        loss_error = abs(mine.loss - theirs.loss) / max(abs(theirs.loss), 1e-30)
        rows.append(Row(number, "loss", _finite(loss_error), "loss", 1))
        rows.append(_gradients(number, mine.gradients, theirs.gradients))
        rows.append(_parameters(number, mine, theirs))
    return rows


def _gradients(step: int, ours: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> Row:
    largest = _largest(plain)
    errors: dict[str, float] = {}
    for name in sorted(set(ours) | set(plain)):
        expected, got = plain.get(name), ours.get(name)
        if expected is None or got is None:  # no gradient is a zero gradient
            present = got if expected is None else expected
            assert present is not None
            errors[name] = _finite(float(present.abs().max()) / largest)
            continue
        scale = float(expected.abs().max())
        zero_in_theory = scale <= _NOISE[expected.dtype] * largest
        errors[name] = _error(got, expected, largest if zero_in_theory else scale)
    return _worst(step, "gradient", errors)


def _parameters(step: int, ours: Step, plain: Step) -> Row:
    largest = _largest(plain.gradients)
    errors: dict[str, float] = {}
    left_out = 0
    for name, expected in plain.parameters.items():
        got = ours.parameters.get(name)
        if got is None or got.shape != expected.shape:
            errors[name] = float("inf")
            continue
        gradient = plain.gradients.get(name)
        counted = torch.ones_like(expected, dtype=torch.bool)
        if gradient is not None:
            counted = (gradient.abs() > _NOISE[expected.dtype] * largest) | (gradient == 0)
            left_out += int((~counted).sum())
        scale = float(expected.abs().max())
        errors[name] = _error(got[counted], expected[counted], scale) if bool(counted.any()) else 0.0
    return _worst(step, "parameter", errors, left_out)


def _largest(tensors: Mapping[str, Tensor]) -> float:
    return max((float(t.abs().max()) for t in tensors.values()), default=0.0) or 1e-30


def _error(got: Tensor, expected: Tensor, scale: float) -> float:
    if got.shape != expected.shape:
        return float("inf")
    return _finite(float((got.to(expected.dtype) - expected).abs().max()) / max(scale, 1e-30))


def _finite(error: float) -> float:
    """NaN compares as equal to nothing; here it is the worst error there is."""
    return error if error == error else float("inf")


def _worst(step: int, quantity: str, errors: Mapping[str, float], left_out: int = 0) -> Row:
    tensor = max(errors, key=errors.__getitem__, default="")
    return Row(step, quantity, errors.get(tensor, float("inf")), tensor, len(errors), left_out)


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

    @property
    def ok(self) -> bool:
        """Every error within tolerance, and the plan was really executed."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        wrong = [
            f"step {row.step}: {row.quantity} '{row.tensor}' is off by {row.error:.2e} (tolerance {self.tolerance:.0e})"
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
        for quantity in ("loss", "gradient", "parameter"):
            row = self.worst(quantity)
            place = "" if quantity == "loss" else f"  in {row.tensor}  ({row.compared} tensors)"
            lines.append(f"  {quantity:<10} worst relative error {row.error:.2e}  step {row.step}{place}")
        left_out = sum(row.left_out for row in self.rows)
        if left_out:
            lines.append(f"  {left_out} parameter elements left out: their gradient is below the noise floor")
        lines += [f"  {f.name:<28} {f.measured}" + ("" if f.ok else f"  ≠ {f.implied}") for f in self.facts]
        lines += [f"  ✗ {failure}" for failure in self.failures]
        lines.append(f"  {'exact' if self.ok else 'NOT EQUAL'} ({self.seconds:.1f} s)")
        return "\n".join(lines)

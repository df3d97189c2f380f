"""What a verification found, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from phalanx.verification.compare import Row


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

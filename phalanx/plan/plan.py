"""The plan: every decision about how a model is trained, as frozen data with a one-line text form.

Text: `mb=4,schedule=gpipe`; what is not written has its default. A field exists only once the runtime obeys it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import PlanError, nearest

SCHEDULES = ("1f1b", "gpipe", "zb-h1")
AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Plan:
    """How one step is carried out.

    mb: micro-batches per replica; the global batch never changes with it.
    schedule: the order of forward and backward (`program/schedules/`).
    recompute: keep only each block's inputs and compute its forward again in the backward.
    """

    mb: int = 1
    schedule: str = "1f1b"
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.mb < 1:
            raise PlanError(f"plan: mb={self.mb} is not a number of micro-batches", "use mb=1 or more")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"plan: unknown schedule '{self.schedule}'", nearest(self.schedule, SCHEDULES))

    @property
    def text(self) -> str:
        """The shortest text that `parse` reads back: only what differs from the defaults."""
        default = Plan()
        words = [
            f"{name}={_FORMAT[name](value)}"
            for name, value in dataclasses.asdict(self).items()
            if value != getattr(default, name)
        ]
        return ",".join(words)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads what `to_json` wrote; the error names the field and what may stand there."""
        try:
            fields: object = json.loads(text)
        except ValueError as error:
            raise PlanError(f"plan: not JSON: {error}", f"write for example {Plan().to_json()}") from error
        if not isinstance(fields, dict):
            raise PlanError("plan: not a JSON object", f"write for example {Plan().to_json()}")
        default = dataclasses.asdict(Plan())
        for name, value in fields.items():  # pyright: ignore[reportUnknownVariableType]
            if name not in default:
                raise PlanError(f"plan: unknown field '{name}'", nearest(str(name), default))  # pyright: ignore
            if type(value) is not type(default[name]):  # pyright: ignore[reportUnknownArgumentType]
                raise PlanError(f"plan: {name}={value!r} has the wrong type", f"write for example {default[name]!r}")
        return Plan(**fields)  # pyright: ignore[reportUnknownArgumentType]

    @staticmethod
    def parse(text: str) -> Plan:
        """Reads the one-line form; the error names the word and what may stand there."""
        fields: dict[str, object] = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, separator, value = word.partition("=")
            if not separator:
                raise PlanError(f"plan: '{word}' is not name=value", "write for example mb=4,schedule=gpipe")
            if name in AXES:
                _only_one(name, value)
            elif name not in _READ:
                raise PlanError(f"plan: unknown field '{name}'", nearest(name, [*_READ, *AXES]))
            elif name in fields:
                raise PlanError(f"plan: '{name}' is given twice", "write each field once")
            else:
                fields[name] = _READ[name](value)
        return Plan(**fields)  # pyright: ignore[reportArgumentType]


def _only_one(axis: str, value: str) -> None:
    if value != "1":
        raise PlanError(f"plan: {axis}={value} needs several ranks, and this version runs on one", f"use {axis}=1")


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise PlanError(f"plan: mb='{text}' is not a whole number", "use mb=1 or more")
    return int(text)


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise PlanError(f"plan: recompute='{text}' is neither yes nor no", "use recompute=yes or recompute=no")
    return text == "yes"


_READ: dict[str, Callable[[str], object]] = {"mb": _whole_number, "schedule": str, "recompute": _yes_or_no}
_FORMAT: dict[str, Callable[[object], str]] = {
    "mb": str,
    "schedule": str,
    "recompute": lambda value: "yes" if value else "no",
}

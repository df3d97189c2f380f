"""The run log: one JSON record per line, one file per rank, in the run's folder.

It only ever grows and every record reaches the file at once, so it is complete up to the last moment of a run that was
killed. Everything that shows or compares runs reads it; nothing in training depends on it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.errors import ConfigError
from phalanx.records import read_json

_NONFINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


class RunLog:
    """Appends records to `log-rank<rank>.jsonl` in `folder`."""

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self.path = Path(folder) / f"log-rank{rank}.jsonl"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torn = _ends_inside_a_line(self.path)
            # Unbuffered and append-only: each record is one write, whole even with several writers.
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            hint = "choose another folder with the option out"
            raise ConfigError(f"the run log {self.path} cannot be written: {error.strerror}", hint) from None
        # What a crash or a full disk left of a record stays as evidence; the next record must not be glued to it.
        self._torn, self._num_lost = torn, 0

    def write(self, kind: str, **fields: Any) -> None:
        """Append {"time": …, "kind": kind, **fields}. What a full disk does not take is counted, and the next record
        that it takes comes after one that tells how many are missing."""
        now = round(time.time(), 3)
        lost = self._num_lost and {"time": now, "kind": "lost", "records": self._num_lost}
        lines = [json_line(record).encode() for record in (lost, {"time": now, "kind": kind, **fields}) if record]
        data = b"\n" * self._torn + b"\n".join(lines) + b"\n"
        try:
            written = self._file.write(data)
        except OSError:
            written = 0
        if written == len(data):
            self._torn, self._num_lost = False, 0
        else:
            self._torn, self._num_lost = self._torn or bool(written), self._num_lost + 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The complete records of a log, in order. What a crash cut off is left out."""
    records: list[dict[str, Any]] = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            record = read_json(line)
        except ValueError:
            continue
        # The first digits of a longer line can be valid JSON as well.
        if isinstance(record, dict):
            records.append(record)
    return records


def newest_steps(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """The steps that count, since the run was last started, with their losses. A step that was gone back from, because
    ranks were lost with what they alone held, counts when it is made again."""
    found: dict[int, float] = {}
    for record in records:
        if record["kind"] == "start":
            found = {}
        elif record["kind"] == "step":
            found[record["step"]] = record["loss"]
        elif record["kind"] == "loss":
            found = {step: loss for step, loss in found.items() if step < record["step"]}
    return found


def json_line(record: Mapping[str, Any]) -> str:
    """Strict JSON on one line: numbers JSON does not have are the texts "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_strict(record), allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return _NONFINITE.get(value, "NaN")
    if isinstance(value, Mapping):
        return {str(name): _strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return value


def _ends_inside_a_line(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"

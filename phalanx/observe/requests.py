"""Requests to a run that is under way: a file in its folder asks for another plan, and another one has the answer.

Rank 0 looks for it between steps. Whoever asks may wait for the answer; nothing but the text of a plan is read.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.errors import ConfigError, PhalanxError
from phalanx.plan import fields
from phalanx.records import Malformed, read_record

_ASKED, _ANSWERED = "change.json", "change-{}.json"
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Request:
    """name: another one each time."""

    name: str
    plan: str


@dataclass(frozen=True)
class Answer:
    """step: the first with the new plan; refused: why there is none."""

    plan: str
    step: int = 0
    refused: str = ""
    hint: str = ""
    seconds: float = 0.0
    bytes: int = 0


def ask(folder: Path, plan: str) -> Request:
    """Asks a run for another plan, instead of what was asked before, if it has not looked yet."""
    fields.read(plan)
    request = Request(uuid.uuid4().hex, plan)
    _write(folder / _ASKED, json.dumps(asdict(request)))
    return request


def wait_for(folder: Path, request: Request, seconds: float) -> Answer | None:
    """The answer; None where there was none in so many seconds."""
    path, deadline = folder / _ANSWERED.format(request.name), time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_SECONDS)
    try:
        return read_record(Answer, path.read_bytes())
    except Malformed as error:
        message = f"the answer of the run in {folder} cannot be read: {error}"
        raise ConfigError(message, f"see what became of it: phalanx history {folder}") from None
    finally:
        path.unlink(missing_ok=True)


def take_back(folder: Path, request: Request) -> bool:
    """Whether the run has not looked at it yet, and now will not."""
    if _read(folder / _ASKED) != request:
        return False
    (folder / _ASKED).unlink(missing_ok=True)
    return True


class Inbox:
    """Rank 0's side."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / _ASKED

    def clear(self) -> None:
        """What was asked of an earlier run is not asked of this one."""
        for path in (self._path, *self._folder.glob(_ANSWERED.format("*"))):
            path.unlink(missing_ok=True)

    def has_request(self) -> bool:
        return self._path.exists()

    def peek(self) -> Request | None:
        """The request, which stays; None where there is none."""
        return _read(self._path)

    def take(self) -> Request | None:
        """The request, which is gone then; None where what lies there is none."""
        request = _read(self._path)
        self._path.unlink(missing_ok=True)
        return request

    def answer(self, request: Request, answer: Answer) -> None:
        _write(self._folder / _ANSWERED.format(request.name), json.dumps(asdict(answer)))


def _read(path: Path) -> Request | None:
    try:
        request = read_record(Request, path.read_text(encoding="utf-8"))
    except (OSError, ValueError, PhalanxError):
        return None
    return request if request.name.isalnum() else None


def _write(path: Path, text: str) -> None:
    """At once or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}", "name the folder of a run that you may write to"
        ) from None

"""Ranks of one job on several machines: the supervisor of each keeps its own, and the first one's says what is to be.

Both sides write one key of the job's store over and over. *Orders* say which processes a node is to have, with a number
that tells one start of a process from the next, and what the board says; a *report* says which it has, what they said
last, how they ended, and what they show on their board, which the first supervisor copies onto its own. Neither is a
message that could be lost or come twice. The first one's part is in `remote.py`, the others' in `follower.py`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from phalanx import errors
from phalanx.launch.rank_main import Done, Failed, Left
from phalanx.launch.status_board import RunningClock
from phalanx.launch.store import JobStore
from phalanx.launch.succession import Succession
from phalanx.records import read_record

_LONGEST_TEXT = 20_000  # characters of what a process says of its failure
BEGIN_SILENCES = 10.0  # before the first word of a supervisor, on either side
_LATEST = 0.3  # seconds that one look counts for at most, of whoever watches another


@dataclass(frozen=True)
class Spread:
    """root: the store of the run. node: this one's number. places: of every process, its node and its number there.
    silence: in seconds. leads: whether this one's supervisor says what is to be, in this term. succession: what becomes
    of the run when that changes. again: what the attempts before this one ended with, after which all began anew."""

    root: JobStore
    node: int
    places: Mapping[int, tuple[int, int]]
    silence: float
    leads: bool
    succession: Succession
    term: int = 0
    again: tuple[str, ...] = ()

    @cached_property
    def store(self) -> JobStore:
        """Of the supervisors."""
        return self.root.part("spread")

    def numbers(self, node: int) -> list[int]:
        return [number for number, (where, _) in self.places.items() if where == node]

    @property
    def others(self) -> list[int]:
        return sorted({node for node, _ in self.places.values()} - {self.node})

    @property
    def ranks_store(self) -> JobStore:
        """In which ranks of this attempt meet."""
        return self.store.part(f"ranks{len(self.again)}")


@dataclass(frozen=True)
class Orders:
    """term, leader: of and which node orders. processes: number → which start of it, and the generation (JSON) that it
    begins in. again: as in `Spread`; orders are of the attempt after them."""

    count: int
    term: int = 0
    leader: int = 0
    generation: int = 0
    aborted: bool = False
    invited: bool = False
    grows: bool = False
    over: bool = False
    processes: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """incarnation: of the supervisor. starts: number → which start of a process this tells of, and below what it shows,
    its exit code, and what it said when it was done."""

    incarnation: str
    count: int
    starts: dict[str, int]
    slots: dict[str, str]
    ended: dict[str, int]
    said: dict[str, dict[str, Any]]


def orders_key(node: int) -> str:
    return f"orders/{node}"


def report_key(node: int) -> str:
    return f"report/{node}"


def send(store: JobStore, key: str, record: Orders | Report) -> None:
    store.set(key, json.dumps(dataclasses.asdict(record)))


def read_orders(store: JobStore, node: int) -> Orders | None:
    return read_record(Orders, store.get(orders_key(node))) if store.check([orders_key(node)]) else None


class Heard:
    """When something that counts was last heard to go on."""

    def __init__(self) -> None:
        self._clock, self._last = RunningClock(_LATEST), ""
        self._since = self._clock.read()

    def seconds_since(self, now: str) -> float:
        """now: what was heard."""
        seconds = self._clock.read()
        if now != self._last:
            self._last, self._since = now, seconds
        return seconds - self._since


def told(outcome: Done | Left | Failed) -> dict[str, Any]:
    """What a process said when it was done, for the store: nothing that is unpickled comes from there."""
    if isinstance(outcome, Done):
        return {"kind": "done"}
    if isinstance(outcome, Left):
        return {"kind": "left", "code": outcome.code}
    error = outcome.error
    ours = None if error is None else [type(error).__name__, _clipped(error.message), error.hint, error.again]
    text, traceback = _clipped(outcome.text), _clipped(outcome.traceback)
    return {"kind": "failed", "error": ours, "text": text, "traceback": traceback}


def _clipped(text: str) -> str:
    """Of what goes through the store again and again, the beginning and the end."""
    beyond = len(text) - _LONGEST_TEXT
    half = _LONGEST_TEXT // 2
    return text if beyond <= 0 else f"{text[:half]}\n… {beyond:,} characters …\n{text[-half:]}"


_KINDS: dict[str, type[errors.PhalanxError]] = {
    kind.__name__: kind
    for kind in (errors.RankError, errors.LinkError, errors.StoreError, errors.LateError, errors.ConfigError)
}


def outcome_of(said: Mapping[str, Any]) -> Done | Left | Failed:
    if said["kind"] == "done":
        return Done()
    if said["kind"] == "left":
        return Left(said["code"])
    error = None
    if said["error"] is not None:
        name, message, hint, again = said["error"]
        known = _KINDS.get(name, errors.PhalanxError)(message, hint)
        error = errors.BeginAnew(message, hint, again) if again else known
    return Failed(error, said["text"], said["traceback"])

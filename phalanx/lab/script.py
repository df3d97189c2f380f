"""What can be done to a lab while a command runs in it, and the time line that says when.

Links and ranks are slowed and restored, ranks stopped, killed, added: each disturbance is a value that can be done to a
session, which logs it with its time. A time line, `5s slow_link node=1 rate=100mbit; 12s restore_link node=1; 20s kill
rank=3`, is read from a text or a file (one per line, # starts a comment) and checked against the lab before anything
starts.
"""

from __future__ import annotations

import inspect
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError, PhalanxError, nearest
from phalanx.lab.slowdown import LEAST_PERCENT
from phalanx.lab.spec import LabSpec, rate_text, read_percent, read_rate, read_seconds

if TYPE_CHECKING:
    from phalanx.lab.session import Session


@dataclass(frozen=True)
class SlowLink:
    """A node's cable carries less, both ways."""

    node: int
    rate: int  # bits per second

    def do(self, session: Session) -> str:
        session.network.set_rate(self.node, self.rate)
        return f"link of node {self.node} limited to {rate_text(self.rate)}"


@dataclass(frozen=True)
class CutLink:
    """A node's cable carries nothing, and neither end is told."""

    node: int

    def do(self, session: Session) -> str:
        session.network.plug(self.node, is_in=False)
        return f"link of node {self.node} cut"


@dataclass(frozen=True)
class RestoreLink:
    """A node's cable is as in the lab's description again."""

    node: int

    def do(self, session: Session) -> str:
        rate = session.spec.link
        session.network.plug(self.node, is_in=True)
        session.network.set_rate(self.node, rate)
        return f"link of node {self.node} back at {rate_text(rate) if rate else 'full speed'}"


@dataclass(frozen=True)
class SlowRank:
    """A rank gets only a part of its cores' time."""

    rank: int
    percent: int

    def do(self, session: Session) -> str:
        return f"rank {self.rank} slowed: {session.slow_down(self.rank, self.percent)}"


@dataclass(frozen=True)
class RestoreRank:
    """A slowed rank gets its cores back."""

    rank: int

    def do(self, session: Session) -> str:
        return f"rank {self.rank} back at full speed" if session.speed_up(self.rank) else ""


@dataclass(frozen=True)
class StopRank:
    """A rank stands still, with all its connections open, as if its machine hung."""

    rank: int

    def do(self, session: Session) -> str:
        session.ranks[self.rank].stopped = True
        session.ranks[self.rank].send(signal.SIGSTOP)
        return f"rank {self.rank} stopped"


@dataclass(frozen=True)
class ContinueRank:
    """A stopped rank goes on."""

    rank: int

    def do(self, session: Session) -> str:
        session.ranks[self.rank].stopped = False
        session.ranks[self.rank].send(signal.SIGCONT)
        return f"rank {self.rank} continues"


@dataclass(frozen=True)
class KillRank:
    """A rank dies without a word. There is no way back; its number stays empty."""

    rank: int

    def do(self, session: Session) -> str:
        session.ranks[self.rank].killed = True
        session.ranks[self.rank].send(signal.SIGKILL)
        return f"rank {self.rank} killed"


@dataclass(frozen=True)
class AddRank:
    """One more process with the next rank number and a world that is one larger; the others are told nothing.

    Only a job that takes in new ranks by itself can make use of it.
    """

    node: int

    def do(self, session: Session) -> str:
        return f"rank {session.add_rank(self.node)} added on node {self.node}"


OfLinks = SlowLink | CutLink | RestoreLink
Disturbance = OfLinks | SlowRank | RestoreRank | StopRank | ContinueRank | KillRank | AddRank


WORDS: Mapping[str, type[Disturbance]] = {
    "slow_link": SlowLink,
    "cut_link": CutLink,
    "restore_link": RestoreLink,
    "slow_rank": SlowRank,
    "restore_rank": RestoreRank,
    "stop_rank": StopRank,
    "continue_rank": ContinueRank,
    "kill_rank": KillRank,
    "add_rank": AddRank,
}
_WRITTEN = {"percent": "share"}  # where a field is not written by its own name
_EXAMPLES = {"node": "node=1", "rank": "rank=0", "rate": "rate=100mbit", "share": "share=50%"}
EXAMPLE = "5s slow_link node=1 rate=100mbit; 12s restore_link node=1; 20s kill rank=0"


@dataclass(frozen=True)
class Event:
    seconds: float  # since the ranks were started
    disturbance: Disturbance


Script = tuple[Event, ...]


def read_script(text: str, spec: LabSpec) -> Script:
    """The time line in a text, or in the file it names; in order of time."""
    path = Path(text)
    if "\n" not in text and len(text) < 200 and path.is_file():
        try:
            return read_script(path.read_text(encoding="utf-8") + "\n", spec)
        except PhalanxError as error:
            raise ConfigError(f"{path}: {error.message}", error.hint) from None
    entries = [entry.partition("#")[0].strip() for line in text.splitlines() for entry in line.split(";")]
    events = sorted((_read_event(entry) for entry in entries if entry), key=lambda event: event.seconds)
    check_script(events, spec)
    return tuple(events)


def check_script(events: list[Event], spec: LabSpec) -> None:
    """Raises when a disturbance is about something that this lab does not have at that time."""
    num_ranks = spec.ranks
    for event in events:
        check_disturbance(event.disturbance, spec, num_ranks)
        num_ranks += isinstance(event.disturbance, AddRank)


def check_disturbance(disturbance: Disturbance, spec: LabSpec, num_ranks: int) -> None:
    rank, node = getattr(disturbance, "rank", 0), getattr(disturbance, "node", 0)
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"script: there is no rank {rank} then", f"use rank=0 … rank={num_ranks - 1}")
    if not 0 <= node < spec.nodes:
        raise ConfigError(f"script: there is no node {node}", f"use node=0 … node={spec.nodes - 1}")
    if isinstance(disturbance, OfLinks) and spec.nodes == 1:
        raise ConfigError("script: one node has no links", "describe a lab with nodes=2 or more")
    if isinstance(disturbance, SlowRank | RestoreRank) and spec.gpu_share is not None:
        raise ConfigError(
            "script: the GPU share of a rank that runs cannot be changed: it is read when the rank starts",
            "start with a smaller gpu_share, or slow a rank of a CPU lab",
        )


def _read_event(entry: str) -> Event:
    try:
        return _parse(entry)
    except PhalanxError as error:
        raise ConfigError(f"script: {entry!r}: {error.message}", error.hint) from None


def _parse(entry: str) -> Event:
    words = entry.split()
    if len(words) < 2:
        raise ConfigError("is not a moment and a disturbance", f"write for example {EXAMPLE}")
    seconds = read_seconds(words[0])
    name = words[1] if words[1] in WORDS else f"{words[1]}_rank"
    if name not in WORDS:
        raise ConfigError(f"unknown disturbance {words[1]!r}", nearest(words[1], WORDS))
    kind = WORDS[name]
    fields = list(inspect.signature(kind).parameters)
    values = _read_values(words[2:], [_WRITTEN.get(field, field) for field in fields], name)
    return Event(seconds, kind(*(values[_WRITTEN.get(field, field)] for field in fields)))


def _read_values(words: list[str], needed: list[str], name: str) -> dict[str, int]:
    example = f"write {name} {' '.join(_EXAMPLES[field] for field in needed)}"
    given: dict[str, str] = {}
    for word in words:
        field, separator, value = word.partition("=")
        if not separator or field not in needed or field in given:
            raise ConfigError(f"{word!r} does not belong here", example)
        given[field] = value
    missing = [field for field in needed if field not in given]
    if missing:
        raise ConfigError(f"lacks {', '.join(missing)}", example)
    return {field: _read_value(field, value) for field, value in given.items()}


def _read_value(field: str, text: str) -> int:
    if field == "rate":
        return read_rate(field, text)
    if field == "share":
        return read_percent(field, text, LEAST_PERCENT, 99)
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII):
        raise ConfigError(f"{field}={text} is not a number", f"{field}s are numbered from 0")
    return int(text)

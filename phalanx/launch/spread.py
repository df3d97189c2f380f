"""Ranks of one job on several machines: the supervisor of each keeps its own, and the first one's says what is to be.

Both sides write one key of the job's store over and over. *Orders* say which processes a node is to have, with a number
that tells one start of a process from the next, and what the board says; a *report* says which it has, what they said
last, how they ended, and what they show on their board, which the first supervisor copies onto its own. Neither is a
message that could be lost or come twice. A node is lost when the connection to its supervisor closes
(`lifeline.py`), or when its report does not change for a while; before the others go on without one that may still
live, a term is claimed (`succession.py`). A supervisor that has lost the first one leads then, or follows who does
(`follower.py`).
"""

from __future__ import annotations

import base64
import dataclasses
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx import errors
from phalanx.errors import LinkError
from phalanx.launch.lifeline import Lifelines
from phalanx.launch.membership import Generation
from phalanx.launch.processes import Process, Processes
from phalanx.launch.rank_main import Done, Failed, Job, Left
from phalanx.launch.status_board import RunningClock, StatusBoard
from phalanx.launch.store import JobStore
from phalanx.launch.succession import Succession
from phalanx.launch.wire import Wire
from phalanx.records import read_record

_CLOSED_SECONDS = 1.0  # without a report, after which a node whose connection closed is lost
_STARTS_OF_A_TERM = 1_000_000  # fewer processes are started by one that leads
_DOUBT_SECONDS = 1.0  # without a report, after which a node may be about to be lost
BEGIN_SILENCES = 10.0  # before the first word of a supervisor, on either side
_FIND_SILENCES = 2.0  # before the first word to one that leads now
_LOOK_SECONDS = 0.02
_LATEST = 0.3  # seconds that one look counts for at most, of whoever watches another


@dataclass(frozen=True)
class Spread:
    """root: the store of the run. node: this one's number. places: of every process, its node and its number there.
    silence: in seconds. leads: whether this one's supervisor says what is to be, in this term. succession: what becomes
    of the run when that changes."""

    root: JobStore
    node: int
    places: Mapping[int, tuple[int, int]]
    silence: float
    leads: bool
    succession: Succession
    term: int = 0

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
        """In which ranks meet."""
        return self.store.part("ranks")


@dataclass(frozen=True)
class Orders:
    """term, leader: of and which node orders. processes: number → which start of it, and the generation (JSON) that it
    begins in."""

    count: int
    term: int = 0
    leader: int = 0
    generation: int = 0
    aborted: bool = False
    invited: bool = False
    grows: bool = False
    over: bool = False
    processes: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])


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


@dataclass
class RemoteProcess(Process):
    """A rank's process on another node. cause: what happened to it, if not by itself."""

    start: int = 0
    members: Generation | None = None  # in which it begins, once it was told
    far: Wire | None = None  # where what it says is put, as if it had said it here
    wanted: bool = True

    def __post_init__(self) -> None:
        """It has no handle here."""

    @property
    def stopped(self) -> bool:
        return False

    @property
    def gone(self) -> bool:
        return self.code is not None

    def send(self, number: int) -> None:
        """Only being ended can be asked for; other signals come to a node from its launcher."""
        self.wanted = self.wanted and number != 9

    def hand(self, job: Job, descriptors: tuple[int, ...]) -> None:
        self.members = job.members

    def hear(self, said: Mapping[str, Any]) -> None:
        if self.far is not None:
            self.far.send(outcome_of(said))
            self.far.close()
            self.far = None

    def close(self) -> None:
        self.wire.close()
        if self.far is not None:
            self.far.close()


class _Node:
    """Another node, as the first one sees it."""

    def __init__(self, number: int) -> None:
        self.number, self.incarnation, self.is_here, self.in_doubt = number, "", True, False
        self.heard, self.count = Heard(), 0
        self.is_adopted = True  # False: it has processes that were started by orders of another


class SpreadProcesses(Processes):
    """Those of this node, and of others as far as they say."""

    def __init__(self, folder: Path, preload: tuple[str, ...], spread: Spread, board: StatusBoard) -> None:
        super().__init__(folder, preload, saves=False)
        self._spread, self._board, self._term = spread, board, spread.term
        self._nodes, self._starts = list[_Node](), 0
        self._lifelines: Lifelines | None = None
        if spread.leads:
            self._lead()

    def _lead(self) -> None:
        """All others have told where their processes are."""
        self._starts = self._term * _STARTS_OF_A_TERM
        self._nodes = [_Node(number) for number in self._spread.others]
        self._lifelines = Lifelines(self._spread.store)

    def take_over(self, spread: Spread, now: Generation, lost: int) -> None:
        """Leads from now on, with the processes that there are. now: who the ranks are. lost: the node that led before;
        the processes of others become known when these report."""
        for rank in [rank for rank in self.alive if rank not in now.members]:
            self.bury(rank)
        self._spread, self._term = spread, spread.term
        self._lead()
        for rank in [rank for rank in now.members if rank not in self.alive]:
            self.alive[rank] = self._remote_process(rank, start=0, members=now)
            if self._node_of(rank) is None:  # it was to be started here
                self.alive[rank].code = -9
        for node in self._nodes:
            node.is_adopted = False
            if node.number == lost:
                node.is_here = False
                self._lose(node, f"was lost with node {lost}, whose supervisor led the run,")
        while any(node.is_here and not node.incarnation for node in self._nodes):
            self.note_ended()  # until all others have reported here, or are lost, too
            time.sleep(_LOOK_SECONDS)

    def _start(self, missing: Sequence[int]) -> None:
        super()._start([rank for rank in missing if self._node_of(rank) is None])
        for rank in missing:
            if self._node_of(rank) is not None:
                self._starts += 1
                self.alive[rank] = self._remote_process(rank, start=self._starts)

    def _remote_process(self, rank: int, start: int, members: Generation | None = None) -> RemoteProcess:
        ours, theirs = socket.socketpair()
        return RemoteProcess(rank, 0, Wire(ours), None, start=start, members=members, far=Wire(theirs))

    def can_start(self, rank: int) -> bool:
        node = self._node_of(rank)
        return node is None or node.is_here

    def hears_of(self, rank: int) -> bool:
        node = self._node_of(rank)
        return node is None or not node.in_doubt

    @property
    def in_doubt(self) -> bool:
        return any(node.is_here and node.in_doubt for node in self._nodes)

    def note_ended(self) -> None:
        super().note_ended()
        if self._lifelines is not None:
            self._lifelines.look()
        for node in self._nodes:
            self._exchange(node)

    @property
    def nodes_here(self) -> list[int]:
        """That were not lost, this one among them."""
        return [self._spread.node, *(node.number for node in self._nodes if node.is_here)]

    def close(self) -> None:
        self.end()
        for node in self._nodes:
            self._order(node, over=True)
        if self._lifelines is not None:
            self._lifelines.close()
        super().close()

    def _node_of(self, rank: int) -> _Node | None:
        where = self._spread.places[rank][0]
        return next((node for node in self._nodes if node.number == where), None)

    def _remote(self, node: _Node) -> dict[int, RemoteProcess]:
        both = {**{process.rank: process for process in self._buried}, **self.alive}
        numbers = self._spread.numbers(node.number)
        return {n: process for n in numbers if isinstance(process := both.get(n), RemoteProcess)}

    def _exchange(self, node: _Node) -> None:
        store, key = self._spread.store, report_key(node.number)
        report = read_record(Report, store.get(key)) if store.check([key]) else None
        seconds = node.heard.seconds_since(f"{report.incarnation} {report.count}" if report else "")
        node.in_doubt = seconds > _DOUBT_SECONDS
        if node.is_here and seconds > _CLOSED_SECONDS and self._is_closed(node):
            node.is_here = False
            self._lose(node, f"was lost with node {node.number}, whose supervisor ended,")
        elif node.is_here and seconds > self._patience(node):
            node.is_here = False
            self._claim(node)
            self._lose(node, f"was lost with node {node.number}, of which nothing was heard for {seconds:.0f} s,")
        if report is not None and seconds == 0.0:
            if node.incarnation and report.incarnation != node.incarnation:
                self._lose(node, f"was lost with node {node.number}, which was started again,")
            node.incarnation, node.is_here = report.incarnation, True
            self._take(node, report)
        self._order(node)

    def _patience(self, node: _Node) -> float:
        """Seconds without a word of a node, after which it is lost. Before its first one its supervisor makes ready, or
        finds out who leads."""
        silences = 1.0 if node.incarnation else BEGIN_SILENCES if node.is_adopted else _FIND_SILENCES
        return silences * self._spread.silence

    def _is_closed(self, node: _Node) -> bool:
        return self._lifelines is not None and self._lifelines.closed(node.incarnation)

    def _claim(self, node: _Node) -> None:
        """Before others are ranks in the places of those of a node that may still live, and may lead."""
        self._term += 1
        if not self._spread.succession.affirm(self._spread.root, self._term):
            raise LinkError(
                f"node {self._spread.node} has heard nothing of node {node.number} for {self._spread.silence:g} s, and "
                "another node leads the run now",
                "the run goes on there; this node can be started again and is taken in",
            )

    def _take(self, node: _Node, report: Report) -> None:
        for number, process in self._remote(node).items():
            name = str(number)
            process.start = process.start or report.starts.get(name, 0)
            if report.starts.get(name) != process.start or process.code is not None:
                continue
            self._board.slots[number].fill(base64.b64decode(report.slots[name]))
            if name in report.said:
                process.hear(report.said[name])
            process.code = report.ended.get(name)

    def _lose(self, node: _Node, cause: str) -> None:
        for process in self._remote(node).values():
            if process.code is None:
                process.code, process.cause = -9, cause

    def _order(self, node: _Node, over: bool = False) -> None:
        node.count += 1
        if not (node.is_adopted or node.incarnation or over):
            return  # it would end processes of which nothing is known here yet
        board, wanted = self._board, self._remote(node)
        processes = {
            str(number): (process.start, process.members.to_json())
            for number, process in wanted.items()
            if process.wanted and process.code is None and process.members is not None
        }
        orders = Orders(
            node.count, self._term, self._spread.node, board.generation, board.aborted, board.invited, board.room > 0,
            over, processes,
        )  # fmt: skip
        send(self._spread.store, orders_key(node.number), orders)


def told(outcome: Done | Left | Failed) -> dict[str, Any]:
    """What a process said when it was done, for the store: nothing that is unpickled comes from there."""
    if isinstance(outcome, Done):
        return {"kind": "done"}
    if isinstance(outcome, Left):
        return {"kind": "left", "code": outcome.code}
    error = outcome.error
    ours = None if error is None else [type(error).__name__, error.message, error.hint]
    return {"kind": "failed", "error": ours, "text": outcome.text, "traceback": outcome.traceback}


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
        name, message, hint = said["error"]
        error = _KINDS.get(name, errors.PhalanxError)(message, hint)
    return Failed(error, said["text"], said["traceback"])

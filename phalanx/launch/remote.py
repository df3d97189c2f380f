"""Processes of a job on several machines, as the supervisor that leads sees them: its own, and those of others as far
as these report.

To whoever watches a job they are processes like any others. A node is lost when the connection to its supervisor closes
(`lifeline.py`), or when its report does not change for a while; before the others go on without one that may still
live, a term is claimed (`succession.py`).
"""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import LinkError
from phalanx.launch.lifeline import Lifelines
from phalanx.launch.membership import Generation
from phalanx.launch.process import Process
from phalanx.launch.processes import Processes
from phalanx.launch.rank_main import Job
from phalanx.launch.spread import (
    BEGIN_SILENCES,
    Heard,
    Orders,
    Report,
    Spread,
    orders_key,
    outcome_of,
    report_key,
    send,
)
from phalanx.launch.status_board import StatusBoard
from phalanx.launch.wire import Wire
from phalanx.records import read_record

_CLOSED_SECONDS = 1.0  # without a report, after which a node whose connection closed is lost
_STARTS_OF_A_TERM = 1_000_000  # fewer processes are started by one that leads
_DOUBT_SECONDS = 1.0  # without a report, after which a node may be about to be lost
_FIND_SILENCES = 2.0  # before the first word to one that leads now
_LOOK_SECONDS = 0.02


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
        self.has_begun = False  # has had processes
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

    def enter(self, spread: Spread) -> None:
        """Another attempt of the same run."""
        self._spread = spread

    def take_over(self, spread: Spread, now: Generation, lost: Sequence[int]) -> None:
        """Leads from now on, with the processes that there are. now: who the ranks are. lost: nodes that led before;
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
            if node.number in lost:
                node.is_here = False
                self._lose(node, f"was lost with node {node.number}, whose supervisor led the run,")
        while any(node.is_here and not node.incarnation for node in self._nodes):
            self.note_ended()  # until all others have reported here, or are lost, too
            time.sleep(_LOOK_SECONDS)

    def _start(self, missing: Sequence[int]) -> None:
        super()._start([rank for rank in missing if self._node_of(rank) is None])
        for rank in missing:
            if (node := self._node_of(rank)) is not None:
                self._starts += 1
                self.alive[rank] = self._remote_process(rank, start=self._starts)
                if not node.is_here:
                    self._lose(node, f"could not be started: node {node.number} is lost,")

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
            if self._spread.succession.claimed(self._term + 1) is not None:  # it did not end: it leads
                raise self._deposed(node)
            self._lose(node, f"was lost with node {node.number}, whose supervisor ended,")
        elif node.is_here and seconds > self._patience(node):
            node.is_here = False
            self._claim(node)
            self._lose(node, f"was lost with node {node.number}, of which nothing was heard for {seconds:.0f} s,")
        if report is not None and seconds == 0.0:
            if node.incarnation and report.incarnation != node.incarnation:
                self._lose(node, f"was lost with node {node.number}, which was started again,")
            node.incarnation, node.is_here = report.incarnation, True
            node.has_begun = bool(report.starts)
            self._take(node, report)
        self._order(node)

    def _patience(self, node: _Node) -> float:
        """Seconds without a word of a node, after which it is lost. Before its first process its supervisor imports
        what that needs; before its first word to one that did not lead it finds out who does."""
        if not node.is_adopted:
            silences = 1.0 if node.incarnation else _FIND_SILENCES
        else:
            silences = 1.0 if node.has_begun else BEGIN_SILENCES
        return silences * self._spread.silence

    def _is_closed(self, node: _Node) -> bool:
        return self._lifelines is not None and self._lifelines.closed(node.incarnation)

    def _claim(self, node: _Node) -> None:
        """Before others are ranks in the places of those of a node that may still live, and may lead."""
        self._term += 1
        if not self._spread.succession.affirm(self._spread.root, self._term, node.number):
            raise self._deposed(node)

    def _deposed(self, node: _Node) -> LinkError:
        return LinkError(
            f"node {self._spread.node} does not hear of node {node.number}, and another node leads the run now",
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
            over, processes, self._spread.again,
        )  # fmt: skip
        send(self._spread.store, orders_key(node.number), orders)

"""The supervisor of a node that is not the first: it has the processes that the first one orders, and tells of them.

It decides nothing but one thing: when it has heard nothing from the first supervisor for a while it ends its ranks,
because they will soon be taken for lost, and others may be in their places.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import secrets
import selectors
from collections.abc import Callable
from typing import Any

from phalanx.errors import LinkError
from phalanx.launch.membership import Generation
from phalanx.launch.processes import Process
from phalanx.launch.rank_main import Event, Job
from phalanx.launch.signals import stop_request
from phalanx.launch.spread import FENCE, Heard, Orders, Report, Spread, read_orders, report_key, send, told
from phalanx.launch.worker_pool import HandOver, WorkerPool, read_result
from phalanx.records import read_record

_TICK_SECONDS = 0.1


class Follower:
    """Of one job, in a pool that was entered."""

    def __init__(self, pool: WorkerPool, spread: Spread) -> None:
        self._pool, self._spread = pool, spread
        self._processes, self._board = pool.processes, pool.board
        self._starts: dict[int, int] = {}
        self._gone: dict[int, Process] = {}  # that were ended or ended by themselves
        self._said: dict[int, dict[str, Any]] = {}
        self._incarnation, self._count = secrets.token_hex(8), 0
        self._heard = Heard()

    def run(self, on_event: Callable[[str, Any], None], target: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Until the job is over: what those of its processes returned that came to the end. on_event: for what rank 0
        tells, should it come to be here."""
        self._on_event = on_event
        job = self._pool.post(self._pool.size)
        with (
            self._pool.handing(target, arguments) as (hand_over, results),
            selectors.DefaultSelector() as selector,
            stop_request(speaks=False),  # signals come to all nodes; the first one passes them on
        ):
            while not (orders := self._orders()).over:
                self._obey(orders, job, hand_over, selector)
                for key, _ in selector.select(_TICK_SECONDS):
                    self._hear(key.data, selector)
                self._processes.note_ended()
                self._tell()
            self._processes.end()
            self._tell()
            found = (read_result(results[number]) for number in self._said if self._said[number]["kind"] == "done")
            return [each for each in found if each is not None]

    def _orders(self) -> Orders:
        """The newest; raises when the first supervisor is not heard any more."""
        try:
            orders = read_orders(self._spread.store, self._spread.node)
        except RuntimeError as error:
            self._processes.end()
            raise LinkError(f"node {self._spread.node} lost the store of its job") from error
        seconds = self._heard.seconds_since(str(orders.count) if orders else "")
        if seconds > FENCE * self._spread.silence and (orders is not None or seconds > 10 * self._spread.silence):
            self._processes.end()
            raise LinkError(
                f"node {self._spread.node} has heard nothing of the first node's supervisor for {seconds:.0f} s, and "
                "ended its ranks",
                "see what became of the first node; the node can be started again and is taken in if the run goes on",
            )
        return orders or Orders(-1)

    def _obey(self, orders: Orders, job: Job, hand_over: HandOver, selector: selectors.BaseSelector) -> None:
        board = self._board
        if orders.count >= 0:
            board.invite(orders.invited)
            board.let_grow(orders.grows)
            board.publish(orders.generation)
        if orders.aborted:
            board.abort()
        wanted = {int(number): start for number, (start, _) in orders.processes.items()}
        for number in [n for n in self._processes.alive if self._starts[n] != wanted.get(n)]:
            self._end(number, selector)
        for number, start in wanted.items():
            if self._starts.get(number, 0) < start:
                board.slots[number].clear()
                self._said.pop(number, None)
                self._processes.start_one(number)
                self._starts[number] = start
                members = read_record(Generation, orders.processes[str(number)][1])
                hand_over([number], dataclasses.replace(job, members=members))
                process = self._processes.alive[number]
                selector.register(process.wire, selectors.EVENT_READ, process)

    def _end(self, number: int, selector: selectors.BaseSelector) -> None:
        process = self._processes.alive[number]
        self._hear(process, selector, last=True)
        self._processes.bury(number)
        self._gone[number] = process

    def _hear(self, process: Process, selector: selectors.BaseSelector, last: bool = False) -> None:
        for message in process.wire.take():
            if isinstance(message, Event):
                self._on_event(message.name, message.payload)
            else:
                self._said[process.rank] = told(message)
        if process.wire.closed or last:
            with contextlib.suppress(KeyError):  # it has hung up before
                selector.unregister(process.wire)

    def _tell(self) -> None:
        self._count += 1
        ended = {**self._gone, **self._processes.alive}
        codes = {str(number): process.code for number, process in ended.items() if process.code is not None}
        report = Report(
            self._incarnation, self._count, {str(number): start for number, start in self._starts.items()},
            {str(n): base64.b64encode(self._board.slots[n].content()).decode() for n in self._starts}, codes,
            {str(number): said for number, said in self._said.items()},
        )  # fmt: skip
        send(self._spread.store, report_key(self._spread.node), report)

"""The supervisor of a node that does not lead: it has the processes that the one that does orders, and tells of them.

It decides nothing but one thing: what becomes of its ranks when the supervisor that leads is gone. Whoever claims the
next term first leads from then on (`succession.py`), if its ranks train; the others follow it, and their ranks end
unless it wants them.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import secrets
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import BeginAnew, LinkError, StoreError
from phalanx.launch.abort import Late, within
from phalanx.launch.lifeline import Lifeline
from phalanx.launch.membership import Generation
from phalanx.launch.process import Process
from phalanx.launch.rank_main import Event, Job
from phalanx.launch.renewal import OnLoss
from phalanx.launch.signals import stop_request
from phalanx.launch.spread import BEGIN_SILENCES, Heard, Orders, Report, Spread, read_orders, report_key, send, told
from phalanx.launch.store import JobStore
from phalanx.launch.succession import Claim, is_gone, reach
from phalanx.launch.worker_pool import HandOver, WorkerPool, read_result
from phalanx.records import read_record

_TICK_SECONDS = 0.1
_PATIENCE = 2.0  # silences without a word of who leads, after which it is gone: by then it has claimed a term, if not
_CLAIM_PATIENCE = 3.0  # silences for another node to lead


@dataclass(frozen=True)
class Survival:
    """What a run is asked to do when ranks are lost: as in `WorkerPool.run`."""

    on_loss: OnLoss
    least: int = 1


class Follower:
    """Of one job, in a pool that was entered. `spread`: as it is now; it may come to lead."""

    def __init__(self, pool: WorkerPool, spread: Spread) -> None:
        self._pool = pool
        self._processes, self._board = pool.processes, pool.board
        self._starts: dict[int, int] = {}
        self._gone: dict[int, Process] = {}  # that were ended or ended by themselves
        self._said: dict[int, dict[str, Any]] = {}
        self._incarnation, self._count = secrets.token_hex(8), 0
        self._newest = Generation(0, tuple(range(pool.size)))
        self._enter(spread)

    def _enter(self, spread: Spread, leader: int = 0) -> None:
        self.spread, self._heard, self._orders = spread, Heard(), Orders(-1, spread.term, leader)
        self._lifeline = Lifeline(spread.store, self._incarnation)

    def run(
        self, on_event: Callable[[str, Any], None], survival: Survival, target: Callable[..., Any], *arguments: Any
    ) -> list[Any]:
        """Until the job is over: what those of its processes returned that came to the end. on_event: for what rank 0
        tells, should it come to be here. Raises `BeginAnew` where all machines do; then call it again."""
        if self.spread.leads:
            how = {"on_event": on_event, "on_loss": survival.on_loss, "least": survival.least}
            return self._pool.run(target, *arguments, **how)
        self._on_event = on_event
        job = self._pool.post(self._pool.size)
        with self._pool.handing(target, arguments) as (hand_over, results):
            while (lost := self._follow(job, hand_over)) is not None:
                spread, leaders = self._next_term(lost)
                self._lifeline.close()  # by now whoever sees that finds the claim
                if spread.leads:
                    self.spread, job = spread, dataclasses.replace(job, members=self._bumped())
                    handing = hand_over, results
                    on_loss, least = survival.on_loss, survival.least
                    return self._pool.take_over(spread, leaders, job, handing, on_event, on_loss, least)
                self._enter(spread, leaders[-1])
            self._processes.end()
            if not self._orders.over:
                raise self._anew(self._orders.again[len(self.spread.again)])
            with contextlib.suppress(StoreError):  # who leads may have left
                self._tell()
            self._lifeline.close()
            found = (read_result(results[number]) for number in self._said if self._said[number]["kind"] == "done")
            return [each for each in found if each is not None]

    def _anew(self, again: str) -> BeginAnew:
        """For the attempt after the one that ended with this."""
        self._newest = Generation(0, tuple(range(self._pool.size)))
        self._gone, self._said = {}, {}
        self.spread = dataclasses.replace(self.spread, again=(*self.spread.again, again))
        self._pool.enter(self.spread)
        return BeginAnew("a rank of another machine could not go on, and all begin anew", again=again)

    def _bumped(self) -> Generation:
        """The ranks as they are, under a number that no other node can have seen: another generation may have been
        published that did not come to be known here."""
        return dataclasses.replace(self._newest, number=self._newest.number + 1)

    def _follow(self, job: Job, hand_over: HandOver) -> LinkError | None:
        """Until the job is over, or begins anew; or why nobody leads it any more."""
        with selectors.DefaultSelector() as selector, stop_request(speaks=False):  # who leads passes signals on
            for process in self._processes.alive.values():
                selector.register(process.wire, selectors.EVENT_READ, process)
            try:
                while not self._ended(self._learn()):
                    self._obey(job, hand_over, selector)
                    for key, _ in selector.select(_TICK_SECONDS):
                        self._hear(key.data, selector)
                    self._processes.note_ended()
                    self._within_patience(self._tell)
            except LinkError as lost:
                return lost
        return None

    def _ended(self, orders: Orders) -> bool:
        return orders.over or len(orders.again) > len(self.spread.again)

    def _learn(self) -> Orders:
        """The newest orders; raises when who gives them is not heard any more."""
        found = self._within_patience(lambda: read_orders(self.spread.store, self.spread.node))
        seconds = self._heard.seconds_since(str(found.count) if found else "")
        silence = self.spread.silence
        if seconds > (_PATIENCE if found is not None else BEGIN_SILENCES) * silence:
            raise LinkError(f"node {self.spread.node} heard nothing of the supervisor that leads for {seconds:.0f} s")
        self._orders = found or self._orders
        if self._orders.generation > self._newest.number:
            self._newest = self._within_patience(self._read_generation)
        return self._orders

    def _read_generation(self) -> Generation:
        """The newest; the one before while it is not in this store, but was in one that is lost."""
        key, store = Generation(self._orders.generation, ()).key, self.spread.ranks_store
        return read_record(Generation, store.get(key)) if store.check([key]) else self._newest

    def _within_patience(self, call: Callable[[], Any]) -> Any:
        """A link that is cut keeps a call waiting for long."""
        seconds = _PATIENCE * self.spread.silence
        try:
            return within(seconds, call)
        except Late:
            raise StoreError(f"node {self.spread.node} cannot reach the store of its job for {seconds:.0f} s") from None

    def _next_term(self, lost: LinkError) -> tuple[Spread, list[int]]:
        """The run from now on, led by this one if its ranks train and nobody else was first; and the nodes that led it,
        the last one now if this one does not. Whoever claimed a term and does not answer is passed over: it cannot go
        on without this node unless it claims the next one. A node that it did so against is lost."""
        spread, term, leaders = self.spread, self._orders.term + 1, [self._orders.leader]
        while True:
            trains = self._trains()
            if trains and (own := self._succeeded(term, leaders[-1])) is not None:
                return dataclasses.replace(spread, root=own, leads=True, term=term), leaders
            claim, found = self._found_leader(term)
            if claim is not None and found is not None:
                return dataclasses.replace(spread, root=found, term=claim.term), [*leaders, claim.node]
            if not trains or claim is None or spread.node in (claim.node, claim.without):
                break
            leaders, term = [*leaders, claim.node], claim.term + 1
        self._processes.end()
        what = "ended its ranks" if trains else "has no rank that could go on by itself"
        raise LinkError(
            f"{lost.message}; node {spread.node} {what}",
            "see what became of the first node; if the run goes on, this node can be started again and is taken in; "
            "else go on with --resume auto",
        )

    def _succeeded(self, term: int, without: int) -> JobStore | None:
        """The run's store here, where this node leads from this term on."""
        try:
            return self.spread.succession.succeed(self.spread.root, term, without)
        except StoreError:  # no way to where the others are
            return None

    def _found_leader(self, term: int) -> tuple[Claim | None, JobStore | None]:
        """Who claimed this term or a later one, and the run's store there. None: it has ended, or did not answer for a
        while."""
        deadline = time.monotonic() + _CLAIM_PATIENCE * self.spread.silence
        while True:
            claim = self.spread.succession.claimed(term)
            store = None if claim is None else reach(claim)
            if store is not None:
                return claim, self.spread.root.at(store)
            if time.monotonic() > deadline or (claim is not None and is_gone(claim)):
                return claim, None
            time.sleep(_TICK_SECONDS)

    def _trains(self) -> bool:
        """Whether ranks of this node would go on without others."""
        guarded = (self._board.slots[number].guarded for number in self._processes.alive)
        return not self._said and not self._board.aborted and any(guarded)

    def _obey(self, job: Job, hand_over: HandOver, selector: selectors.BaseSelector) -> None:
        orders, board = self._orders, self._board
        if orders.count < 0:
            return
        board.invite(orders.invited)
        board.let_grow(orders.grows)
        if self.spread.term and self.spread.root.address is not None:
            board.move_store(*self.spread.root.address)
        board.publish(orders.generation)
        if orders.aborted:
            board.abort()
        wanted = {int(number): start for number, (start, _) in orders.processes.items()}
        for number in [n for n in self._processes.alive if self._starts[n] != wanted.get(n)]:
            self._end(number, selector)
        for number in [n for n, start in wanted.items() if self._starts.get(n, 0) < start]:
            self._begin(number, wanted, job, hand_over)
            process = self._processes.alive[number]
            selector.register(process.wire, selectors.EVENT_READ, process)

    def _begin(self, number: int, wanted: Mapping[int, int], job: Job, hand_over: HandOver) -> None:
        self._board.slots[number].clear()
        self._said.pop(number, None)
        self._processes.start_one(number)
        self._starts[number] = wanted[number]
        members = read_record(Generation, self._orders.processes[str(number)][1])
        store = self.spread.ranks_store.ticket
        hand_over([number], dataclasses.replace(job, members=members, store=store))

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
        self._lifeline.hold()
        ended = {**self._gone, **self._processes.alive}
        codes = {str(number): process.code for number, process in ended.items() if process.code is not None}
        report = Report(
            self._incarnation, self._count, {str(number): start for number, start in self._starts.items()},
            {str(n): base64.b64encode(self._board.slots[n].content()).decode() for n in self._starts}, codes,
            {str(number): said for number, said in self._said.items()},
        )  # fmt: skip
        send(self.spread.store, report_key(self.spread.node), report)

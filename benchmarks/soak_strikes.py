"""What happens to a run of the soak, one fault after the other: each some steps after the run has recovered from the
one before, and a moment into a step. A fault is a row of `KINDS`."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from soak_checks import Followed
from soak_job import STEPS, Fault, Struck, give_order
from soak_limits import memory_limit

from phalanx.launch.status_board import StatusSlot, StatusView
from phalanx.launch.worker_pool import WorkerPool
from phalanx.observe import requests

# How long the machine may take, busy as it may be: to train on after a fault, to do what a fault waits for, to tell of
# a loss that not every fault causes.
LONGEST, _MOMENT, _TELLING = 120.0, 20.0, 6.0
PLANS: Mapping[int, Sequence[str]] = {
    1: ("mb=2",), 2: ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2,mb=2", "tp=2"), 3: ("dp=3", "pp=3,mb=2"),
    4: ("dp=4", "pp=2,dp=2,mb=2", "tp=2,dp=2", "dp=4,zero=1,zero_degree=2", "pp=2,tp=2,mb=2", "dp=4,zero=2",
        "pp=4,mb=4"),
    5: ("dp=5", "dp=5,zero=1"),
}  # fmt: skip


class Striker:
    """Of one run, through all its attempts."""

    def __init__(self, pool: WorkerPool, out: Path, orders: Path, faults: Sequence[Fault]) -> None:
        self.pool, self.out, self.orders, self.log = pool, out, orders, Followed(out)
        self._coming, self.struck, self.problems = list(faults), list[Struck](), list[str]()
        self._ended, self._told = threading.Event(), 0

    @contextlib.contextmanager
    def striking(self) -> Iterator[None]:
        """Within it faults happen."""
        self.pool.board.reset()
        self._ended = threading.Event()
        thread = threading.Thread(target=self._strike_all, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(60.0)

    @property
    def is_done(self) -> bool:
        return not self._coming

    def _strike_all(self) -> None:
        while self._coming and self._comes(fault := self._coming[0]):
            self._coming.pop(0)
            draw = random.Random(fault.seed)
            if len(self.members) < 2 and not self._grow_back(draw):
                continue
            self._note(fault.kind)
            self._told = self.log.num_losses
            KINDS[fault.kind](self, draw)
            self.tells(0.0 if fault.kind in UNCERTAIN else _TELLING)

    def _comes(self, fault: Fault) -> bool:
        """Waits until a fault is due; False when the run has ended. No run may stand still for long."""
        since = self.struck[-1].time if self.struck else 0.0
        if fault.kind == "first step" and not self.struck:
            due = lambda: self.step >= 1 and len(self.members) > 1  # noqa: E731
        elif fault.kind == "last step":
            due = lambda: self.step >= STEPS  # noqa: E731
        else:
            due = lambda: self.log.num_steps(since) >= fault.gap  # noqa: E731
        if not self.until(due, LONGEST) and not self._ended.is_set():
            seen = {number: self._seen(number) for number in self.pool.pids}
            told = f"generation {self.pool.board.generation}, {seen}"
            self.problems.append(f"did not train on for {LONGEST:.0f} s after {self.struck[-1:]}: {told}")
            self.send(list(self.pool.pids), signal.SIGUSR2)
            time.sleep(1.0)
            self.send(list(self.pool.pids), signal.SIGKILL)
            return False
        return not self._ended.wait(fault.delay)

    def _seen(self, number: int) -> str:
        slot = self.slot(number)
        return f"{slot.read().where()}, guarded {slot.guarded}, waits for {slot.awaited}"

    def _grow_back(self, draw: random.Random) -> bool:
        """Of a run with one rank left: whether it gets others."""
        self._note("ranks added")
        _add_ranks(self, draw)
        return self.until(lambda: len(self.members) > 1, _MOMENT)

    def _note(self, kind: str) -> None:
        self.struck.append(Struck(kind, self.step, len(self.members), time.time()))

    @property
    def members(self) -> list[int]:
        """Processes that are ranks, and train."""
        return [number for number in self.pool.pids if self.slot(number).guarded]

    @property
    def busy_members(self) -> list[int]:
        """Those of them that read samples: a rank without a place in the plan does not."""
        return [number for number in self.members if self.slot(number).read().place != "spare"] or self.members

    @property
    def step(self) -> int:
        return max((self.slot(number).read().step for number in self.members), default=-1)

    def slot(self, number: int) -> StatusSlot:
        return self.pool.board.slots[number]

    def tells(self, seconds: float = _MOMENT) -> bool:
        """Waits until one more loss is told of."""
        if told := self.until(lambda: self.log.num_losses > self._told, seconds):
            self._told = self.log.num_losses
        return told

    def until(self, condition: Callable[[], Any], seconds: float) -> bool:
        """Waits; whether it came true before the run ended or the time was over."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self._ended.wait(2e-3):
                return False
        return True

    def seen(self, number: int, wanted: Callable[[StatusView], bool], seconds: float = _MOMENT) -> bool:
        """Waits until a process does something."""
        return self.until(lambda: wanted(self.slot(number).read()), seconds)

    def send(self, processes: Sequence[int], number: int) -> None:
        for process in processes:
            with contextlib.suppress(KeyError, ProcessLookupError):
                os.kill(self.pool.pids[process], number)

    def order(self, process: int, what: str) -> None:
        """To a process; waits until it has begun to obey."""
        pid = self.pool.pids.get(process)
        if pid is not None:
            order = give_order(self.orders, pid, what)
            self.until(lambda: not order.exists(), _MOMENT)
            order.unlink(missing_ok=True)


Strike = Callable[[Striker, random.Random], None]


def _signal(number: int, share: Callable[[int], int] = lambda num_ranks: 1) -> Strike:
    """To so many ranks."""

    def strike(run: Striker, draw: random.Random) -> None:
        run.send(draw.sample(run.members, share(len(run.members))), number)

    return strike


def _order(what: str) -> Strike:
    return lambda run, draw: run.order(draw.choice(run.busy_members), what)


def _second_in_recovery(run: Striker, draw: random.Random) -> None:
    first, second = draw.sample(run.members, 2)
    run.send([first], signal.SIGKILL)
    if run.seen(second, lambda view: view.phase == "recover"):
        run.until(lambda: False, draw.random() * 0.4)
        run.send([second], signal.SIGKILL)


def _while_saving(run: Striker, draw: random.Random) -> None:
    victim = draw.choice(run.members)
    if run.seen(victim, lambda view: view.phase == "save"):
        run.until(lambda: False, draw.random() * 0.01)
        run.send([victim], signal.SIGKILL)


def _while_changing(run: Striker, draw: random.Random) -> None:
    """While ranks make ready for another plan, or go over to it."""
    victim = draw.choice(run.members)
    requests.ask(run.out, draw.choice(PLANS[len(run.members)]))
    if run.seen(victim, lambda view: view.phase == "compile"):
        run.until(lambda: False, draw.random() * draw.choice([0.05, 1.0]))
        run.send([victim], signal.SIGKILL)


def _again_and_again(run: Striker, draw: random.Random) -> None:
    """Whoever takes its place, as soon as it has made a step."""
    victim = draw.choice(run.members)
    for _ in range(3):
        run.send([victim], signal.SIGKILL)
        if not run.tells() or not run.until(lambda: run.log.num_steps(0.0) >= 1, _MOMENT) or len(run.members) < 2:
            return
        victim = victim if victim in run.members else draw.choice(run.members)


def _stop_and_go_on(run: Striker, draw: random.Random) -> None:
    victim = draw.choice(run.members)
    run.send([victim], signal.SIGSTOP)
    run.until(lambda: False, draw.random() * 1.5)
    run.send([victim], signal.SIGCONT)


def _corrupt_copy(run: Striker, draw: random.Random) -> None:
    """A bit in one rank's copies, and then a rank is lost."""
    run.order(draw.choice(run.busy_members), "corrupt copy")
    run.send([draw.choice(run.members)], signal.SIGKILL)


def _memory_limit(run: Striker, draw: random.Random) -> None:
    victim = draw.choice(run.busy_members)
    with memory_limit(run.pool.pids[victim]) as check:
        run.order(victim, "memory limit")
        run.until(check, _MOMENT)


def _add_ranks(run: Striker, draw: random.Random) -> None:
    """A plan for more than there are, up to five."""
    wanted = min(5, len(run.members) + draw.choice([1, 2]))
    requests.ask(run.out, draw.choice(PLANS[wanted]))
    run.until(lambda: len(run.members) >= wanted, _MOMENT)


def _add_while_shrinking(run: Striker, draw: random.Random) -> None:
    wanted = min(5, len(run.members) + 1)
    requests.ask(run.out, draw.choice(PLANS[wanted]))
    run.until(lambda: False, draw.random())
    run.send([draw.choice(run.members)], signal.SIGKILL)


def _kill_store(run: Striker, draw: random.Random) -> None:
    os.kill(run.pool.processes._store.pid, signal.SIGKILL)


def _kill_server(run: Striker, draw: random.Random) -> None:
    run.pool.processes._server.send_signal(signal.SIGKILL)


KINDS: Mapping[str, Strike] = {
    "kill": _signal(signal.SIGKILL), "segfault": _signal(signal.SIGSEGV), "abort": _signal(signal.SIGABRT),
    "stop": _signal(signal.SIGSTOP), "two at once": _signal(signal.SIGKILL, lambda ranks: min(2, ranks)),
    "half of them": _signal(signal.SIGKILL, lambda ranks: ranks // 2), "first step": _signal(signal.SIGKILL),
    "last step": _signal(signal.SIGKILL), "second in recovery": _second_in_recovery, "while saving": _while_saving,
    "while changing": _while_changing, "stop and go on": _stop_and_go_on, "again and again": _again_and_again,
    "corrupt copy": _corrupt_copy, "memory limit": _memory_limit, "ranks added": _add_ranks,
    "ranks added while shrinking": _add_while_shrinking, "store": _kill_store, "fork server": _kill_server,
    **{name: _order(name) for name in ("raise", "exit", "interpreter lock", "slow", "disk full", "out of memory",
                                       "links broken", "stale messages")},
}  # fmt: skip
# Nobody need be lost any more.
UNCERTAIN = ("slow", "disk full", "ranks added", "stop and go on", "again and again", "fork server")

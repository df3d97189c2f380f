"""A worker pool: ranks on this machine that stay and run one job after the other.

It has the board, watches the ranks while a job runs, and turns whatever goes wrong into one error. It
knows nothing of training: a job is a function that every rank calls with its context.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import selectors
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from phalanx.errors import PhalanxError
from phalanx.launch.main_script import MainScript, explained_pickling, refuse_while_loading
from phalanx.launch.membership import Generation
from phalanx.launch.processes import Processes
from phalanx.launch.rank_main import Job
from phalanx.launch.remote import SpreadProcesses
from phalanx.launch.renewal import OnLoss, Renewal
from phalanx.launch.signals import StopSignal, stop_signal
from phalanx.launch.spread import Spread
from phalanx.launch.status_board import SILENCE, StatusBoard
from phalanx.launch.store import JobStore, connect_store, new_secret
from phalanx.launch.watch import Watch
from phalanx.launch.wire import Wire

_TICK_SECONDS = 0.2
_ROOM = 64  # for ranks that come to a job beside those that it began with
Results = dict[int, IO[bytes]]  # by process: what it returned
OnEvent = Callable[[str, Any], None] | None
HandOver = Callable[[Iterable[int], Job], None]  # to these processes
PRELOAD = ("torch", "phalanx.comm.links", "phalanx.training.trainer")


class WorkerPool:
    """`size` local ranks, started when the first job needs them. Use it in a `with` statement.

    `device` is auto, cpu or cuda; `environment` adds variables to those of a rank, which has this process's. A rank
    that shows no sign of life for `silence` seconds of a step counts as lost. spread: where ranks are on other machines
    as well; the first one's pool has all of them, the others' are `Follower`s'.
    """

    def __init__(
        self,
        size: int,
        *,
        threads_per_rank: int | None = None,
        device: str = "auto",
        environment: Callable[[int], Mapping[str, str]] | None = None,
        preload: tuple[str, ...] = PRELOAD,
        silence: float = SILENCE,
        spread: Spread | None = None,
    ) -> None:
        assert size >= 1, size
        self.size, self._device, self._preload, self._silence = size, device, preload, silence
        self._threads = threads_per_rank or max(1, _num_cores() // size)
        self._environment = environment or (lambda rank: {})
        self._generation, self._store, self._spread = 0, None, spread

    def __enter__(self) -> WorkerPool:
        refuse_while_loading("WorkerPool")
        self._folder = Path(tempfile.mkdtemp(prefix="phalanx-pool-"))
        self._board = StatusBoard.create(self._folder / "board", self.size + (0 if self._spread else _ROOM))
        self._processes = self._new_processes()
        import torch.distributed  # noqa: F401 - now, while the fork server does so, too

        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._processes.close()
        self._store = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def board(self) -> StatusBoard:
        return self._board

    @property
    def processes(self) -> Processes:
        return self._processes

    @property
    def pids(self) -> dict[int, int]:
        """Rank → process, of those that run now."""
        return {rank: process.pid for rank, process in self._processes.alive.items()}

    def run(
        self,
        target: Callable[..., Any],
        *arguments: Any,
        world: int | None = None,
        on_event: OnEvent = None,
        on_loss: OnLoss = "stop",
        least: int = 1,
    ) -> list[Any]:
        """`target(context, *arguments)` on the first `world` ranks; what each returned, by rank. on_loss: what becomes
        of a job that loses a rank once all ranks have said that they would go on (`StatusSlot.guard`); least: with
        fewer ranks it does not.

        Ctrl-C, SIGTERM and SIGHUP are passed on to the ranks once; if they leave because of it, so does this function,
        with KeyboardInterrupt or SystemExit. A second one ends them at once.
        """
        world = self.size if world is None else world
        assert 1 <= world <= self.size, (world, self.size)
        with self.handing(target, arguments) as (hand_over, results):
            try:
                self._processes.start(world)
                job = self.post(world)
                with stop_signal() as stop:
                    hand_over(range(world), job)
                    renewal = self._renewal(job, on_loss, hand_over, least)
                    return self._watched(job, renewal, results, on_event, stop)
            except BaseException as error:
                # Ranks of a job that failed hold half-finished state: the next job gets fresh ones.
                self._processes.end()
                if self._spread is not None and isinstance(error, PhalanxError) and error.again:
                    self.enter(dataclasses.replace(self._spread, again=(*self._spread.again, error.again)))
                raise

    def enter(self, spread: Spread) -> None:
        """From the next job on ranks are spread like this."""
        self._spread = spread

    def take_over(
        self, spread: Spread, lost: Sequence[int], job: Job, handing: tuple[HandOver, Results], on_event: OnEvent,
        on_loss: OnLoss, least: int,
    ) -> list[Any]:  # fmt: skip
        """Goes on with a job that supervisors of nodes led that are lost. job: with the ranks that it had."""
        assert isinstance(self._processes, SpreadProcesses) and spread.root.address is not None
        self._spread, self._store = spread, spread.ranks_store
        step = max(slot.read().step for slot in self._board.slots)
        for number in (number for node in lost for number in spread.numbers(node)):
            self._board.slots[number].enter("step")
            self._board.slots[number].at_step(step)  # what it showed was not seen here; ranks are in a step together
        self._processes.take_over(spread, job.members, lost)
        self._board.invite(False)
        self._board.move_store(*spread.root.address)
        job = dataclasses.replace(job, store=self._store.ticket)
        renewal = self._renewal(job, on_loss, handing[0], least)
        assert renewal is not None
        if on_loss in ("regrow", "replace"):
            renewal.newcomers.expect([number for number in range(self.size) if number not in job.members.members])
        with stop_signal() as stop:
            return self._watched(job, renewal, handing[1], on_event, stop)

    def _watched(
        self, job: Job, renewal: Renewal | None, results: Results, on_event: OnEvent, stop: StopSignal
    ) -> list[Any]:
        """Until the job is over."""
        watch = Watch(self._processes, self._board, job, renewal)
        self._follow(watch, on_event, stop)
        if renewal is not None:
            renewal.newcomers.dismiss()
        found = [read_result(results[number]) for number in watch.members if number in results]
        for number in [number for number in self._processes.alive if number >= self.size]:
            self._processes.bury(number)
        return found

    @contextlib.contextmanager
    def handing(self, target: Callable[..., Any], arguments: tuple[Any, ...]) -> Iterator[tuple[HandOver, Results]]:
        """What gives processes a job, and files with what they return."""
        with contextlib.ExitStack() as opened:
            results: Results = {}
            task = opened.enter_context(tempfile.TemporaryFile(dir=self._folder))
            with explained_pickling():
                pickle.dump((target, arguments), task)

            def hand_over(numbers: Iterable[int], job: Job) -> None:
                for number in numbers:
                    if number not in results:
                        results[number] = opened.enter_context(tempfile.TemporaryFile(dir=self._folder))
                self._hand_over({number: results[number] for number in numbers}, job, task)

            yield hand_over, results

    def _new_processes(self) -> Processes:
        if self._spread is None:
            return Processes(self._folder, self._preload)
        return SpreadProcesses(self._folder, self._preload, self._spread, self._board)

    def post(self, world: int) -> Job:
        """A new job on a board that shows nothing yet."""
        self._generation += 1
        self._board.reset()
        if self._spread is not None and isinstance(self._processes, SpreadProcesses):
            self._processes.enter(self._spread)  # with the board as it is from now on
        for process in self._processes.alive.values():
            if process.log is not None and process.log.exists():
                os.truncate(process.log, 0)
        store = self._spread.ranks_store if self._spread else self._own_store()
        self._store = store
        return Job(
            self._generation, world, self._device, self._folder, store.ticket, self._threads,
            dict(os.environ), os.getcwd(), tuple(sys.path), MainScript.of_this_process(), store.secret, self._silence,
            Generation(0, tuple(range(world))), dict(self._spread.places) if self._spread else {},
        )  # fmt: skip

    def _own_store(self) -> JobStore:
        store = connect_store("127.0.0.1", self._processes.host_store())
        return JobStore(store, new_secret(), f"job{self._generation}")

    def _hand_over(self, results: Mapping[int, IO[bytes]], job: Job, task: IO[bytes]) -> None:
        """To these processes. What they read and write are open files that have no name: nobody else can put a pickle
        there. Each reads the task from its beginning, so each gets a file of its own."""
        path = self._folder / "task"
        with path.open("wb") as file:
            task.seek(0)
            shutil.copyfileobj(task, file)
        for number, result in results.items():
            result.seek(0)
            result.truncate()
            own = dataclasses.replace(job, environment={**job.environment, **self._environment(number)})
            with path.open("rb") as file:
                self._processes.alive[number].hand(own, (file.fileno(), result.fileno()))
        path.unlink()

    def _renewal(
        self, job: Job, on_loss: OnLoss, hand_over: Callable[[Iterable[int], Job], None], least: int
    ) -> Renewal | None:  # fmt: skip
        if on_loss == "stop":
            return None
        assert self._store is not None

        def start(number: int, members: Generation) -> None:
            hand_over([number], dataclasses.replace(job, members=members, store=renewal.store.ticket))

        renewal = Renewal(self._processes, self._board, job, self._store, on_loss, start, least)
        return renewal

    def _follow(self, watch: Watch, on_event: OnEvent, stop: StopSignal) -> None:
        """Returns when every rank is done, raises when the job is over in another way."""
        forwarded, heard = 0, list(watch.members)
        with selectors.DefaultSelector() as selector:
            server = None
            while not watch.over():
                server = _listening(selector, server, self._processes.control)
                for number in heard:
                    process = self._processes.alive[number]
                    selector.register(process.wire, selectors.EVENT_READ, process)
                for key, _ in selector.select(_TICK_SECONDS):
                    if key.data is not None and watch.hear(key.data, on_event):
                        selector.unregister(key.fileobj)
                watch.look()
                heard = watch.take_fresh()
                if stop.signals and not forwarded:
                    forwarded = stop.signals[0]
                    watch.stop(forwarded)
                stop.require_patience()
        watch.conclude()


def _listening(selector: selectors.BaseSelector, before: Wire | None, now: Wire) -> Wire | None:
    """To what the fork server says, which may be another than before, or gone."""
    heard = None if now.closed else now
    if before is not heard:
        if before is not None:
            selector.unregister(before)
        if heard is not None:
            selector.register(heard, selectors.EVENT_READ)
    return heard


def read_result(file: IO[bytes]) -> Any:
    """What a rank has written; None of one on another machine."""
    file.seek(0)
    return pickle.load(file) if os.fstat(file.fileno()).st_size else None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

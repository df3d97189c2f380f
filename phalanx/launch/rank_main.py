"""The main function of a local rank: take a job, run it, report, wait for the next."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

from phalanx.errors import PhalanxError
from phalanx.launch.abort import StackFile, heartbeat
from phalanx.launch.context import RankContext, local_device
from phalanx.launch.main_script import MainScript, unpickle
from phalanx.launch.membership import Generation, Membership
from phalanx.launch.signals import stopping_signals
from phalanx.launch.status_board import StatusBoard
from phalanx.launch.store import JobStore, connect_store
from phalanx.launch.wire import Wire


@dataclass(frozen=True)
class Job:
    """What the ranks are asked to do. Two open files come along: the function with its arguments, and where the result
    goes; both may be large."""

    generation: int
    world: int
    device: str
    folder: Path
    store: tuple[str, int, str]  # of this job: host, port, and the name of its keys
    threads: int
    environment: Mapping[str, str]
    directory: str
    search_path: tuple[str, ...]  # for modules
    main: MainScript
    secret: bytes  # of this job in the store
    silence: float  # seconds
    members: Generation
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # node and number there

    def stack_file(self, rank: int) -> Path:
        return self.folder / f"stack-{self.generation}-{rank}"


@dataclass(frozen=True)
class Event:
    name: str
    payload: Any


@dataclass(frozen=True)
class Done:
    """The job is done here and the result is in the file for it."""


@dataclass(frozen=True)
class Left:
    """The job was left because a signal asked for it; `code` is an exit code, None for Ctrl-C."""

    code: int | None


@dataclass(frozen=True)
class Failed:
    """`error` is the exception where it is ours, `text` what happened in one line or more."""

    error: PhalanxError | None
    text: str
    traceback: str

    @property
    def message(self) -> str:
        """Without what to do about it."""
        return self.text if self.error is None else self.error.message


def serve(rank: int, wire: Wire) -> None:
    """Run jobs until the wire closes."""
    faulthandler.enable(all_threads=False)  # short enough to be quoted in an error
    while True:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            job, descriptors = wire.receive_with_descriptors(2)
        except (EOFError, ConnectionError):
            return
        for number in stopping_signals():
            signal.signal(number, _leave)
        with open(descriptors[0], "rb") as task, open(descriptors[1], "wb") as result:
            outcome = _outcome(job, rank, wire, task, result)
        with suppress(ConnectionError):
            wire.send(outcome)
        gc.collect()  # else what the job left keeps its connections: it hangs together in circles


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


def _outcome(job: Job, rank: int, wire: Wire, task: IO[bytes], result: IO[bytes]) -> Done | Left | Failed:
    try:
        pickle.dump(_run(job, rank, wire, task), result)
        result.flush()
        return Done()
    except KeyboardInterrupt:
        return Left(None)
    except SystemExit as leaving:
        return Left(leaving.code if isinstance(leaving.code, int) else 1)
    except BaseException as error:
        return _failed(error)
    finally:
        for output in (sys.stdout, sys.stderr):
            output.flush()


def _run(job: Job, rank: int, wire: Wire, task: IO[bytes]) -> Any:
    import torch

    _adopt(job)
    torch.set_num_threads(job.threads)
    board = StatusBoard.open(job.folder / "board")
    membership = Membership(board, board.slots[rank], rank, job.members, job.places)
    stack = StackFile(job.stack_file(rank), 0.75 * job.silence)
    with heartbeat(board.slots[rank], membership.look, stack):
        target, arguments = unpickle(task, job.main)
        host, port, name = job.store
        store = JobStore(connect_store(host, port), job.secret, name)
        node, local_rank = job.places.get(rank, (0, rank))
        context = RankContext(
            membership.rank, len(job.members.members), local_rank, membership.local_world, node,
            device=local_device(job.device, local_rank, job.world),
            store=store.part(f"generation{job.members.number}", membership.abort), store_port=port,
            generation=job.generation, board=board, slot=board.slots[rank], abort=membership.abort,
            membership=membership, job_store=store, address="" if job.places else "127.0.0.1",
            on_event=lambda name, payload: _tell(wire, Event(name, payload)),
        )  # fmt: skip
        return target(context, *arguments)


def _tell(wire: Wire, event: Event) -> None:
    """If anybody is left to hear it: ranks whose supervisor is gone still finish their step."""
    with suppress(ConnectionError):
        wire.send(event)


def _adopt(job: Job) -> None:
    """The environment, folder and module path of the process that asked, as they are now."""
    for name in set(os.environ) - set(job.environment):
        del os.environ[name]
    os.environ.update(job.environment)
    os.chdir(job.directory)
    sys.path[:] = job.search_path


def _failed(error: BaseException) -> Failed:
    ours = error if isinstance(error, PhalanxError) and _survives_pickling(error) else None
    text = str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"
    return Failed(ours, text, traceback.format_exc())


def _survives_pickling(error: PhalanxError) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True

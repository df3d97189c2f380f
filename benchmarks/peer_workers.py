"""One side as processes of their own, in a lab: it is built once, and then trains steps whenever it is told to.

Sides that do not share a process cannot disturb each other, and each has a peak of memory of its own. They are
led over local sockets, which pass through the lab's nodes; what a side cannot do comes back as a WorkersError.
"""

from __future__ import annotations

import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from compare_setting import Setting
from peer_phalanx import completed

from phalanx.lab.run import Lab

_RANK = Path(__file__).parent / "peer_rank.py"
_FIRST_PORT, _NUM_PORTS = 20000, 8000


class WorkersError(Exception):
    """What a side said, or that it said nothing, in one line."""


@dataclass(frozen=True)
class Entrant:
    """`build` names a function of a module in this folder; `plan` is our text for what it is to do, completed by us.

    own_weights: it cannot take the weights of the HuggingFace model, so that its losses are not those of the others.
    """

    peer: str
    variant: str
    build: str
    plan: str
    options: Mapping[str, Any] = field(default_factory=dict)
    own_weights: bool = False


@dataclass(frozen=True)
class Order:
    """What ranks are to do: `build` once, then `steps` (seconds, processor seconds), `rest` and `peak` (bytes)."""

    name: str
    arguments: tuple[Any, ...] = ()


class Workers:
    """Use it in a `with` statement. `seconds`: how long its ranks may take to answer."""

    def __init__(self, lab: Lab, entrant: Entrant, setting: Setting, *, seconds: float) -> None:
        self.entrant, self.setting = entrant, setting
        self.losses: list[float] = []
        self._lab, self._seconds = lab, seconds
        self._connections: dict[Connection, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Workers:
        try:
            plan = completed(self.entrant.plan, self.setting, self._lab.spec.ranks)
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="phalanx-peers-")))
            listener = self._stack.enter_context(Listener(str(folder / "leader"), family="AF_UNIX"))
            command = [sys.executable, str(_RANK), str(folder), str(_free_port())]
            session = self._stack.enter_context(self._lab.start(command))
            _accept_within(listener, self._seconds)
            for _ in session.ranks:
                connection = self._stack.enter_context(listener.accept())
                self._connections[connection] = connection.recv()
            self.losses = self._ask(Order("build", (self.entrant, self.setting, plan)))[0]
        except TimeoutError:
            self.close()
            raise WorkersError(f"its ranks did not start within {self._seconds:.0f} s") from None
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def steps(self, number: int) -> tuple[float, float]:
        """Per step: seconds of the slowest rank, and those for which processors worked for all ranks."""
        found = self._ask(Order("steps", (number,)))
        return max(seconds for seconds, _ in found), sum(worked for _, worked in found)

    def rest(self) -> None:
        """While others train on the same device; its next step is not one to be measured."""
        self._ask(Order("rest"))

    def peak_bytes(self) -> int:
        """Of the rank that needed most, since the workers were started."""
        return max(self._ask(Order("peak")))

    def _ask(self, order: Order) -> list[Any]:
        """The answer of every rank, by rank."""
        for connection in self._connections:
            connection.send(order)
        answers: dict[int, Any] = {}
        until = time.monotonic() + self._seconds
        while len(answers) < len(self._connections):
            silent = [c for c, rank in self._connections.items() if rank not in answers]
            ready = wait(silent, until - time.monotonic())
            if not ready:
                raise WorkersError(f"{order.name}: no answer within {self._seconds:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[self._connections[connection]] = self._answer(connection)
        return [answers[rank] for rank in sorted(answers)]

    def _answer(self, connection: Connection) -> Any:
        try:
            good, answer = connection.recv()
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            raise WorkersError(f"rank {self._connections[connection]} died") from None
        if not good:
            raise WorkersError(answer)
        return answer


def _accept_within(listener: Listener, seconds: float) -> None:
    """`Listener` has no time limit of its own."""
    listening: socket.socket = listener._listener._socket  # type: ignore[attr-defined]
    listening.settimeout(seconds)


_ports = iter(range(_FIRST_PORT, _FIRST_PORT + _NUM_PORTS))


def _free_port() -> int:
    """Workers of one lab run side by side on its nodes, where each needs a port of its own."""
    for port in _ports:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")

"""One rank's process on this machine: whether it runs, how it ended, what it is sent."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.launch.handles import Handle
from phalanx.launch.wire import Wire

_UNSEEN = 256  # in place of an exit code that nobody saw
_ENDING, _STATUS = ("Z", "X"), 49  # of /proc/…/stat: states in which no thread runs, and where the status stands


@dataclass
class Process:
    """One rank's process; `code` is None as long as it lives, then its exit code or minus the signal. is_orphan: the
    server that started it is gone, and nobody will say how it ended."""

    rank: int
    pid: int
    wire: Wire
    log: Path | None
    code: int | None = None
    cause: str = ""  # what happened to it, where that is known better than by its code
    handle: Handle | None = None  # None of one on another machine
    is_orphan: bool = False

    def __post_init__(self) -> None:
        self.handle = Handle(self.pid)

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by a signal (SIGSTOP) and can do nothing."""
        return _seen(self.pid)[0] == "T"

    @property
    def how_ended(self) -> str:
        """Once it is gone: 'was killed by signal SIGKILL'."""
        if self.cause or self.code is None:
            return self.cause or "ended"
        if self.code == _UNSEEN:
            return "ended, nobody saw how"
        return how_it_ended(self.code)

    def look(self) -> None:
        """Takes note if it will never run again. Its parent learns so only when all that it had is given back, which
        takes most of a second where it had the memory of a GPU."""
        if self.code is not None:
            return
        is_gone = self.is_orphan and self.handle is not None and self.handle.gone
        state, status = _seen(self.pid)
        if state in _ENDING:
            self.code = os.waitstatus_to_exitcode(status)
        elif is_gone:
            self.code = _UNSEEN

    @property
    def gone(self) -> bool:
        """Whether it has ended, as far as can be seen from here."""
        self.look()
        return self.code is not None or (self.handle is not None and self.handle.gone)

    def send(self, number: int) -> None:
        """Without the fork server, which may itself be stopped."""
        if self.code is None and self.handle is not None:
            self.handle.send(number)

    def hand(self, job: Any, descriptors: tuple[int, ...]) -> None:
        """A job, with the files that belong to it. That a process is gone is noticed as ever."""
        with suppress(ConnectionError):
            self.wire.send(job, descriptors)

    def close(self) -> None:
        self.wire.close()
        if self.handle is not None:
            self.handle.close()

    def last_output(self, num_lines: int = 20) -> list[str]:
        """What it wrote last, where that was not shown."""
        if self.log is None or not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
        return [line[:200] for line in lines]


def how_it_ended(code: int) -> str:
    return f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def _seen(pid: int) -> tuple[str, int]:
    """The kernel's letter for what a process does, and the status with which it ended; "" where they are unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[_STATUS])

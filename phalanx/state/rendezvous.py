"""Ranks that report to each other from background threads, without collectives, and meetings where they agree.

A rendezvous lets each rank leave a short text under a key, and any rank wait for those of others. A meeting is one save
as all ranks see it: each phase succeeds on every rank or fails on every rank; a rank that fails says so instead of
leaving the others waiting, and one that says nothing is named after a while. What is done in a phase is the caller's
business.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from phalanx.records import read_record

TIMEOUT = 600.0
"""Seconds that a rank waits for the others after it has done its own part."""

_LOOK_UP_SECONDS = 0.5
_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_POLL_SECONDS = (0.005, 0.2)
"""From the first look to the next, and at most between later ones."""


class MissingRanks(TimeoutError):
    """Ranks that did not report in time."""

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        self.ranks = tuple(ranks)
        names = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        super().__init__(f"rank{'s' if len(ranks) > 1 else ''} {names} did not report within {seconds:g} s")


class Rendezvous(Protocol):
    """One rank's end. A key is used once; all keys of one job differ."""

    def arrive(self, key: str, payload: str) -> None:
        """Leaves this rank's report."""
        ...

    def wait_all(self, key: str, world: int, timeout: float) -> list[str]:
        """The reports of ranks 0 … world - 1, in order; raises `MissingRanks` when `timeout` seconds have passed."""
        ...

    def forget(self, key: str) -> None:
        """Takes this rank's report back, when nobody can be waiting for it any more."""
        ...


class LocalRendezvous:
    """Ranks that are threads of one process: each makes its own end with the same board."""

    def __init__(self, rank: int = 0, board: dict[str, str] | None = None) -> None:
        self._rank = rank
        self._board: dict[str, str] = {} if board is None else board

    def arrive(self, key: str, payload: str) -> None:
        self._board[f"{key}/{self._rank}"] = payload

    def wait_all(self, key: str, world: int, timeout: float) -> list[str]:
        keys = [f"{key}/{rank}" for rank in range(world)]
        _poll(keys, lambda wanted: all(one in self._board for one in wanted), timeout)
        return [self._board[one] for one in keys]

    def forget(self, key: str) -> None:
        self._board.pop(f"{key}/{self._rank}", None)


class TextStore(Protocol):
    """Where texts lie under keys that all ranks see: a job's store."""

    def set(self, key: str, text: str) -> None: ...
    def get(self, key: str) -> str: ...
    def check(self, keys: Sequence[str]) -> bool: ...
    def delete_key(self, key: str) -> None: ...


class StoreRendezvous:
    """Over a store whose keys are one job's alone, so that they do not meet again."""

    def __init__(self, store: TextStore, rank: int) -> None:
        self._store = store
        self._rank = rank

    def arrive(self, key: str, payload: str) -> None:
        self._store.set(f"{key}/{self._rank}", payload)

    def wait_all(self, key: str, world: int, timeout: float) -> list[str]:
        keys = [f"{key}/{rank}" for rank in range(world)]
        # Not `store.wait`: it would keep the store from the training thread until the last rank has come.
        _poll(keys, self._store.check, timeout)
        return [self._store.get(one) for one in keys]

    def forget(self, key: str) -> None:
        self._store.delete_key(f"{key}/{self._rank}")


def _poll(keys: Sequence[str], has: Callable[[Sequence[str]], bool], timeout: float) -> None:
    deadline, pause = time.monotonic() + timeout, _POLL_SECONDS[0]
    while not has(keys):
        if time.monotonic() >= deadline:
            raise MissingRanks([rank for rank, key in enumerate(keys) if not has([key])], timeout)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, _POLL_SECONDS[1])


class RankFailed(RuntimeError):
    """Another rank could not do its part; `storage` says that a disk refused it."""

    def __init__(self, text: str, storage: bool = False) -> None:
        super().__init__(text)
        self.storage = storage


@dataclass(frozen=True)
class _Report:
    """What a rank leaves when it has done its part: what came of it, or why it could not."""

    said: str = ""
    failed: str = ""
    storage: bool = False

    def text(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Meeting:
    """This rank's seat. `key` must differ for every save of a job; setting `given_up` ends the waiting."""

    rank: int = 0
    world: int = 1
    rendezvous: Rendezvous = field(default_factory=LocalRendezvous)
    timeout: float = TIMEOUT
    key: str = "checkpoint"
    given_up: threading.Event = field(default_factory=threading.Event)

    def agree(self, phase: str, acting: int, action: Callable[[], object]) -> list[str]:
        """Ranks below `acting` act; returns on every rank when all have, raises on every rank when one could not.

        What is returned is what the actions did, as texts, rank by rank.
        """
        if self.rank < acting:
            try:
                said = action()
            except BaseException as error:
                self.fail(phase, error)
                self._outlast(phase, acting)
                raise
            self._report(phase, _Report(str(said or "")))
        reports = self._reports(phase, acting)
        for report in reports:
            if report.failed:
                raise RankFailed(report.failed, report.storage)
        return [report.said for report in reports]

    def fail(self, phase: str, error: BaseException) -> None:
        """Tells the others that this rank cannot do its part."""
        text = f"rank {self.rank} failed: {str(error) or type(error).__name__}"
        self._report(phase, _Report(failed=text, storage=is_storage(error)))

    def forget(self, phase: str) -> None:
        self.rendezvous.forget(f"{self.key}/{phase}")

    def _report(self, phase: str, report: _Report) -> None:
        self.rendezvous.arrive(f"{self.key}/{phase}", report.text())

    def _outlast(self, phase: str, acting: int) -> None:
        """Lets the others finish acting first: clearing up under their hands would hide which rank failed and why."""
        try:
            self._reports(phase, acting)
        except (OSError, RuntimeError):
            return

    def _reports(self, phase: str, acting: int) -> list[_Report]:
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            try:
                key, seconds = f"{self.key}/{phase}", max(0.0, min(left, _LOOK_UP_SECONDS))
                return [read_record(_Report, text) for text in self.rendezvous.wait_all(key, acting, seconds)]
            except MissingRanks as missing:
                if self.given_up.is_set():
                    raise RankFailed("it was given up") from None
                if time.monotonic() >= deadline:
                    raise MissingRanks(missing.ranks, self.timeout) from None


def is_storage(error: BaseException) -> bool:
    """Whether a disk refused: it is full or over quota, a file is too large, or it cannot be read or written at all."""
    if isinstance(error, RankFailed):
        return error.storage
    return isinstance(error, OSError) and error.errno in _STORAGE

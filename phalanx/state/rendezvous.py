"""Ranks that report to each other from background threads, without collectives, and meetings where they agree.

A rendezvous lets each rank leave a short text under a key, and any rank wait for those of others. A meeting is one save
as all ranks see it: each phase succeeds on every rank or fails on every rank; a rank that fails says so instead of
leaving the others waiting, and one that says nothing is named after a while. What is done in a phase is the caller's
business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store

TIMEOUT = 600.0
"""Seconds that a rank waits for the others after it has done its own part."""

_LOOK_UP_SECONDS = 0.5
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


class StoreRendezvous:
    """Over a torch.distributed store. Give each job a `PrefixStore` of its own, so that keys do not meet again."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def arrive(self, key: str, payload: str) -> None:
        self._store.set(f"{key}/{self._rank}", payload)

    def wait_all(self, key: str, world: int, timeout: float) -> list[str]:
        keys = [f"{key}/{rank}" for rank in range(world)]
        # Not `store.wait`: it would keep the store from the training thread until the last rank has come.
        _poll(keys, lambda wanted: self._store.check(list(wanted)), timeout)
        return [self._store.get(one).decode() for one in keys]

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
    """Another rank could not do its part."""


@dataclass(frozen=True)
class Meeting:
    """This rank's seat. `key` must differ for every save of a job; setting `given_up` ends the waiting."""

    rank: int = 0
    world: int = 1
    rendezvous: Rendezvous = field(default_factory=LocalRendezvous)
    timeout: float = TIMEOUT
    key: str = "checkpoint"
    given_up: threading.Event = field(default_factory=threading.Event)

    def agree(self, phase: str, acting: int, action: Callable[[], object]) -> None:
        """Ranks below `acting` act; returns on every rank when all have, raises on every rank when one could not."""
        if self.rank < acting:
            try:
                action()
            except BaseException as error:
                self.fail(phase, error)
                self._outlast(phase, acting)
                raise
            self._report(phase, "")
        failed = [report for report in self._reports(phase, acting) if report]
        if failed:
            raise RankFailed(failed[0])

    def fail(self, phase: str, error: BaseException) -> None:
        """Tells the others that this rank cannot do its part."""
        self._report(phase, f"rank {self.rank} failed: {str(error) or type(error).__name__}")

    def forget(self, phase: str) -> None:
        self.rendezvous.forget(f"{self.key}/{phase}")

    def _report(self, phase: str, text: str) -> None:
        self.rendezvous.arrive(f"{self.key}/{phase}", text)

    def _outlast(self, phase: str, acting: int) -> None:
        """Lets the others finish acting first: clearing up under their hands would hide which rank failed and why."""
        try:
            self._reports(phase, acting)
        except (OSError, RuntimeError):
            return

    def _reports(self, phase: str, acting: int) -> list[str]:
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return self.rendezvous.wait_all(f"{self.key}/{phase}", acting, max(0.0, min(left, _LOOK_UP_SECONDS)))
            except MissingRanks as missing:
                if self.given_up.is_set():
                    raise RankFailed("it was given up") from None
                if time.monotonic() >= deadline:
                    raise MissingRanks(missing.ranks, self.timeout) from None

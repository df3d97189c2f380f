"""One save as all ranks see it: each phase succeeds on every rank or fails on every rank.

A rank that fails says so instead of leaving the others waiting; one that says nothing is named after a while. What is
done in a phase is the caller's business.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.state.rendezvous import LocalRendezvous, MissingRanks, Rendezvous

TIMEOUT = 600.0
"""Seconds that a rank waits for the others after it has done its own part."""

_LOOK_UP_SECONDS = 0.5


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

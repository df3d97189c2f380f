"""Ranks that report to each other from background threads, without collectives.

Each rank leaves a short text under a key; any rank can wait for those of others. Nothing here knows what is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed import Store

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

"""Rank 0 first: the other ranks wait, and find in the caches what it put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import PhalanxError
from phalanx.launch.context import RankContext

_KEY, _LOOK_SECONDS = "prepared", 0.05


@contextmanager
def rank_0_first(context: RankContext) -> Iterator[None]:
    """Others begin when rank 0 is through, or lets them come before."""
    if context.world > 1 and context.rank > 0:
        wait_for(context, _KEY)
    yield
    let_others_come(context)


def let_others_come(context: RankContext) -> None:
    """Where rank 0 has something to do that all do together."""
    if context.world > 1 and context.rank == 0:
        context.store.set(_KEY, "yes")


def wait_for(context: RankContext, key: str) -> str:
    """What rank 0 writes there, which may take it long."""
    while not context.store.check([key]):
        if context.abort.wait(_LOOK_SECONDS):
            raise PhalanxError(f"stopped while preparing: {context.abort.reason}")
    return context.store.get(key)

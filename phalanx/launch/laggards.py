"""Notices whom the others wait for when nobody goes on: a rank whose heart beats, but whose main thread stands in a
lock, a data loader or a file system that is gone.

Every rank shows what it is at, and whether it waits for others. Where nothing of that changes, some wait and some do
not, the second are those whom the first wait for. For how long that may last depends on how long these ranks usually
take, and on whether the one that stands computes or sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.launch.status_board import RunningClock, StatusSlot
from phalanx.launch.stillness import MOST_BUSY, Activity

_MANY = 10.0  # times the longest that any rank took from one sign of progress to the next
_BUSY_SILENCES = 4.0  # for one that computes, or waits for a disk


@dataclass
class _Standing:
    """What a rank shows, and since when. spent: the seconds it had computed when it was first asked where it stands;
    sleeps: whether its main thread was asleep whenever it was looked at since then."""

    shown: tuple[Any, ...]
    since: float
    spent: tuple[float, float] | None = None  # and when that was
    sleeps: bool = True


class Laggards:
    """Of one job. look: what a process computes."""

    def __init__(self, clock: RunningClock, silence: float, look: Callable[[int], Activity | None]) -> None:
        self._clock, self._silence, self._look = clock, silence, look
        self._ranks, self._longest = dict[int, _Standing](), 0.0

    def found(self, slots: Mapping[int, tuple[StatusSlot, int]]) -> dict[int, float]:
        """Those that keep others waiting for too long, with the seconds for which nobody went on. slots: of the ranks
        of the newest generation, with their processes."""
        now = self._clock.read()
        for rank in self._ranks.keys() - slots.keys():
            del self._ranks[rank]
        for rank, (slot, _) in slots.items():
            self._note(rank, slot, now)
        seconds = min((now - each.since for each in self._ranks.values()), default=0.0)
        allowed = max(self._silence, _MANY * self._longest)
        suspects = self._awaited(slots) if seconds > allowed / 2 else []
        for rank, (slot, _) in slots.items():
            slot.ask_where(rank in suspects)
        idle = {rank: self._is_idle(rank, slots[rank][1], now) for rank in suspects}
        busy = max(_BUSY_SILENCES * self._silence, allowed)
        return {rank: seconds for rank, is_idle in idle.items() if seconds > (allowed if is_idle else busy)}

    def _note(self, rank: int, slot: StatusSlot, now: float) -> None:
        view = slot.read(with_recent=False)
        shown = (view.phase, view.step, slot.begun, slot.finished, slot.entered, slot.waits)
        before = self._ranks.get(rank)
        if before is not None and before.shown == shown:
            return
        if before is not None and before.shown[0] == view.phase == "step" and not before.shown[-1]:
            self._longest = max(self._longest, now - before.since)
        self._ranks[rank] = _Standing(shown, now)

    def _awaited(self, slots: Mapping[int, tuple[StatusSlot, int]]) -> list[int]:
        """Those that do not wait, of them those that are least far; none where one of them is at something that may
        take long, or where nobody waits."""
        at = {rank: slot.read(with_recent=False) for rank, (slot, _) in slots.items() if not slot.waits}
        if len(at) == len(slots) or any(view.phase != "step" for view in at.values()):
            return []
        return [rank for rank, view in at.items() if view.step == min(view.step for view in at.values())]

    def _is_idle(self, rank: int, pid: int, now: float) -> bool:
        """Whether it neither computes nor waits for a disk, as far as the system tells."""
        standing, found = self._ranks[rank], self._look(pid)
        if found is None:
            return False
        standing.sleeps = standing.sleeps and found.main_sleeps
        spent, when = standing.spent = standing.spent or (found.seconds, now)
        return standing.sleeps and now > when and found.seconds - spent <= MOST_BUSY * (now - when)

"""When tasks begin and end that wait for each other and slow each other: work and rates.

A task begins when all it waits for has ended, and gets on at a rate that depends on what else runs at the places it
occupies; whenever something begins or ends there, rates change. Where no place is occupied all rates are 1, and a task
ends after the longest way to it. Nothing is known here of programs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from phalanx.predict.contention import Contention, Place, Use, Work


@dataclass(slots=True)
class Task:
    """Something that occupies a resource on one or several ranks. `places` are (rank, position in its program); what
    has none takes time, but is not shown. seconds: alone. uses: of devices and networks, where these slow it; of a
    device once for each of its ranks that take part. until: the task with whose begin it ends, whatever its seconds."""

    resource: str
    places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    needs: list[int] = field(default_factory=list[int])
    seconds: float = 0.0
    uses: tuple[Use, ...] = ()
    until: int | None = None


class Tasks:
    """The tasks of all ranks. One that several ranks take part in is found again under its key."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self._places: dict[Hashable, int] = {}

    def add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def joint(self, resource: str, turn: int) -> int:
        """The task whose turn it is on a channel or group, after the one of the turn before."""
        if (resource, turn) not in self._places:
            needs = [self.joint(resource, turn - 1)] if turn else []
            self._places[resource, turn] = self.add(Task(resource, needs=needs))
        return self._places[resource, turn]


class Times(NamedTuple):
    """Of each task."""

    begin: list[float]
    end: list[float]


def run(tasks: Sequence[Task], contention: Contention) -> Times:
    """In the order of time: the earliest of all ends is next."""
    flow = _Flow(tasks, contention)
    missing = [len(task.needs) for task in tasks]
    waiting: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for need in task.needs:
            waiting[need].append(number)
    flow.begin_all(number for number, count in enumerate(missing) if count == 0)
    num_ended = 0
    while (number := flow.next_ended()) is not None:
        num_ended += 1
        for later in waiting[number]:
            missing[later] -= 1
            if missing[later] == 0:
                flow.begin(later)
    assert num_ended == len(tasks), "the programs wait for each other; the check would have refused them"
    return flow.times


class _Flow:
    """What is under way. An end that was foreseen counts until the task's rate changes, of which `_version` is the
    number."""

    def __init__(self, tasks: Sequence[Task], contention: Contention) -> None:
        self._tasks, self._contention = tasks, contention
        self.times = Times([0.0] * len(tasks), [0.0] * len(tasks))
        self._now = 0.0
        self._version = [0] * len(tasks)
        self._foreseen: list[tuple[float, int, int]] = []  # end, task, version
        self._under_way: dict[int, _Progress] = {}  # tasks that others may slow
        self._at: defaultdict[Place, dict[int, tuple[Work, int]]] = defaultdict(dict)  # and as how many it counts
        self._changed: set[Place] = set()
        self._begun = bytearray(len(tasks))
        self._until: defaultdict[int, list[int]] = defaultdict(list)  # a task that has not begun → those it ends

    def begin_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.begin(number)
        heapify(self._foreseen)

    def begin(self, number: int) -> None:
        task, self.times.begin[number], self._begun[number] = self._tasks[number], self._now, True
        for ended in self._until.pop(number, ()):
            self._leave(ended)
            heappush(self._foreseen, (self._now, ended, 0))
        if task.until is not None and not self._begun[task.until]:
            self._until[task.until].append(number)
        elif task.until is not None or not task.uses or not task.seconds:
            seconds = task.seconds if task.until is None else 0.0
            heappush(self._foreseen, (self._now + seconds, number, 0))
            return
        else:
            self._under_way[number] = _Progress(task.seconds, self._now)
        for (place, work), count in Counter(task.uses).items():
            self._at[place][number] = work, count
            self._changed.add(place)

    def next_ended(self) -> int | None:
        """The task that ends next, and now is when it does."""
        while True:
            if self._changed and (not self._foreseen or self._foreseen[0][0] > self._now):
                self._rate()  # once all that ends or begins at this moment is known
            if not self._foreseen:
                return None
            end, number, version = heappop(self._foreseen)
            if version == self._version[number]:
                break
        self._now = self.times.end[number] = end
        if self._under_way.pop(number, None) is not None:
            self._version[number] += 1
            self._leave(number)
        return number

    def _leave(self, number: int) -> None:
        for place in {place for place, _ in self._tasks[number].uses}:
            del self._at[place][number]
            self._changed.add(place)

    def _rate(self) -> None:
        """Foresees anew when tasks end at places where something changed."""
        counts: dict[Place, Counter[Work]] = {}
        for number in {number for place in self._changed for number in self._at[place]} & self._under_way.keys():
            progress = self._under_way[number]
            rate = min(self._speed(place, number, counts) for place in {place for place, _ in self._tasks[number].uses})
            if rate != progress.rate:
                progress.go_on(self._now, rate)
                self._version[number] += 1
                heappush(self._foreseen, (self._now + progress.left / rate, number, self._version[number]))
        self._changed.clear()

    def _speed(self, place: Place, number: int, counts: dict[Place, Counter[Work]]) -> float:
        """Of a task at a place. counts: of all that is there, as far as they were asked for."""
        if place not in counts:
            counts[place] = Counter()
            for work, count in self._at[place].values():
                counts[place][work] += count
        work, count = self._at[place][number]
        others = Counter(counts[place])
        others[work] -= count
        return self._contention.speed(place, work, others)


class _Progress:
    """left: seconds of work that were to do at `since`. rate: 0 until it has one."""

    __slots__ = ("left", "rate", "since")

    def __init__(self, left: float, since: float) -> None:
        self.left, self.since, self.rate = left, since, 0.0

    def go_on(self, now: float, rate: float) -> None:
        self.left = max(0.0, self.left - (now - self.since) * self.rate)
        self.since, self.rate = now, rate

"""Predicts when every instruction of a step runs: a discrete-event simulation of the lowered programs of all ranks.

Computation is one resource per rank; every channel and every group is a resource of its own, first come first served.
So the order on each resource is known beforehand, and a task simply begins when the last thing it waits for has ended.
Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.plan.plan import Plan
from phalanx.program.costs import Costs
from phalanx.program.instructions import Program
from phalanx.program.memory import peak_memory
from phalanx.program.shape import ModelShape
from phalanx.program.tasks import Setting, Task, tasks_of
from phalanx.program.timeline import Event, Timeline


def simulate(
    plan: Plan, shape: ModelShape, programs: Sequence[Program], costs: Costs, *, rendezvous: bool = True
) -> Timeline:
    """The timeline of one step of programs that have passed `check`.

    rendezvous: a message starts when both ends have issued it; otherwise the receiver's device takes it in unasked.
    """
    tasks = tasks_of(Setting(plan, shape, costs, rendezvous), programs)
    events = _events(tasks, _ends(tasks, programs), programs)
    by_rank: list[list[Event]] = [[] for _ in programs]
    for event in events:
        by_rank[event.rank].append(event)
    memory = tuple(peak_memory(plan, shape, costs, rank, own) for rank, own in enumerate(by_rank))
    return Timeline(tuple(events), memory)


def _ends(tasks: Sequence[Task], programs: Sequence[Program]) -> list[float]:
    """When each task ends: the longest way to it through the graph."""
    ends = [0.0] * len(tasks)
    missing = [len(task.needs) for task in tasks]
    waiting: list[list[int]] = [[] for _ in tasks]
    for place, task in enumerate(tasks):
        for need in task.needs:
            waiting[need].append(place)
    ready = [place for place, count in enumerate(missing) if count == 0]
    for place in ready:
        task = tasks[place]
        ends[place] = max((ends[need] for need in task.needs), default=0.0) + task.seconds
        for later in waiting[place]:
            missing[later] -= 1
            if missing[later] == 0:
                ready.append(later)
    places = [place for task, count in zip(tasks, missing) if count for place in task.places]
    stuck = [f"{programs[rank][position]} of rank {rank}" for rank, position in places]
    assert not stuck, f"the programs wait for each other at {', '.join(stuck[:8])}; check() would have refused them"
    return ends


def _events(tasks: Sequence[Task], ends: Sequence[float], programs: Sequence[Program]) -> list[Event]:
    # A collective over two groups is two tasks at one position, and was added in the order in which they run.
    order = sorted((rank, position, place) for place, task in enumerate(tasks) for rank, position in task.places)
    index = {(place, rank): i for i, (rank, _, place) in enumerate(order)}
    events: list[Event] = []
    for rank, position, place in order:
        task = tasks[place]
        last = _last_need(task, ends)
        start, cause = 0.0 if last is None else ends[last], None
        while last is not None and not tasks[last].places:  # what is not shown waited for something that is
            last = _last_need(tasks[last], ends)
        if last is not None:
            cause = index.get((last, rank), index[last, tasks[last].places[0][0]])
        events.append(Event(rank, programs[rank][position], start, ends[place], task.resource, cause))
    return events


def _last_need(task: Task, ends: Sequence[float]) -> int | None:
    return max(task.needs, key=lambda need: ends[need], default=None)

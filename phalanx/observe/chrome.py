"""Writes timelines as a Chrome trace: open it in ui.perfetto.dev or chrome://tracing.

Every rank is a process, every resource of it a thread, and arrows lead from a message's sender to its receiver. What
torch's profiler sees inside a step is the business of `trace.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.program.instructions import HALVES, RECEIVES, SENDS, Instruction, Op
from phalanx.program.timeline import COMPUTE, Event, Timeline

_MICROSECOND = 1e-6


def chrome_trace(timelines: Mapping[str, Timeline]) -> str:
    """The trace as JSON; the processes are named after the timelines, "predicted rank 0" and so on."""
    events: list[dict[str, Any]] = []
    first = 0  # of this timeline's process ids
    for name, timeline in timelines.items():
        events += _trace(name, timeline, first)
        first += max(timeline.ranks, default=0) + 1
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _trace(name: str, timeline: Timeline, first: int) -> Iterator[dict[str, Any]]:
    threads: dict[tuple[int, str], int] = {}
    for rank in timeline.ranks:
        yield _named("process_name", f"{name} rank {rank}", pid=first + rank)
        yield {"ph": "M", "name": "process_sort_index", "pid": first + rank, "args": {"sort_index": first + rank}}
        resources = dict.fromkeys(event.resource for event in timeline.events if event.rank == rank)
        for thread, resource in enumerate(sorted(resources, key=lambda resource: resource != COMPUTE)):
            threads[rank, resource] = thread
            yield _named("thread_name", resource, pid=first + rank, tid=thread)
    for event in timeline.events:
        at = {"pid": first + event.rank, "tid": threads[event.rank, event.resource]}
        begin = (event.start - timeline.begin) / _MICROSECOND
        yield {
            "ph": "X", "name": str(event.instruction), "cat": event.resource, **at,
            "ts": begin, "dur": event.seconds / _MICROSECOND, "args": _arguments(event.instruction),
        }  # fmt: skip
        if event.instruction.op in SENDS | RECEIVES:
            yield _arrow(f"{name} {_message(event)}", event.instruction.op in SENDS, begin, at)


def _named(kind: str, name: str, **at: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, **at, "args": {"name": name}}


def _arguments(instruction: Instruction) -> dict[str, int]:
    fields = ("stage", "micro_batch", "slice", "half", "block", "step", "peer")
    return {field: value for field in fields if (value := getattr(instruction, field)) is not None}


def _arrow(message: str, leaves: bool, begin: float, at: Mapping[str, int]) -> dict[str, Any]:
    end = {} if leaves else {"bp": "e"}  # "e": the arrow ends at the event around it, not at the next one
    return {"ph": "s" if leaves else "f", "id": message, "name": "message", "cat": "message", "ts": begin, **at, **end}


def _message(event: Event) -> str:
    """A name that the events at both ends of a message have in common."""
    instruction = event.instruction
    source, target = (event.rank, instruction.peer) if instruction.op in SENDS else (instruction.peer, event.rank)
    direction = "F" if instruction.op in (Op.SEND_F, Op.RECV_F) else "B"
    # A message is about the cut between two stages: the forward's has the number of the stage before it.
    cut = (instruction.stage or 0) - (instruction.op in (Op.RECV_F, Op.SEND_B))
    part = "" if instruction.slice is None else f".{instruction.slice}"
    part += "" if instruction.half is None else HALVES[instruction.half]
    return f"{direction}{cut}.{instruction.micro_batch}{part} {source}→{target}"

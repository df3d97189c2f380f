"""What a program is once it is linked to functions and places, and what carries it out. `link.py` makes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from phalanx.comm.links import Channel, Direction, Group
from phalanx.comm.pending import Pending
from phalanx.engine.compose import ExecutionGraph
from phalanx.engine.compute import Compute
from phalanx.engine.gradients import BucketGradients
from phalanx.engine.host_copies import HostCopies
from phalanx.engine.inputs import Inputs
from phalanx.engine.redistribute import Mover
from phalanx.engine.reductions import GlobalReductions, StepRun
from phalanx.engine.trace import Tracer
from phalanx.model.segment.segments import Call, Segment
from phalanx.params.hosted import HostedOptimizer
from phalanx.params.parameters import Parameters
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op
from phalanx.program.shape import ModelShape, Partition
from phalanx.program.values import Table

Values = list[Any]
Run = Callable[[Values, StepRun], None]
StandIn = Callable[[Op, int, Call], Callable[..., Any]]
"""Gives something to call instead of a segment's function, by what is done, the segment's number, and that function;
weight gradients are then not added up."""
Argument = tuple[int, Any]  # the place of a value and, where that holds several, which of them
EXTRAS = ("parameters", "buffers", "constants", "zeros", "d_loss")  # behind the values of the table


class LinkedRow(NamedTuple):
    """waits: values that are on their way, each with how to wait for it. drops: what is freed before it runs. releases:
    what is done with a value besides dropping it when it is freed."""

    instruction: Instruction
    waits: tuple[tuple[int, Callable[[Any], Any]], ...]
    drops: tuple[int, ...]
    run: Run
    frees: tuple[int, ...]
    releases: tuple[tuple[int, Callable[[Any], None]], ...]


class ComputeCall(NamedTuple):
    """A function that some instruction calls, with what it is called with: for running it beforehand."""

    instruction: Instruction
    number: int
    segment: Segment
    call: Call
    inputs: Inputs
    keys: tuple[Any, ...]  # per argument that comes from the inputs; else None


@dataclass
class Linked:
    table: Table
    rows: list[LinkedRow] = field(default_factory=list[LinkedRow])
    calls: list[ComputeCall] = field(default_factory=list[ComputeCall])

    @cached_property
    def plain(self) -> list[tuple[Any, ...]]:
        """The rows as tuples without names, which a loop takes apart in half the time."""
        return [tuple(row) for row in self.rows]

    @cached_property
    def first(self) -> dict[Op, int]:
        """Where each kind of instruction stands first."""
        return {row.instruction.op: i for i, row in reversed(list(enumerate(self.rows)))}

    def fresh(self, extras: Mapping[str, Any]) -> Values:
        """Places for all values, of which nothing is there yet."""
        return [*[None] * len(self.table.values), *(extras[name] for name in EXTRAS)]


class Sends:
    """Messages that leave: their tensors live until they have."""

    def __init__(self) -> None:
        self._leaving: deque[Pending] = deque()

    def add(self, pending: Pending) -> None:
        self._leaving.append(pending)
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft().wait()

    def settle(self) -> None:
        """Waits until everything sent has left, so that its memory may be used for something else."""
        while self._leaving:
            self._leaving.popleft().wait("messages to leave")


@dataclass(frozen=True)
class Parts:
    """What carries out a rank's instructions. zero: the ranks that together hold all shards of its parameters.
    movers: by the ranks that take part. channel: what leads from one rank to another, for activations ("f") or for
    gradients ("b"). gradients: of the buckets whose sums are not this rank's alone. Without totals there is no
    backward."""

    plan: Plan
    shape: ModelShape
    rank: int
    pp_index: int
    graph: ExecutionGraph
    compute: Compute
    tracer: Tracer
    parameters: Parameters
    zero: Group
    movers: Mapping[Partition, Mover]
    channel: Callable[[int, int, Direction], Channel]
    gradients: Mapping[int, BucketGradients]
    totals: GlobalReductions | None
    home: Mapping[str, int]  # the bucket of each parameter
    copies: HostCopies
    hosted: HostedOptimizer | None = None
    stand_in: StandIn | None = None
    sends: Sends = field(default_factory=Sends)


class HeldPast(NamedTuple):
    """Keys and values of a micro-batch's slices, which lie with its inputs."""

    inputs: Inputs
    degree: int
    names: tuple[str, ...]

    def release(self) -> None:
        self.inputs.clear_past(self.degree, self.names)

"""Lowered programs as a graph of tasks: what takes time, and what each task waits for.

A rank issues its program in order and computes one thing at a time. Messages and collectives are issued where they
stand, once the computation before them has ended, and then run beside the computation, in the order of issue on their
channel (two ranks, one direction) or group. The first that needs what they bring waits for it. Programs must have
passed `check.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program import timeline
from phalanx.program.costs import Costs, Ranks
from phalanx.program.groups import group_of
from phalanx.program.holders import buckets_of
from phalanx.program.instructions import COLLECTIVES, COMPUTE, EXCHANGES, RECEIVES, SENDS, Instruction, Op, Program
from phalanx.program.shape import ModelShape
from phalanx.program.shares import Shares
from phalanx.program.wires import Wires

SCALAR_BYTES = 8
_BACKWARD = frozenset((Op.B, Op.BW, Op.CB))
_NUM_SCALARS = {Op.COUNT: 1, Op.NORM: 3}  # the number of items; loss, squared norm, finiteness

Part = tuple[int | None, int | None, int | None]  # micro-batch, slice, half
Place = tuple[int | None, int | None, int | None, int | None]  # stage, micro-batch, slice, half


@dataclass
class Task:
    """Something that occupies a resource on one or several ranks. `places` are (rank, position in its program); what
    has none takes time, but is not shown."""

    resource: str
    places: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    needs: list[int] = field(default_factory=list[int])  # the first of those that end last is what it waited for
    seconds: float = 0.0


@dataclass(frozen=True)
class Setting:
    """Everything that the programs are about. `rendezvous`: a message waits until its receiver has asked for it."""

    plan: Plan
    shape: ModelShape
    costs: Costs
    rendezvous: bool

    @cached_property
    def wires(self) -> Wires:
        return Wires(self.shape)

    @cached_property
    def shares(self) -> Shares:
        return Shares(self.plan, self.shape, self.costs)


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


def tasks_of(setting: Setting, programs: Sequence[Program]) -> list[Task]:
    tasks = Tasks()
    for rank, program in enumerate(programs):
        issuer = _Issuer(setting, tasks, rank)
        for position, instruction in enumerate(program):
            issuer.issue(position, instruction)
    return tasks.tasks


class _Issuer:
    """Issues one rank's program: remembers which task brings what a later instruction waits for."""

    def __init__(self, setting: Setting, tasks: Tasks, rank: int) -> None:
        self.setting, self.tasks, self.rank = setting, tasks, rank
        self.mesh = Mesh.of(setting.plan)
        self.computed: list[int] = []  # the last computation
        self.received: dict[tuple[Op, Place], int] = {}
        self.exchanged: dict[tuple[bool, Part, str], int] = {}  # backward or not, wire that an exchange writes
        self.exchanges: dict[Place, list[int]] = {}  # for which a message has not waited yet
        self.gathered: dict[int, int] = {}
        self.reduced: dict[int | None, int] = {}
        self.ended: list[int] = []  # what the optimizer waits for
        self.counted: list[int] = []
        self.turns: dict[str, int] = {}

    def issue(self, position: int, instruction: Instruction) -> None:
        op = instruction.op
        if op in SENDS or op in RECEIVES:
            self._message(position, instruction)
        elif op in EXCHANGES:
            self._exchange(position, instruction)
        elif op in COLLECTIVES:
            self._collective(position, instruction)
        elif op in COMPUTE:
            self._local(position, self._inputs(instruction), self._seconds(instruction))
        elif op == Op.STEP:
            self._local(position, self.ended, self._step_seconds())
        else:
            assert op == Op.FREE, f"{op} is not in a lowered program"
            self._local(position, [], 0.0)

    def _local(self, position: int, needs: list[int], seconds: float) -> None:
        task = Task(timeline.COMPUTE, [(self.rank, position)], [*self.computed, *needs], seconds)
        self.computed = [self.tasks.add(task)]

    def _seconds(self, instruction: Instruction) -> float:
        assert instruction.block is not None, f"{instruction} is not lowered"
        whole = self.setting.costs.seconds(instruction.op, instruction.block)
        return whole * self.setting.shares.seconds(instruction)

    def _inputs(self, instruction: Instruction) -> list[int]:
        block, shape = instruction.block, self.setting.shape
        assert block is not None, f"{instruction} is not lowered"
        needs = [self.gathered[bucket] for bucket in shape.buckets(block) if bucket in self.gathered]
        is_loss = block == shape.num_blocks - 1
        return [*self._brought(instruction), *needs, *(self.counted if is_loss else [])]

    def _brought(self, instruction: Instruction) -> list[int]:
        """The messages and exchanges that an instruction waits for."""
        if instruction.op is Op.W:
            return []
        backward = instruction.op in _BACKWARD
        arrival = (Op.RECV_B if backward else Op.RECV_F, _place(instruction))
        needs = [self.received[arrival]] if arrival in self.received else []
        if instruction.step is None:
            return needs
        assert instruction.block is not None
        step, wires, part = self.setting.shares.step_of(instruction), self.setting.wires, _part(instruction)
        brought = [(False, part, wires.origin(wire)) for wire in step.reads]
        if backward:
            brought += [(True, part, target) for wire in step.writes for target in wires.returning(wire)]
        return needs + [self.exchanged[key] for key in brought if key in self.exchanged]

    def _step_seconds(self) -> float:
        plan, shape, costs = self.setting.plan, self.setting.shape, self.setting.costs
        pp_index, *_ = self.mesh.coordinates(self.rank)
        trained = [bucket for bucket in buckets_of(plan, shape, pp_index) if shape.trained[bucket]]
        return sum(costs.buckets[bucket].step_seconds for bucket in trained) / plan.shards

    def _message(self, position: int, instruction: Instruction) -> None:
        op, peer, costs = instruction.op, instruction.peer, self.setting.costs
        assert peer is not None, f"{instruction} has no peer"
        source, target = (self.rank, peer) if op in SENDS else (peer, self.rank)
        if costs.issue_seconds:
            self.computed = [self.tasks.add(Task(timeline.COMPUTE, [], self.computed, costs.issue_seconds))]
        place = self._joint(channel_name(source, target, op), position)
        task = self.tasks.tasks[place]
        task.seconds = costs.message(source, target).send(self.setting.shares.message_bytes(instruction))
        if op in SENDS or self.setting.rendezvous:
            task.needs += self.computed
        if op in SENDS:
            task.needs += self.exchanges.pop(_place(instruction), [])
        if op in RECEIVES:
            self.received[op, _place(instruction)] = place

    def _exchange(self, position: int, instruction: Instruction) -> None:
        shares, costs = self.setting.shares, self.setting.costs
        ranks = group_of(self.setting.plan, self.setting.shape, self.rank, instruction)
        place = self._joint(group_name(ranks), position)
        task = self.tasks.tasks[place]
        task.needs += [*self.computed, *self._brought(instruction)]
        size, link = shares.elements(instruction) * costs.element_bytes, costs.group(ranks)
        ring = link.reduce if shares.collective(instruction) == "all_reduce" else link.gather
        task.seconds = ring(size, len(ranks))
        (target,) = shares.step_of(instruction).writes
        self.exchanged[instruction.op is Op.CB, _part(instruction), target] = place
        self.exchanges.setdefault(_place(instruction), []).append(place)

    def _collective(self, position: int, instruction: Instruction) -> None:
        op, bucket = instruction.op, instruction.block
        needs = self.computed + (self.ended if op == Op.NORM else [])
        needs += [self.reduced[bucket]] if op in (Op.SUM, Op.TIE) and bucket in self.reduced else []
        ranks = group_of(self.setting.plan, self.setting.shape, self.rank, instruction)
        place = self._joint(group_name(ranks), position)
        task = self.tasks.tasks[place]
        task.seconds = self._collective_seconds(instruction, ranks)
        task.needs += needs
        if op == Op.GATHER:
            assert bucket is not None
            self.gathered[bucket] = place
        elif op == Op.COUNT:
            self.counted = [place]
        elif op in (Op.REDUCE, Op.SUM):
            self.reduced[bucket] = place
        if op != Op.GATHER:
            self.ended.append(place)

    def _collective_seconds(self, instruction: Instruction, ranks: Ranks) -> float:
        plan, op, link, num_ranks = self.setting.plan, instruction.op, self.setting.costs.group(ranks), len(ranks)
        if op in _NUM_SCALARS:
            return link.reduce(_NUM_SCALARS[op] * SCALAR_BYTES, num_ranks)
        assert instruction.block is not None
        bucket = self.setting.costs.buckets[instruction.block]
        if op in (Op.GATHER, Op.SHARE):
            return link.gather(bucket.weight_bytes, num_ranks)
        if op == Op.REDUCE and plan.zero:
            return link.gather(bucket.gradient_bytes, num_ranks)
        return link.reduce(bucket.gradient_bytes / plan.shards, num_ranks)

    def _joint(self, resource: str, position: int) -> int:
        turn = self.turns.get(resource, 0)
        self.turns[resource] = turn + 1
        place = self.tasks.joint(resource, turn)
        self.tasks.tasks[place].places.append((self.rank, position))
        return place


def _part(instruction: Instruction) -> Part:
    return instruction.micro_batch, instruction.slice, instruction.half


def _place(instruction: Instruction) -> Place:
    return instruction.stage, instruction.micro_batch, instruction.slice, instruction.half


def channel_name(source: int, target: int, op: Op) -> str:
    """The resource on which messages of this kind travel from one rank to another."""
    return f"{source}→{target} {'F' if op in (Op.SEND_F, Op.RECV_F) else 'B'}"


def group_name(ranks: Ranks) -> str:
    """The resource on which collectives over these ranks run."""
    return "ranks " + ",".join(map(str, ranks))

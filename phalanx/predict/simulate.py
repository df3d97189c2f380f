"""Predicts when every instruction of a step runs: a discrete-event simulation of the tables of a compiled plan.

A rank issues its program in order and computes one thing at a time. Messages and collectives are issued where they
stand, once the computation before them has ended, and then run beside the computation, in the order of issue on their
channel (two ranks, one direction) or group; so do copies to the host and back. Whoever touches what they bring waits
for it. So the order on each resource is known beforehand; how fast things get on beside each other is `tasks.py`'s.
Ranks that differ only in whom they talk to are simulated once, unless their links differ or they share devices. Nothing
is printed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.plan.mesh import Mesh
from phalanx.predict import timeline
from phalanx.predict.contention import ALONE, Use, Work
from phalanx.predict.costs import Costs, Measured, Ranks, kind_of
from phalanx.predict.memory import Sizes, peak_memory
from phalanx.predict.shares import Shares
from phalanx.predict.tasks import Task, Tasks, Times, run
from phalanx.predict.timeline import Event, Timeline, channel_name, copies_name, group_name
from phalanx.program.compile import CompiledPlan, without_collection
from phalanx.program.groups import group_of
from phalanx.program.holders import buckets_of, chunks_of, fetched_of, hosted_of
from phalanx.program.instructions import COLLECTIVES, COMPUTE, MOVES, RECEIVES, REDISTRIBUTIONS, SENDS, Instruction, Op
from phalanx.program.rules import Names
from phalanx.program.values import HOST, Row, Table

SCALAR_BYTES = 8
_NUM_SCALARS = {Op.COUNT: 1, Op.NORM: 3}  # the number of items; loss, squared norm, finiteness


@without_collection()
def simulate(compiled: CompiledPlan, costs: Costs, *, rendezvous: bool = True) -> Timeline:
    """The timeline of one step.

    rendezvous: a message starts when both ends have issued it; otherwise the receiver's device takes it in unasked.
    """
    setting = Setting(compiled, costs, rendezvous)
    tasks = Tasks()
    for rank in setting.ranks:
        _Issuer(setting, tasks, rank).issue_all()
    events = _events(setting, tasks.tasks, run(tasks.tasks, costs.contention))
    return _for_world(setting, events)


@without_collection()
def seconds_among_others(compiled: CompiledPlan, costs: Costs) -> float:
    """What a step takes in a run: from the end of one to that of the next. What a step leaves on its way, as shared
    parameters and updates of the host, goes on beneath the next, of which whoever needs it waits."""
    setting = Setting(compiled, costs, rendezvous=True)
    tasks = Tasks()
    issuers = [_Issuer(setting, tasks, rank) for rank in setting.ranks]
    ends = [[issuer.issue_all() for issuer in issuers] for _ in range(2)]
    times = run(tasks.tasks, costs.contention)
    first, second = (max(times.end[task] for task in own) for own in ends)
    return second - first


@dataclass(frozen=True)
class Setting:
    """What is simulated. `rendezvous`: a message waits until its receiver has asked for it."""

    compiled: CompiledPlan
    costs: Costs
    rendezvous: bool

    @cached_property
    def mesh(self) -> Mesh:
        return self.compiled.mesh

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Those that are simulated: one pipeline stands for all where all links are alike."""
        alike = not self.costs.links and not self.costs.contention.is_between_ranks
        return self.mesh.column(0) if alike else self.mesh.world

    @cached_property
    def shares(self) -> Shares:
        return Shares(self.compiled.plan, self.compiled.shape, self.costs)

    @cached_property
    def _names(self) -> Names:
        return Names(self.compiled.plan, self.compiled.shape)

    @cached_property
    def _sizes(self) -> Sizes:
        return Sizes.of(self.compiled, self.costs)

    def message_bytes(self, it: Instruction) -> int:
        """What crosses the cut before or after a stage: all of it, or what is a slice's and a half's."""
        assert it.stage is not None
        stage = it.stage + (it.op in (Op.SEND_F, Op.RECV_B))
        cut = self.compiled.plan.slices and it.slice is not None
        key = ("message", stage, it.half, (it.micro_batch, it.slice) if cut else None)
        if key not in self.seconds:
            self.seconds[key] = self._sizes.crossing(self._names, stage, it)
        return int(self.seconds[key])

    def moved_bytes(self, table: Table, row: Row) -> int:
        """Of what goes to the host, or comes from it: parameters go with the state of which they are a part."""
        there = (table.values[i] for i in (*row.writes, *row.adds))
        return sum(self._sizes(value) for value in there if value.kind != f"{HOST}parameters")

    def group(self, rank: int, instruction: Instruction) -> Ranks:
        key = (rank, instruction.op, instruction.block, instruction.op_index)
        if key not in self._groups:
            self._groups[key] = group_of(self.compiled.plan, self.compiled.shape, rank, instruction)
        return self._groups[key]

    @cached_property
    def _groups(self) -> dict[tuple[object, ...], Ranks]:
        return {}

    @cached_property
    def seconds(self) -> dict[tuple[object, ...], float]:
        """Of computations seen so far: those of micro-batches that are cut alike take as long."""
        return {}


class _Issuer:
    """Issues one rank's program: remembers which task brings what a later instruction waits for."""

    def __init__(self, setting: Setting, tasks: Tasks, rank: int) -> None:
        self.setting, self.tasks, self.rank = setting, tasks, rank
        self.place, self.measured = setting.compiled.pp_index(rank), setting.costs.measured
        self.peers = [setting.mesh.at_stage(rank, p) for p in range(setting.compiled.plan.pp)]
        self.computed: list[int] = []  # the last computation
        self.brings: dict[int, int] = {}  # value → task
        self.meetings: dict[int, float] = {}  # redistributions since the last computation → seconds lost at them
        self.turns: dict[str, int] = {}
        self.computing = setting.costs.contention.uses(rank, Work.COMPUTE)

    def issue_all(self) -> int:
        """One step more. The task at whose end the rank itself is done with it."""
        for position, row in enumerate(self.setting.compiled.tables[self.place].rows):
            self.issue(position, row)
        return self.computed[0]

    def issue(self, position: int, row: Row) -> None:
        it = row.instruction
        waits = [self.brings[value] for value in row.waits if value in self.brings]
        if self.measured is not None:
            self._issue_measured(position, row, waits, self.measured)
        elif it.op in COMPUTE:
            self._meet(waits)
            self._local(position, waits, self._seconds(it))
        elif it.op in SENDS or it.op in RECEIVES:
            self._wait(waits)
            self._message(position, row)
        elif it.op in MOVES:
            self._wait(waits)
            self._copy(position, row)
        elif it.op is Op.STEP and it.block is not None and self.setting.compiled.plan.steps_on_host:
            self._wait(waits)
            self._copy(position, row, self._host_step_seconds(it))
        elif it.op in COLLECTIVES and len(self.setting.group(self.rank, it)) > 1:
            starts = self.setting.costs.start_seconds if it.op in REDISTRIBUTIONS else 0.0
            self._wait(waits, self._other_seconds(it) + starts)
            self._collective(position, row)
        else:
            self._local(position, waits, self._other_seconds(it))

    def _issue_measured(self, position: int, row: Row, waits: list[int], measured: Measured) -> None:
        """Communication takes some of the rank's own time, too, before it is on its way."""
        it = row.instruction
        kind = kind_of(it)
        seconds, moving = measured.own[self.place][kind], measured.moving[self.place].get(kind)
        if it.op in SENDS or it.op in RECEIVES:
            self._wait(waits, seconds)
            self._message(position, row, moving)
        elif it.op in MOVES or (it.op is Op.STEP and moving is not None):
            self._wait(waits, seconds)
            self._copy(position, row, moving or 0.0)
        elif moving is not None:
            self._wait(waits, seconds)
            self._collective(position, row, moving)
        else:
            self._local(position, waits, seconds)

    def _meet(self, waits: list[int]) -> None:
        """Where a rank waits at once for a redistribution, as do the others, which are not there at the same time."""
        lost = {place: seconds for place, seconds in self.meetings.items() if place in waits and seconds}
        if lost:
            self.computed = [self.tasks.add(Task(timeline.COMPUTE, [], [*self.computed, *lost], sum(lost.values())))]
        self.meetings.clear()

    def _local(self, position: int, needs: list[int], seconds: float) -> None:
        task = Task(timeline.COMPUTE, [(self.rank, position)], [*self.computed, *needs], seconds, self.computing)
        self.computed = [self.tasks.add(task)]

    def _wait(self, needs: list[int], seconds: float = 0.0) -> None:
        """What is issued after it cannot begin before."""
        if needs or seconds:
            task = Task(timeline.COMPUTE, [], [*self.computed, *needs], seconds, self.computing)
            self.computed = [self.tasks.add(task)]

    def _seconds(self, it: Instruction) -> float:
        assert it.block is not None, f"{it} is not lowered"
        key = (it.op, it.block, it.op_index, it.slice, it.half, it.micro_batch if it.slice is not None else None)
        known = self.setting.seconds
        if key not in known:
            costs, shares = self.setting.costs, self.setting.shares
            own = costs.segments.get((it.op, it.block, it.op_index or 0))
            whole = costs.seconds(it.op, it.block) * shares.seconds(it) if own is None else own * shares.slice(it)
            known[key] = whole
        return known[key]

    def _host_step_seconds(self, it: Instruction) -> float:
        """Until a part of a bucket is updated on the host, and back where its parameters belong to the device. Where
        the device updates some of the parts at the same time, each takes its share of what all take together."""
        compiled, costs = self.setting.compiled, self.setting.costs
        assert it.block is not None
        parts = chunks_of(compiled.plan, compiled.shape, it.block) * compiled.plan.shards
        bucket = costs.buckets[it.block]
        stays = it.block in fetched_of(compiled.plan, compiled.shape, self.place)
        back = 0.0 if stays else costs.host_link.send(bucket.trained_bytes / parts)
        here, moving = compiled.plan.device_updates, bucket.master_bytes + bucket.moment_bytes + bucket.gradient_bytes
        by_device = here * costs.host_link.send(moving / parts) if here else 0.0
        return max((1 - here) * bucket.host_step_seconds / parts, by_device) + back

    def _other_seconds(self, it: Instruction) -> float:
        """Of what is neither computed nor sent."""
        costs = self.setting.costs
        match it.op:
            case Op.INPUT:
                return costs.input_seconds
            case Op.NORM:  # which every step has once
                return costs.step_seconds
            case Op.STEP:
                return self._step_seconds(it)
            case _:
                return 0.0

    def _step_seconds(self, it: Instruction) -> float:
        compiled, costs = self.setting.compiled, self.setting.costs
        if it.block is not None:
            parts = chunks_of(compiled.plan, compiled.shape, it.block) * compiled.plan.shards
            return costs.buckets[it.block].step_seconds / parts
        hosted = hosted_of(compiled.plan, compiled.shape, compiled.pp_index(self.rank))
        held = buckets_of(compiled.plan, compiled.shape, compiled.pp_index(self.rank))
        trained = [bucket for bucket in held if compiled.shape.trained[bucket] and bucket not in hosted]
        return sum(costs.buckets[bucket].step_seconds for bucket in trained) / compiled.plan.shards

    def _message(self, position: int, row: Row, seconds: float | None = None) -> None:
        """seconds: measured, where its receiver issues it."""
        it, costs = row.instruction, self.setting.costs
        assert it.peer is not None, f"{it} has no peer"
        self._wait([], costs.issue_seconds)
        peer = self.peers[it.peer]
        source, target = (self.rank, peer) if it.op in SENDS else (peer, self.rank)
        channel = channel_name(source, target, it.op)
        before = [self.tasks.joint(channel, self.turns[channel] - 1)] if self.turns.get(channel) else []
        place = self._joint(channel, position, networks=costs.contention.networks((source, target), True))
        task = self.tasks.tasks[place]
        if self.measured is None:
            seconds = costs.message(source, target, self.setting.message_bytes(it))
        task.seconds = task.seconds if seconds is None else seconds
        if it.op in SENDS or self.setting.rendezvous:
            task.needs += self.computed
        if it.op in RECEIVES and costs.contention.listening_slows:
            # Of several messages of one channel the first alone is listened to.
            listened = costs.contention.uses(self.rank, Work.LISTEN)
            self.tasks.add(Task(timeline.COMPUTE, needs=[*self.computed, *before], uses=listened, until=place))
        self.brings.update(dict.fromkeys(row.writes, place))

    def _collective(self, position: int, row: Row, seconds: float | None = None) -> None:
        it = row.instruction
        ranks = self.setting.group(self.rank, it)
        place = self._joint(group_name(ranks), position, networks=self.setting.costs.contention.networks(ranks))
        task = self.tasks.tasks[place]
        task.needs += self.computed
        if seconds is None:
            seconds = (
                self._redistribution_seconds(it, ranks) if it.op in REDISTRIBUTIONS else self._reduce_seconds(it, ranks)
            )
        task.seconds = seconds
        if it.op in REDISTRIBUTIONS:
            self.meetings[place] = self.setting.costs.meeting_seconds.get(len(ranks), 0.0)
        self.brings.update(dict.fromkeys((*row.writes, *row.adds), place))
        if it.op is Op.NORM:
            self._wait([place])

    def _copy(self, position: int, row: Row, seconds: float | None = None) -> None:
        place = self._joint(copies_name(self.rank, row.instruction.op), position, Work.COPY)
        task = self.tasks.tasks[place]
        task.needs += self.computed
        if seconds is None:
            table = self.setting.compiled.tables[self.place]
            seconds = self.setting.costs.host_link.send(self.setting.moved_bytes(table, row))
        task.seconds = seconds
        self.brings.update(dict.fromkeys((*row.writes, *row.adds), place))

    def _redistribution_seconds(self, it: Instruction, ranks: Ranks) -> float:
        shares, costs = self.setting.shares, self.setting.costs
        return costs.collective(shares.collective(it), ranks, shares.elements(it) * costs.element_bytes)

    def _reduce_seconds(self, it: Instruction, ranks: Ranks) -> float:
        plan, costs = self.setting.compiled.plan, self.setting.costs
        if it.op in _NUM_SCALARS:
            return costs.collective("all_reduce", ranks, _NUM_SCALARS[it.op] * SCALAR_BYTES)
        assert it.block is not None
        bucket = costs.buckets[it.block]
        if it.op in (Op.GATHER, Op.SHARE):
            size = bucket.weight_bytes if it.op is Op.GATHER else bucket.trained_bytes
            return costs.collective("all_gather", ranks, size)
        if it.op is Op.REDUCE and plan.zero:
            return costs.collective("reduce_scatter", ranks, bucket.gradient_bytes)
        return costs.collective("all_reduce", ranks, bucket.gradient_bytes / plan.shards)

    def _joint(self, resource: str, position: int, work: Work = Work.TRANSFER, networks: tuple[Use, ...] = ()) -> int:
        """networks: that it occupies besides the ranks' devices."""
        turn = self.turns.get(resource, 0)
        self.turns[resource] = turn + 1
        place = self.tasks.joint(resource, turn)
        task, contention = self.tasks.tasks[place], self.setting.costs.contention
        if contention is not ALONE:
            task.uses += (*contention.uses(self.rank, work), *(use for use in networks if use not in task.uses))
        task.places.append((self.rank, position))
        return place


def _events(setting: Setting, tasks: Sequence[Task], times: Times) -> list[Event]:
    order = sorted((rank, position, place) for place, task in enumerate(tasks) for rank, position in task.places)
    programs = {rank: setting.compiled.program(rank) for rank in setting.ranks}
    events: list[Event] = []
    for rank, position, place in order:
        begin, end = times.begin[place], times.end[place]
        events.append(Event(rank, programs[rank][position], begin, end, tasks[place].resource))
    return events


def _for_world(setting: Setting, events: Sequence[Event]) -> Timeline:
    """Every rank's events and memory: those of the rank that stands for it."""
    compiled, mesh = setting.compiled, setting.mesh
    by_rank: dict[int, list[Event]] = {rank: [] for rank in setting.ranks}
    for event in events:
        by_rank[event.rank].append(event)
    held = {rank: peak_memory(compiled, setting.costs, rank, own) for rank, own in by_rank.items()}
    every: list[Event] = []
    for rank in mesh.world:
        every += by_rank[rank] if rank in by_rank else _copied(setting, rank, by_rank[_alike(setting, rank)])
    memory = tuple(held[rank if rank in held else _alike(setting, rank)] for rank in mesh.world)
    return Timeline(tuple(every), memory)


def _copied(setting: Setting, rank: int, events: Sequence[Event]) -> list[Event]:
    """The events of a rank that does the same among others."""
    there = {peer: setting.mesh.at_stage(rank, setting.compiled.pp_index(peer)) for peer in setting.ranks}
    resources: dict[tuple[object, ...], str] = {}
    found: list[Event] = []
    for _, it, start, end, resource in events:
        if it.peer is not None:
            it = it._replace(peer=there[it.peer])
        if resource != timeline.COMPUTE:
            key = (resource, it.op)
            if key not in resources:
                resources[key] = _resource(setting, rank, it)
            resource = resources[key]
        found.append(Event(rank, it, start, end, resource))
    return found


def _alike(setting: Setting, rank: int) -> int:
    return setting.mesh.at_stage(0, setting.compiled.pp_index(rank))


def _resource(setting: Setting, rank: int, it: Instruction) -> str:
    """Where something runs that is no computation of the rank."""
    if it.op in COLLECTIVES:
        return group_name(setting.group(rank, it))
    if it.peer is not None:
        return channel_name(*((rank, it.peer) if it.op in SENDS else (it.peer, rank)), it.op)
    return copies_name(rank, it.op)

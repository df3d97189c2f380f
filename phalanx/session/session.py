"""A rank in three parts with three lifetimes, and the steps it runs.

*compiled* holds functions and programs, which serve as long as shapes match; *connected* the process groups of one
generation; *state* the tensors: parameters, the optimizer's state, the scale of the loss. Each is made without the
others; a session puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phalanx.adapt.holdings import Moving
from phalanx.adapt.portions import Migration
from phalanx.comm.links import Group, Links
from phalanx.config import RunConfig
from phalanx.data.batches import Batches
from phalanx.engine.compiled import Compiled, Functions, state_layout
from phalanx.engine.engine import Engine, Watch
from phalanx.engine.evaluation import Evaluator
from phalanx.engine.gradients import BucketGradients
from phalanx.engine.host_copies import HostCopies
from phalanx.engine.layout import ProcessGroups
from phalanx.engine.linked import Parts
from phalanx.engine.redistribute import Mover
from phalanx.engine.reductions import GlobalReductions
from phalanx.engine.step import Step
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.buckets import BufferPool, Read
from phalanx.params.groups import Groups
from phalanx.params.layout_of import StateLayout
from phalanx.params.rank_state import Filled, State
from phalanx.plan.plan import Plan
from phalanx.program.shape import Partition
from phalanx.tasks.base import Batch

_MAX_COMPILED = 8  # plans that are remembered
Look = Callable[[Compiled, Callable[[Plan], Compiled]], Compiled]


@dataclass(frozen=True)
class Opening:
    """What a session is made of besides its plan, and with which it is made anew under another one. migrations,
    compiled: moves of state, and functions and programs, of plans that it had before."""

    captured: Captured
    config: RunConfig
    context: RankContext
    trainable: tuple[str, ...]
    buffers: Mapping[str, Tensor]
    optimizer_class: type[Any] | None = None
    groups: Groups | None = None
    watches: tuple[Watch, ...] = ()
    migrations: dict[tuple[Plan, Plan], Migration] = field(default_factory=dict[tuple[Plan, Plan], Migration])
    compiled: dict[tuple[Plan, int, int], Compiled] = field(default_factory=dict[tuple[Plan, int, int], Compiled])

    @property
    def device(self) -> torch.device:
        return torch.device(self.context.device)

    def has_place(self, plan: Plan) -> bool:
        """Whether this rank takes part in a plan; one for fewer ranks than there are leaves out the last."""
        return self.context.rank < plan.world

    def remembered(self, plan: Plan, rank: int | None = None) -> Compiled:
        """What `compile` gives, once for each of the last few plans. rank: a number that this one may come to have."""
        rank = self.context.rank if rank is None else rank
        key = (plan, self.config.batch_size, rank)
        found = self.compiled.pop(key, None) or self.compile(plan, rank)
        while len(self.compiled) >= _MAX_COMPILED:
            self.compiled.pop(next(iter(self.compiled)))
        self.compiled[key] = found
        return found

    def compile(self, plan: Plan, rank: int | None = None) -> Compiled:
        return Compiled(
            self.captured, self.config, plan, rank=self.context.rank if rank is None else rank, device=self.device,
            trainable=self.trainable, buffers=self.buffers, optimizer_class=self.optimizer_class,
        )  # fmt: skip

    def layout(self, plan: Plan) -> StateLayout:
        """What all ranks keep."""
        return state_layout(
            self.captured, self.config, plan, self.device, self.trainable, self.optimizer_class
        )  # fmt: skip

    def state(self, compiled: Compiled, read: Read, only_shards: bool = False) -> State:
        return State(
            compiled.formation.state, self.context.rank, read, self.config, self.device, self.optimizer_class,
            self.groups, compiled.hosted(), compiled.fetched(), only_shards,
        )  # fmt: skip

    def told(self, links: Links, plan: Plan) -> Group | None:
        """Rank 0 and those that have no place in a plan, where this rank is one of them and there are any."""
        ranks = (0, *range(plan.world, self.context.world))
        return links.group(ranks, "told") if len(ranks) > 1 and self.context.rank in ranks else None


class Session:
    """Trains and evaluates one model under one plan. `step` is called with this rank's part of a batch. opening: where
    there is one, the plan can be changed (`change.py`). left: while it is, what this rank has of the state."""

    left: State | Moving | None = None

    def __init__(
        self, compiled: Compiled, connected: ProcessGroups, state: State, watches: Iterable[Watch] = (),
        opening: Opening | None = None,
    ) -> None:  # fmt: skip
        self.compiled, self.connected, self._watches, self.opening = compiled, connected, tuple(watches), opening
        self._told = None if opening is None else opening.told(connected.links, compiled.plan)
        self.put_back(state)

    def give_up_state(self) -> list[Filled]:
        """All that this rank keeps, of which another state is made; the session runs no step until it has one."""
        held = self.state.give_up()
        del self.step, self._evaluator, self.state
        return held

    def put_back(self, state: State) -> None:
        """From now on with this state."""
        compiled, connected, self.state, self.left = self.compiled, self.connected, state, None
        training = self._engine(compiled.training, self._watches, self._gradients(), self._totals())
        evaluation = self._engine(compiled.evaluation, self._watches, {}, None)
        timeout = connected.links.timeout.total_seconds() if compiled.plan.world > 1 else None
        self.step = Step(compiled.training.feeder, training, compiled.program, compiled.plan, self._told, timeout)
        self._evaluator = Evaluator(
            evaluation, compiled.evaluation.feeder, compiled.formation, connected, compiled.samples
        )  # fmt: skip

    @classmethod
    def open(
        cls,
        captured: Captured,
        config: RunConfig,
        plan: Plan,
        *,
        context: RankContext,
        trainable: Sequence[str],
        read: Read,
        buffers: Mapping[str, Tensor],
        optimizer_class: type[Any] | None = None,
        groups: Groups | None = None,
        watches: Iterable[Watch] = (),
        links: Links | None = None,
        look: Look | None = None,
    ) -> Session:
        """links: of this context, to be used and left open; else it makes its own and closes them. look: is shown what
        is compiled, and how other plans would be, before anything is put on the device; what it returns is run."""
        opening = Opening(captured, config, context, tuple(trainable), buffers, optimizer_class, groups, tuple(watches))
        return cls.of(opening, plan, read, look, links)

    @classmethod
    def of(
        cls, opening: Opening, plan: Plan, read: Read, look: Look | None = None, links: Links | None = None
    ) -> Session:
        """The same, of what is given together."""
        compiled, context = opening.remembered(plan), opening.context
        if look is not None:
            compiled = look(compiled, opening.compile)
        if context.world > 1:
            context.slot.set_place(compiled.formation.place)
        own = links or Links(context, timeout=opening.config.timeout)
        connected = ProcessGroups(compiled.formation, own, owns_links=links is None)
        state = opening.state(compiled, read)
        state.connect(lambda ranks: own.group(ranks, "matrices"))
        state.begin()
        return cls(compiled, connected, state, opening.watches, opening)

    def under(self, plan: Plan) -> Session:
        """The same state and connections with the programs of another plan, one that leaves everything where it is."""
        self.step.engine.settle()
        return Session(self.compiled.under(plan), self.connected, self.state, self._watches, self.opening)

    def computing(self, compiled: Compiled) -> Session:
        """The same state and connections with another graph of the same parameters, such as one without a loss."""
        self.step.engine.settle()
        return Session(compiled, self.connected, self.state, self._watches)

    @property
    def plan(self) -> Plan:
        return self.compiled.plan

    def part(self, first: int, samples: int) -> tuple[int, int]:
        """Where this rank's part of a global batch of `samples` at stream position `first` begins, and its length."""
        return self.compiled.part(first, samples)

    def evaluate(self, batches: Batches, samples: int) -> float:
        """The mean loss over the first `samples` samples, in micro-batches of the size that training uses."""
        loss = self._evaluator(batches, samples)
        if self._told is not None:
            said = torch.tensor(loss, dtype=torch.float64, device=self.compiled.device)
            self._told.broadcast(said, self._told.ranks[0]).wait("the evaluation's loss")
        return loss

    def forward(self, batch: Batch, first: int) -> None:
        """This rank's part of a batch without a backward and without dropout, for outputs that leave."""
        self._evaluator.forward(batch, first)

    @property
    def evaluation(self) -> Engine:
        """What evaluates; `step.engine` trains."""
        return self._evaluator.engine

    def close(self) -> None:
        self.step.engine.settle()
        if self.state.hosted is not None:
            self.state.hosted.close()
        self.connected.close()

    def _engine(
        self, functions: Functions, watches: Iterable[Watch], gradients: Mapping[int, BucketGradients],
        totals: GlobalReductions | None,
    ) -> Engine:  # fmt: skip
        compiled, connected, formation = self.compiled, self.connected, self.compiled.formation
        parts = Parts(
            compiled.plan, formation.shape, compiled.rank, formation.pp_index, compiled.graph, functions.compute,
            functions.tracer, self.state.parameters, connected.gather, self._movers(), connected.channel, gradients,
            totals, compiled.home(), HostCopies(compiled.device), self.state.hosted,
        )  # fmt: skip
        warms_up = compiled.device.type == "cuda" and compiled.plan.pp * compiled.plan.tp > 1
        return Engine(parts, watches=watches, warms_up=warms_up)

    def _movers(self) -> dict[Partition, Mover]:
        parts = (part for block in self.compiled.graph.parts for part in block)
        cells = {part.redistribution.cells for part in parts if part.redistribution is not None}
        return {own: Mover(self.connected.redistribution_group(own)) for own in cells}

    def _gradients(self) -> dict[int, BucketGradients]:
        pool, connected, parameters = BufferPool(), self.connected, self.state.parameters
        found: dict[int, BucketGradients] = {}
        for index in parameters.held():
            flat = parameters.bucket(index).trained
            used = index != self.compiled.formation.shape.num_buckets
            if flat is not None and used and not connected.is_alone(index):
                how = connected.reduction(index, self.plan.zero > 0)
                found[index] = BucketGradients(flat, how, pool, exactly=self.plan.sums_exactly)
        return found

    def _totals(self) -> GlobalReductions:
        formation, state = self.compiled.formation, self.state
        return GlobalReductions(
            state.optimizer, self.connected.replicas, self.connected.world,
            formation.owned & state.parameters.trained.keys(), counts=formation.is_first and formation.is_tp_leader,
            is_tp_leader=formation.is_tp_leader, loss_scale=state.loss_scale, exactly=self.plan.sums_exactly,
        )  # fmt: skip

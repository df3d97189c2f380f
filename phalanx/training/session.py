"""A rank in three parts with three lifetimes, and the steps it runs.

*compiled* holds functions and programs, which serve as long as shapes match; *connected* the process groups of one
generation; *state* the tensors: parameters, the optimizer's state, the scale of the loss. Each is made without the
others; a session puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.data.batches import Batches
from phalanx.engine.compiled import Compiled, Functions
from phalanx.engine.engine import Engine, Watch
from phalanx.engine.evaluation import Evaluator
from phalanx.engine.gradients import BucketGradients
from phalanx.engine.host_copies import HostCopies
from phalanx.engine.layout import ProcessGroups
from phalanx.engine.link import Parts
from phalanx.engine.redistribute import Mover
from phalanx.engine.reductions import GlobalReductions
from phalanx.engine.step import Step
from phalanx.errors import PlanError
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.params.buckets import BufferPool, Read
from phalanx.params.groups import Groups
from phalanx.params.rank_state import State
from phalanx.plan.plan import Plan
from phalanx.program.shape import Partition
from phalanx.tasks.base import Batch


class Session:
    """Trains and evaluates one model under one plan. `step` is called with this rank's part of a batch."""

    def __init__(
        self, compiled: Compiled, connected: ProcessGroups, state: State, watches: Iterable[Watch] = ()
    ) -> None:
        self.compiled, self.connected, self.state, self._watches = compiled, connected, state, tuple(watches)
        training = self._engine(compiled.training, self._watches, self._gradients(), self._totals())
        evaluation = self._engine(compiled.evaluation, self._watches, {}, None)
        self.step = Step(compiled.training.feeder, training, compiled.program, compiled.plan)
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
        look: Callable[[Compiled, Callable[[Plan], Compiled]], None] | None = None,
    ) -> Session:
        """links: of this context, to be used and left open; else it makes its own and closes them. look: is shown what
        is compiled, and how other plans would be, before anything is put on the device."""
        device = torch.device(context.device)

        def compile(plan: Plan) -> Compiled:
            return Compiled(
                captured, config, plan, rank=context.rank, device=device, trainable=trainable, buffers=buffers,
                optimizer_class=optimizer_class,
            )  # fmt: skip

        compiled = compile(plan)
        if look is not None:
            look(compiled, compile)
        if context.world > 1:
            context.slot.set_place(compiled.formation.place)
        own = links or Links(context, timeout=config.timeout)
        connected = ProcessGroups(compiled.formation, own, owns_links=links is None)
        state = State(
            compiled.formation.state, context.rank, read, config, device, optimizer_class, groups, compiled.hosted()
        )  # fmt: skip
        state.connect(lambda ranks: own.group(ranks, "matrices"))
        return cls(compiled, connected, state, watches)

    def under(self, plan: Plan) -> Session:
        """The same state and connections with the programs of another plan, one that leaves everything where it is."""
        self.step.engine.settle()
        return Session(self.compiled.under(plan), self.connected, self.state, self._watches)

    def computing(self, captured: Captured, plan: Plan) -> Session:
        """The same state and connections with another graph of the same parameters, such as one without a loss."""
        self.step.engine.settle()
        compiled = self.compiled.under(plan, captured)
        if compiled.formation.facts.parameters != self.compiled.formation.facts.parameters:
            raise PlanError(
                f"plan {plan.shown} keeps parameters elsewhere where the model's outputs leave than where its loss is "
                "computed",
                "leave tp out of the plan, or compute the loss outside (loss='outer')",
            )
        return Session(compiled, self.connected, self.state, self._watches)

    @property
    def plan(self) -> Plan:
        return self.compiled.plan

    def part(self, first: int, samples: int) -> tuple[int, int]:
        """Where this rank's part of a global batch of `samples` at stream position `first` begins, and its length."""
        return self.compiled.part(first, samples)

    def evaluate(self, batches: Batches, samples: int) -> float:
        """The mean loss over the first `samples` samples, in micro-batches of the size that training uses."""
        return self._evaluator(batches, samples)

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
                found[index] = BucketGradients(flat, connected.reduction(index, self.plan.zero > 0), pool)
        return found

    def _totals(self) -> GlobalReductions:
        formation, state = self.compiled.formation, self.state
        return GlobalReductions(
            state.optimizer, self.connected.replicas, self.connected.world,
            formation.owned & state.parameters.trained.keys(), counts=formation.is_first and formation.is_tp_leader,
            is_tp_leader=formation.is_tp_leader, loss_scale=state.loss_scale,
        )  # fmt: skip

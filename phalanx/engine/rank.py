"""What lives on this rank's device: parameters, buffers, the optimizer's state, and the engines that run on them.

It is built from values that are read one at a time and gives them back as named pieces; where they come from and go to
is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.data.batches import Batches
from phalanx.engine.compose import compose
from phalanx.engine.compute import Compute
from phalanx.engine.engine import Engine, Watch
from phalanx.engine.evaluation import Evaluator
from phalanx.engine.gradients import BucketGradients
from phalanx.engine.inputs import Feeder, split
from phalanx.engine.layout import ProcessGroups, RankLayout
from phalanx.engine.link import Parts
from phalanx.engine.redistribute import Mover
from phalanx.engine.reductions import GlobalReductions
from phalanx.engine.step import Step
from phalanx.engine.trace import Tracer
from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.model.segment.compile import Compiler, resolve_mode
from phalanx.params import state_shards
from phalanx.params.buckets import BufferPool, Read
from phalanx.params.flat import Piece
from phalanx.params.loss_scale import LossScale
from phalanx.params.optimizer import Optimizer, make_optimizer, optimizer_slots
from phalanx.params.parameters import keeps_masters, load_parameters
from phalanx.params.state_facts import state_facts
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.compile import compile_plan
from phalanx.program.shape import Partition
from phalanx.state.layout import StateShard


class Rank:
    """Trains and evaluates one captured model under one plan. `step` is called with this rank's part of a batch.

    links: of this context, to be used and left open; else it makes its own and closes them.
    """

    def __init__(
        self,
        captured: Captured,
        config: RunConfig,
        plan: Plan,
        *,
        context: RankContext,
        trainable: Sequence[str],
        read: Read,
        buffers: Mapping[str, Tensor],
        optimizer_class: type[Any] | None = None,
        watches: Iterable[Watch] = (),
        links: Links | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(context.device), getattr(torch, config.dtype)
        self._composed = compose(captured, plan, Mesh.of(plan).coordinates(context.rank)[2], self.dtype, trainable)
        self.captured = captured = self._composed.captured
        self.context, self.plan = context, plan
        self._seed, self._buffers = config.seed, buffers
        self.compiler = Compiler(resolve_mode(config.compile, self.device))
        self.formation = self._formation(config, trainable, optimizer_class)
        self._graph = self._composed.graph
        if context.world > 1:
            context.slot.set_place(self.formation.place)
        self.compiled = compile_plan(plan, self.formation.shape)
        self.links, self._owns_links = links or Links(context, timeout=config.timeout), links is None
        self.connections = ProcessGroups(self.formation, self.links)
        self.parameters = load_parameters(
            self.formation.state, context.rank, read, device=self.device, zero=self.connections.gather
        )
        weights = self.parameters.trained
        self.optimizer = Optimizer(make_optimizer(weights, config, optimizer_class), weights, config.clip)
        self.loss_scale = LossScale(self.device) if self.dtype == torch.float16 else None
        engine, feeder = self._engine(trainable, watches, trains=True)
        self.step = Step(feeder, engine, self.compiled.program(context.rank), plan)
        size = split(split(config.batch_size, plan.dp)[0], plan.mb)[0]
        self._evaluator = Evaluator(*self._engine((), watches, trains=False), self.formation, self.connections, size)

    @property
    def keeps_masters(self) -> bool:
        """Whether what is updated is kept in higher precision than what is computed with."""
        return self.formation.facts.masters

    def part(self, first: int, samples: int) -> tuple[int, int]:
        """Where this rank's part of a global batch of `samples` at stream position `first` begins, and its length."""
        index, sizes = self.formation.dp_index, split(samples, self.plan.dp)
        return first + sum(sizes[:index]), sizes[index]

    def evaluate(self, batches: Batches, samples: int) -> float:
        """The mean loss over the first `samples` samples, in micro-batches of the size that training uses."""
        return self._evaluator(batches, samples)

    def state_shards(self) -> Iterator[tuple[StateShard, Tensor]]:
        """Everything a checkpoint holds, as far as it lies here."""
        self.parameters.settle()
        return state_shards.of_checkpoint(self.formation.state, self.context.rank, self.parameters, self.optimizer)

    def values(self) -> Iterator[tuple[StateShard, Tensor]]:
        """The parameters alone, by their own names, in the precision of training."""
        return state_shards.of_parameters(self.formation.state, self.context.rank, self.parameters)

    def restore_optimizer(
        self, slots: Iterable[tuple[str, str]], read: Callable[[str, Piece], Tensor], scalars: Mapping[str, Any]
    ) -> None:
        """slots: the (slot, parameter) pairs that were saved; read: (key, piece) → what that is of it, in its shape."""

        def piece_of(slot: str, name: str) -> Tensor:
            return read(f"optimizer/{slot}/{name}", self.parameters.weights[name].piece)

        self.optimizer.load(slots, piece_of, scalars)

    @property
    def engines(self) -> tuple[Engine, Engine]:
        """For training and for evaluation."""
        return self.step.engine, self._evaluator.engine

    def close(self) -> None:
        self.step.engine.settle()
        if self._owns_links:
            self.links.close()

    def _engine(self, trainable: Sequence[str], watches: Iterable[Watch], trains: bool) -> tuple[Engine, Feeder]:
        formation, graph, plan = self.formation, self._graph, self.plan
        compute = Compute(
            graph.segments, self._buffers, trainable=trainable, device=self.device, compiler=self.compiler,
            dropout=trains, products=plan.adds_gradients,
        )  # fmt: skip
        shapes = self._composed.local_shapes()
        own = [block for stage in formation.stages for block in plan.stage_blocks(stage)]
        names = enumerate(self._composed.buckets.names)
        parts = Parts(
            plan, formation.shape, self.context.rank, formation.pp_index, graph, compute,
            Tracer(graph, formation.shape, compute, shapes, self.dtype, own, self._composed.integers()),
            self.parameters, self._movers(),
            self.connections.channel, self._gradients() if trains else {}, self._totals() if trains else None,
            {name: bucket for bucket, own_names in names for name in own_names},
        )  # fmt: skip
        engine = Engine(parts, watches=watches, warms_up=self.device.type == "cuda" and plan.pp * plan.tp > 1)
        return engine, Feeder(
            self.captured,
            compute,
            seed=self._seed,
            dtype=self.dtype,
            degrees=formation.sample_shards(),
            sliced=self._composed.sliced,
        )

    def _movers(self) -> dict[Partition, Mover]:
        parts = (part for block in self._graph.parts for part in block)
        cells = {part.redistribution.cells for part in parts if part.redistribution is not None}
        return {own: Mover(self.connections.redistribution_group(own)) for own in cells}

    def _gradients(self) -> dict[int, BucketGradients]:
        pool = BufferPool()
        found: dict[int, BucketGradients] = {}
        for index in self.parameters.held():
            flat = self.parameters.bucket(index).trained
            if flat is not None and index != self.formation.shape.num_buckets and not self.connections.is_alone(index):
                found[index] = BucketGradients(flat, self.connections.reduction(index, self.plan.zero > 0), pool)
        return found

    def _totals(self) -> GlobalReductions:
        is_tp_leader = self.formation.is_tp_leader
        owned = self.formation.owned & self.parameters.trained.keys()
        return GlobalReductions(
            self.optimizer, self.connections.replicas, self.connections.world, owned,
            counts=self.formation.is_first and is_tp_leader, is_tp_leader=is_tp_leader, loss_scale=self.loss_scale,
        )  # fmt: skip

    def _formation(
        self, config: RunConfig, trainable: Sequence[str], optimizer_class: type[Any] | None
    ) -> RankLayout:  # fmt: skip
        buckets, sharded, captured = self._composed.buckets, self._composed.sharded, self.captured
        masters = keeps_masters(self.dtype, config.master_weights)
        facts = state_facts(
            buckets.shape, buckets.names, captured.shapes, trainable=trainable, dtype=config.dtype,
            integers=captured.integers, tp=self.plan.tp, masters=masters,
            locals={name: each.locals for name, each in sharded.parameters.items()} if sharded else None,
            slots=optimizer_slots(config, torch.float32 if masters else self.dtype, self.device, optimizer_class),
        )  # fmt: skip
        return RankLayout(self.plan, buckets.shape, facts, self.context.rank, sharded)

"""What a rank computes with, without state and without other ranks: the model as its plan composes it, the functions of
its segments, and the programs.

Functions belong to shapes, not to plans: they serve as long as these match.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.engine.compose import Composed, compose
from phalanx.engine.compute import Compute
from phalanx.engine.inputs import Feeder, split
from phalanx.engine.layout import RankLayout
from phalanx.engine.trace import Tracer
from phalanx.errors import PlanError
from phalanx.model.captured import Captured
from phalanx.model.segment.compile import Compiler, resolve_mode
from phalanx.params.layout_of import StateLayout
from phalanx.params.optimizer import is_muon, optimizer_slots
from phalanx.params.parameters import keeps_masters
from phalanx.params.state_facts import state_facts
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.compile import compile_plan
from phalanx.program.holders import chunks_of, fetched_of, hosted_of


@dataclass(frozen=True)
class Functions:
    """Of a training step, or of an evaluation."""

    compute: Compute
    tracer: Tracer
    feeder: Feeder


class Compiled:
    """captured: sliced where the plan says so. programs: of all ranks. whole: parameters that the ranks of a
    tensor-parallel group do not divide."""

    def __init__(
        self,
        captured: Captured,
        config: RunConfig,
        plan: Plan,
        *,
        rank: int,
        device: torch.device,
        trainable: Sequence[str],
        buffers: Mapping[str, Tensor],
        optimizer_class: type[Any] | None = None,
        whole: Collection[str] = (),
    ) -> None:
        self.plan, self.rank, self.device, self.dtype = plan, rank, device, getattr(torch, config.dtype)
        self._given = (captured, config, tuple(trainable), optimizer_class)
        self.composed = compose(captured, plan, Mesh.of(plan).coordinates(rank)[2], self.dtype, trainable, whole)
        self.graph = self.composed.graph
        self.compiler = Compiler("off" if config.deterministic else resolve_mode(config.compile, device))
        self.formation = _formation(self.composed, config, plan, rank, device, trainable, optimizer_class)
        self.programs = compile_plan(plan, self.formation.shape)
        self.program = self.programs.program(rank)
        self.samples = split(split(config.batch_size, plan.dp)[0], plan.mb)[0]  # of a micro-batch, the largest
        self._seed, self.buffers = config.seed, buffers
        self.training, self.evaluation = self._functions(trainable, trains=True), self._functions((), trains=False)

    def under(self, plan: Plan) -> Compiled:
        """The same model under another plan."""
        return self._again(self._given[0], plan)

    def reading(self, captured: Captured) -> Compiled:
        """Another graph of the same parameters, which stay where they are: one whose outputs leave, whole."""
        parameters = self.formation.facts.parameters
        whole = [each.name for each in parameters if all(local.is_whole for local in each.locals)]
        found = self._again(captured, replace(self.plan, slices=()), whole)
        if found.formation.facts.parameters != parameters:
            raise PlanError(
                f"plan {self.plan.shown} keeps parameters elsewhere where the model's outputs leave than where its "
                "loss is computed",
                "choose tp=1; or leave out what needs outputs, such as metrics and predictions",
            )
        return found

    def _again(self, captured: Captured, plan: Plan, whole: Collection[str] = ()) -> Compiled:
        _, config, trainable, optimizer_class = self._given
        return Compiled(
            captured, config, plan, rank=self.rank, device=self.device, trainable=trainable, buffers=self.buffers,
            optimizer_class=optimizer_class, whole=whole,
        )  # fmt: skip

    @property
    def captured(self) -> Captured:
        return self.composed.captured

    def part(self, first: int, samples: int) -> tuple[int, int]:
        """Where this rank's part of a global batch of `samples` at stream position `first` begins, and its length."""
        index, sizes = self.formation.dp_index, split(samples, self.plan.dp)
        return first + sum(sizes[:index]), sizes[index]

    def home(self) -> dict[str, int]:
        """The bucket of each parameter."""
        return {name: bucket for bucket, names in enumerate(self.composed.buckets.names) for name in names}

    def hosted(self) -> dict[int, int]:
        """The buckets whose optimizer state lies on the host, each in so many parts."""
        plan, shape = self.plan, self.formation.shape
        return {b: chunks_of(plan, shape, b) for b in hosted_of(plan, shape, self.formation.pp_index)}

    def fetched(self) -> tuple[int, ...]:
        """The buckets whose parameters lie on the host."""
        return fetched_of(self.plan, self.formation.shape, self.formation.pp_index)

    @property
    def uses_muon(self) -> bool:
        _, config, _, optimizer_class = self._given
        return is_muon(config, optimizer_class)

    def _functions(self, trainable: Sequence[str], trains: bool) -> Functions:
        composed, formation, plan = self.composed, self.formation, self.plan
        compute = Compute(
            self.graph.segments, self.buffers, trainable=trainable, device=self.device, compiler=self.compiler,
            dropout=trains, products=plan.adds_gradients,
        )  # fmt: skip
        own = [block for stage in formation.stages for block in plan.stage_blocks(stage)]
        tracer = Tracer(
            self.graph, formation.shape, compute, composed.local_shapes(), self.dtype, own, composed.integers()
        )  # fmt: skip
        feeder = Feeder(
            self.captured, compute, seed=self._seed, dtype=self.dtype, degrees=formation.sample_shards(),
            sliced=composed.sliced,
        )  # fmt: skip
        return Functions(compute, tracer, feeder)


def state_layout(
    captured: Captured, config: RunConfig, plan: Plan, device: torch.device, trainable: Sequence[str],
    optimizer_class: type[Any] | None,
) -> StateLayout:  # fmt: skip
    """What all ranks keep under a plan, for one that has no place in it."""
    composed = compose(captured, plan, 0, getattr(torch, config.dtype), trainable)
    return _formation(composed, config, plan, 0, device, trainable, optimizer_class).state


def _formation(
    composed: Composed, config: RunConfig, plan: Plan, rank: int, device: torch.device, trainable: Sequence[str],
    optimizer_class: type[Any] | None,
) -> RankLayout:  # fmt: skip
    buckets, sharded, captured = composed.buckets, composed.sharded, composed.captured
    dtype = getattr(torch, config.dtype)
    masters = keeps_masters(dtype, config.master_weights)
    facts = state_facts(
        buckets.shape, buckets.names, captured.shapes, trainable=trainable, dtype=config.dtype,
        integers=captured.integers, tp=plan.tp, masters=masters,
        locals={name: each.locals for name, each in sharded.parameters.items()} if sharded else None,
        slots=optimizer_slots(config, torch.float32 if masters else dtype, device, optimizer_class),
    )  # fmt: skip
    return RankLayout(plan, buckets.shape, facts, rank, sharded)

"""One compile: from a plan and a model's shape to the programs of all ranks, checked and bound to their values.

Ranks with the same place in their pipeline have the same program but for the ranks they talk to, so whatever the world
size, as many programs are made, checked and bound as a pipeline has ranks. Everyone who runs, verifies, predicts or
shows a plan takes it from here. Plain data, no torch.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.program.check import check, held_activations
from phalanx.program.instructions import Program
from phalanx.program.lower import lower, lower_forward, without_overlap
from phalanx.program.shape import ModelShape
from phalanx.program.values import Table


@dataclass(frozen=True)
class CompiledPlan:
    """programs, tables: by place in the pipeline; peers are such places too. plan: as the programs follow it (an
    evaluation without overlap)."""

    plan: Plan
    shape: ModelShape
    programs: tuple[Program, ...]
    tables: tuple[Table, ...]

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(self.plan)

    def program(self, rank: int) -> Program:
        """What a rank of the world runs, with the ranks it talks to."""
        own = self.programs[self.pp_index(rank)]
        there = {peer: self.mesh.at_stage(rank, peer) for peer in range(self.plan.pp)}
        return tuple(it if it.peer is None else it._replace(peer=there[it.peer]) for it in own)

    def pp_index(self, rank: int) -> int:
        return self.mesh.coordinates(rank)[0]

    def held_activations(self, rank: int) -> int:
        """The most forwards that wait for their backward at once; slices and halves count as micro-batches."""
        return held_activations(self.programs[self.pp_index(rank)])

    def peak_gathered(self, rank: int) -> int:
        """The most buckets that are gathered at once by ZeRO 3."""
        return self.tables[self.pp_index(rank)].peak("gathered")


@contextmanager
def without_collection() -> Generator[None]:
    """Python searches all objects for cycles again and again while millions are made; here none are made in cycles."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@without_collection()
def compile_plan(plan: Plan, shape: ModelShape) -> CompiledPlan:
    """The programs of one training step; a PlanError where they are not right."""
    programs = lower(plan, shape)
    return CompiledPlan(plan, shape, programs, check(plan, shape, programs, plan.mb, training=True))


@without_collection()
def compile_forward(plan: Plan, shape: ModelShape, num_micro_batches: int) -> CompiledPlan:
    """The programs of an evaluation."""
    whole = without_overlap(plan)
    programs = lower_forward(plan, shape, num_micro_batches)
    tables = check(whole, shape, programs, num_micro_batches, training=False)
    return CompiledPlan(whole, shape, programs, tables)

"""What `slices.py` predicts: a step of any plan from measured slices, its memory, and which slicing would be best.

The planner's sum knows neither messages nor head and embedding on one stage only, so its slicings (with and without
the time of a message in a slice's) and the uniform ones are simulated, and the shortest step is what is planned.
Torch-free.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from phalanx.model.facts.facts import ModelFacts
from phalanx.plan.fields import write_slicings
from phalanx.plan.plan import Plan
from phalanx.planning.slice_search import ModelledTimes, Times, plan_batch
from phalanx.predict.contention import Contention
from phalanx.predict.costs import BucketCosts, Costs, Link
from phalanx.predict.from_facts import Device, costs_of_facts
from phalanx.predict.from_profile import RankProfile
from phalanx.predict.simulate import seconds_among_others, simulate
from phalanx.predict.split_facts import SplitFacts
from phalanx.predict.timeline import Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.holders import buckets_of
from phalanx.program.instructions import RECEIVES, SENDS, Op
from phalanx.program.shape import ModelShape

GRANULARITIES = 32  # of a sequence: few lengths, since every length is traced once
CLEARLY = 0.01  # what is predicted is not more exact
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class BlockTimes:
    """forward: the part of a pass to and fro that the forward takes."""

    times: ModelledTimes
    forward: float

    def seconds(self, tokens: int, past: int) -> float:
        return float(self.times.seconds(np.array([tokens], float), np.array([past], float))[0])


@dataclass(frozen=True)
class Ends:
    """What a step has besides its slices: seconds of the norm, of the update per element, and of starting a message."""

    norm: float
    update: float
    issue: float


@dataclass(frozen=True)
class Known:
    """Everything that a simulation needs. blocks: of the model, in order, measured while all ranks computed. elements:
    of each bucket. described: how large its values are, whole and (True) on slices. ranks: what ranks do to each
    other."""

    blocks: tuple[BlockTimes, ...]
    link: Link
    ends: Ends
    elements: tuple[int, ...]
    facts: ModelFacts
    described: Mapping[bool, SplitFacts]
    ranks: RankProfile

    def step(self, plan: Plan, tokens: int) -> float:
        """Seconds of a step whose micro-batches are one sequence each."""
        return seconds_among_others(compile_plan(plan, self.shape(plan)), self.costs(plan, tokens))

    def memory(self, plan: Plan, tokens: int) -> list[int]:
        """Bytes that a step takes at its peak, by rank."""
        return [sum(held.values()) for held in self.timeline(plan, tokens).memory]

    def timeline(self, plan: Plan, tokens: int) -> Timeline:
        return simulate(compile_plan(plan, self.shape(plan)), self.costs(plan, tokens))

    def shape(self, plan: Plan) -> ModelShape:
        """Pipelines run uncompiled."""
        return self.described[bool(plan.slices)].eager

    def stage_table(self, plan: Plan, tokens: int, grain: int) -> Times:
        """Of every slice, what the slowest stage takes."""
        tables = [self.blocks[block].times.table(tokens, grain) for block in range(len(self.blocks))]
        stages = [sum((tables[block] for block in plan.stage_blocks(s)), np.array(0.0)) for s in range(plan.num_stages)]
        return np.max(np.stack(stages), axis=0)

    def message_table(self, tokens: int, grain: int) -> Times:
        """Of every slice, what sending it on takes, and its gradients back."""
        lengths = grain * np.arange(tokens // grain + 1)[:, None] * np.ones(tokens // grain)
        token_bytes = sum(tensor.bytes({"batch": 1, "tokens": 1}) for tensor in self.facts.blocks[0].crossing)
        return 2 * (self.link.latency_s + lengths * token_bytes / self.link.bytes_per_s)

    def costs(self, plan: Plan, tokens: int) -> Costs:
        whole, speed = [block.seconds(tokens, 0) for block in self.blocks], self.ranks.crowded(plan.world)
        dims = {"batch": 1, "tokens": tokens}
        assumed = costs_of_facts(self.described[bool(plan.slices)], self.shape(plan), dims, Device())

        def slice_cost(block: int, micro_batch: int, slice: int) -> float:
            begin, end = plan.slice_bounds(micro_batch, tokens)[slice : slice + 2]
            return self.blocks[block].seconds(end - begin, begin) / whole[block]

        return replace(
            assumed,
            forward=tuple(speed * seconds * block.forward for seconds, block in zip(whole, self.blocks)),
            backward=tuple(speed * seconds * (1 - block.forward) for seconds, block in zip(whole, self.blocks)),
            weight=(0.0,) * len(self.blocks),
            buckets=tuple(
                BucketCosts(gradient_bytes=_GRADIENT_BYTES * count, step_seconds=speed * self.ends.update * count)
                for count in self.elements
            ),
            message_link=self.link, group_link=Link(latency_s=self.ends.norm / max(1, 2 * (plan.world - 1))),
            issue_seconds=speed * self.ends.issue, slice_cost=slice_cost, transfers=self.ranks.transfers,
            contention=Contention((0,) * plan.world, (), self.ranks.beside),
        )  # fmt: skip


def ends_of(steps: Sequence[Timeline], plan: Plan, shape: ModelShape, elements: Sequence[int]) -> Ends:
    """From recorded steps: the shortest norm of all ranks waited for nobody."""
    held = sum(elements[bucket] for pp_index in range(plan.pp) for bucket in buckets_of(plan, shape, pp_index))
    seconds = [{op: [e.seconds for e in step.events if e.instruction.op is op] for op in Op} for step in steps]
    issues = [[s for op in SENDS | RECEIVES for s in found[op]] or [0.0] for found in seconds]
    return Ends(
        statistics.median(min(found[Op.NORM]) for found in seconds),
        statistics.median(sum(found[Op.STEP]) for found in seconds) / held,
        statistics.median(statistics.fmean(found) for found in issues),
    )


def planned(known: Known, plan: Plan, tokens: int, uniform: Mapping[str, Plan]) -> Plan:
    """The best plan of all candidates by simulation; unequal slices, which need segments of several lengths, only where
    they are clearly better. plan: without slices, itself a candidate."""
    grain = tokens // GRANULARITIES
    times, messages = known.stage_table(plan, tokens, grain), known.message_table(tokens, grain)
    slicings = {
        plan_batch({1: table}, plan.mb, plan.num_stages, grain).parts[0].lengths
        for table in (times, times + messages, times + messages / 2)
    }
    texts = [f"{plan.full_text},slices={write_slicings((lengths,))}" for lengths in slicings if len(lengths) > 1]
    equal = {candidate: known.step(candidate, tokens) for candidate in (plan, *uniform.values())}
    unequal = {candidate: known.step(candidate, tokens) for candidate in map(Plan.parse, texts)}
    better = {candidate: step for candidate, step in unequal.items() if step < (1 - CLEARLY) * min(equal.values())}
    found = better or equal
    return min(found, key=lambda candidate: found[candidate])

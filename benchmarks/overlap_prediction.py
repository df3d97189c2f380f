"""What the simulator predicts of each mode of `overlap.py`, from what the same run measured apart from its steps.

Segments take what facts say, scaled so that the program with nothing to send takes the mode's `compute`; the link is as
fast as makes its collectives, one after the other, take its `communication`. Two figures are taken from other modes of
the case: the forward's part of the computation, from `compute` with and without recomputation, and what ranks lose
where both wait for a sum at once, from the steps of blocking modes. A mode's own steps never enter its prediction.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from compare_setting import Setting
from overlap_cases import BASE, UNSPLIT

from phalanx.engine.describe import describe
from phalanx.model.captured import Captured
from phalanx.plan.plan import Plan
from phalanx.predict.costs import BucketCosts, Costs, Link
from phalanx.predict.from_facts import Device, costs_of_facts
from phalanx.predict.shares import Shares
from phalanx.predict.simulate import seconds_among_others
from phalanx.predict.split_facts import Split, SplitFacts
from phalanx.predict.update import Update
from phalanx.program.compile import CompiledPlan, compile_plan
from phalanx.program.instructions import REDISTRIBUTIONS

PLAIN = "none"
BLOCKING = (BASE, UNSPLIT, PLAIN)  # modes that wait for a sum as soon as it is issued, except beside weight gradients
# Only the ratio of the two matters, all is scaled: how long the update, which moves memory, takes beside arithmetic.
DEVICES = {
    "cpu": Device(flops_per_s=5e10, memory_bytes_per_s=1e10),
    "cuda": Device(flops_per_s=5e14, memory_bytes_per_s=4e12),
}


@dataclass(frozen=True)
class Program:
    """A mode's program, with costs that give what was measured apart from its steps."""

    compiled: CompiledPlan
    costs: Costs

    def seconds(self, lost: float = 0.0) -> float:
        """Of a step; lost: where both ranks wait for a sum at once."""
        return seconds_among_others(self.compiled, replace(self.costs, meeting_seconds={2: lost}))

    def lost(self, step: float) -> float:
        """At each such place, if a step takes so long. Of a blocking mode: nothing is hidden behind what is lost, so
        that the step grows with it in proportion."""
        least = self.seconds()
        return (step - least) / (self.seconds(1.0) - least)


@dataclass(frozen=True)
class Case:
    """What ran, and the figures of its modes."""

    setting: Setting
    captured: Captured
    plans: Mapping[str, Plan]
    device: str
    modes: Mapping[str, Mapping[str, Any]]

    def median(self, mode: str, kind: str) -> float:
        return self.modes[mode][kind]["median"]

    @cached_property
    def forward_share(self) -> float:
        """Of the computation of a step: a mode that computes everything again takes a forward more."""
        plain, again = (self.median(mode, "compute") for mode in (PLAIN, UNSPLIT))
        return (again - plain) / plain

    @cached_property
    def facts(self) -> SplitFacts:
        return describe(self.captured, self.plans[PLAIN], self.setting.dtype, "cpu")

    def costs(self, plan: Plan) -> Costs:
        """As assumed: what counts is how parts compare."""
        assert self.facts.split == Split.of(plan), "modes split tensors alike"
        samples = -(-self.setting.size.samples // plan.mb)
        dims = self.captured.dims({name: tensor[:samples] for name, tensor in self.setting.batch().items()})
        device = DEVICES[self.device]
        update = Update(master_weights=self.setting.masters)
        costs = costs_of_facts(self.facts, self.facts.eager, dims, device, plan.sum_bytes, update)
        return divided(_with_sgd(costs, device), self.forward_share)

    def program(self, mode: str) -> Program:
        compiled = compile_plan(self.plans[mode], self.facts.eager)
        computing = _computing(compiled, self.costs(self.plans[mode]), self.median(mode, "compute"))
        calls = len(collectives(compiled, computing))
        if calls != self.modes[mode]["collectives"]:
            raise SystemExit(f"{mode}: the program has {calls} collectives, not those that were measured")
        return Program(compiled, _linked(compiled, computing, self.median(mode, "communication")))


def predictions(case: Case) -> dict[str, dict[str, float]]:
    """By mode: seconds of a step, what is lost at each wait of both ranks, and the seconds if nothing were."""
    programs = {mode: case.program(mode) for mode in case.modes}
    lost = {mode: programs[mode].lost(case.median(mode, "step")) for mode in BLOCKING}
    found: dict[str, dict[str, float]] = {}
    for mode, own in programs.items():
        of_others = max(0.0, statistics.fmean(lost[other] for other in BLOCKING if other != mode))
        found[mode] = {"seconds": own.seconds(of_others), "lost": of_others, "without": own.seconds()}
    return found


def divided(costs: Costs, forward: float) -> Costs:
    """The same computation with such a part of it in the forward; the gradients of inputs and of weights are alike."""
    whole = [sum(parts) for parts in zip(costs.forward, costs.backward, costs.weight, strict=True)]
    gradients = tuple(seconds * (1 - forward) / 2 for seconds in whole)
    return replace(costs, forward=tuple(seconds * forward for seconds in whole), backward=gradients, weight=gradients)


def _with_sgd(costs: Costs, device: Device) -> Costs:
    """The optimizer of `overlap.py`: it reads gradients and weights and writes these."""

    def updated(own: BucketCosts) -> BucketCosts:
        return replace(own, step_seconds=(2 * own.weight_bytes + own.gradient_bytes) / device.memory_bytes_per_s)

    return replace(costs, buckets=tuple(map(updated, costs.buckets)))


def _computing(compiled: CompiledPlan, costs: Costs, seconds: float) -> Costs:
    """Scaled so that a step with nothing to send takes so long."""
    factor = seconds / seconds_among_others(compiled, replace(costs, group_link=Link()))

    def scaled(parts: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factor * part for part in parts)

    return replace(
        costs, forward=scaled(costs.forward), backward=scaled(costs.backward), weight=scaled(costs.weight),
        buckets=tuple(replace(own, step_seconds=factor * own.step_seconds) for own in costs.buckets),
    )  # fmt: skip


def _linked(compiled: CompiledPlan, costs: Costs, seconds: float) -> Costs:
    """With a link on which the collectives, one after the other, take so long."""
    slow = replace(costs, group_link=Link(bytes_per_s=1.0))
    return replace(costs, group_link=Link(bytes_per_s=sum(collectives(compiled, slow)) / seconds))


def collectives(compiled: CompiledPlan, costs: Costs) -> list[float]:
    """Seconds of each redistribution of a step by itself."""
    shares = Shares(compiled.plan, compiled.shape, costs)
    calls = [row.instruction for row in compiled.tables[0].rows if row.instruction.op in REDISTRIBUTIONS]
    return [
        costs.collective(shares.collective(call), compiled.mesh.world, shares.elements(call) * costs.element_bytes)
        for call in calls
    ]

"""What is known of a plan before it runs: its programs, and a step of them, simulated on an assumed device.

A whole model needs nothing but its facts; what a plan that splits tensors, or computes parts of blocks again, makes of
it is described by its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from phalanx.errors import PlanError
from phalanx.expressions import evaluate
from phalanx.model.facts.facts import Dims, ModelFacts
from phalanx.plan.complete import Completed, complete
from phalanx.plan.plan import Plan
from phalanx.program.compile import CompiledPlan, compile_plan
from phalanx.program.costs import Costs
from phalanx.program.from_facts import Device, block_seconds, costs_of_facts, shape_of_facts
from phalanx.program.shape import ModelShape
from phalanx.program.simulate import simulate
from phalanx.program.timeline import Timeline

_SEE_LATER_TOKENS = ("masked-lm", "image-classification")


class Description(Protocol):
    """A model as a rank has it that splits its tensors with others."""

    def at(self, dims: Mapping[str, int]) -> ModelShape: ...

    def parameters(self) -> tuple[int, ...]: ...

    def seconds(self, dims: Mapping[str, int], device: Device) -> tuple[float, ...]: ...

    def costs(self, dims: Mapping[str, int], device: Device) -> Costs: ...


@dataclass(frozen=True)
class Prediction:
    """`dims` are those of one micro-batch, the largest. Seconds and parameters are those of a rank; of several that
    split a block, the first."""

    completed: Completed
    dims: dict[str, int]
    device: Device
    block_seconds: tuple[float, ...]  # forward
    parameters: tuple[int, ...]  # per block
    compiled: CompiledPlan
    timeline: Timeline


def predict(
    facts: ModelFacts, plan: str, ranks: int | None, batch: int, dims: dict[str, int], device: Device,
    describe: Callable[[Plan], Description] | None = None,
) -> Prediction:  # fmt: skip
    """Completes the plan, compiles it and simulates a step of a batch of `dims`.

    describe: what a rank has of the model under a plan that splits tensors, or computes parts of blocks again.
    """
    # As a run balances its stages: by arithmetic.
    completed = complete(plan, world=ranks, batch_size=batch, costs=[evaluate(b.flops, dims) for b in facts.blocks])
    chosen = completed.plan
    if chosen.slices and facts.task in _SEE_LATER_TOKENS:
        message = f"plan: slices need causal attention, and in a model for {facts.task} tokens see later ones"
        raise PlanError(message, "leave slices out")
    part = dims | {"batch": -(-batch // (chosen.dp * chosen.mb))}
    if chosen.tp == 1 and not {"light", "unit"} & set(chosen.policies):
        shape, costs = shape_of_facts(facts), costs_of_facts(facts, chosen, part, device)
        seconds, parameters = block_seconds(facts, part, device), tuple(block.parameters for block in facts.blocks)
    else:
        assert describe is not None, "facts say nothing of a model that is split, nor of parts of its blocks"
        described = describe(chosen)
        shape, costs = described.at(_sliced(chosen, part)), described.costs(_sliced(chosen, part), device)
        seconds, parameters = described.seconds(_sliced(chosen, part), device), described.parameters()
    compiled = compile_plan(chosen, shape)
    return Prediction(completed, part, device, seconds, parameters, compiled, simulate(compiled, costs))


def _sliced(plan: Plan, dims: Dims) -> dict[str, int]:
    """The dims of a model that runs on slices tell those of the whole from those of the slice."""
    return {**dims, "whole_tokens": dims["tokens"]} if plan.slices else dict(dims)

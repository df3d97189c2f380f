"""What is known of a plan before it runs: its programs, and a step of them, simulated on an assumed device.

Everything follows from facts, without torch: those that are shipped, or such as were described from a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.errors import PlanError
from phalanx.expressions import evaluate
from phalanx.model.facts.facts import ModelFacts
from phalanx.plan.complete import Completed, complete
from phalanx.plan.plan import Plan
from phalanx.predict.from_facts import Device, costs_of_facts, shipped
from phalanx.predict.simulate import seconds_among_others, simulate
from phalanx.predict.split_facts import SplitFacts
from phalanx.predict.timeline import Timeline
from phalanx.predict.update import ADAMW, Update
from phalanx.program.compile import CompiledPlan, compile_plan

_SEE_LATER_TOKENS = ("masked-lm", "image-classification")


@dataclass(frozen=True)
class Prediction:
    """`dims` are those of one micro-batch, the largest. Seconds and parameters are those of a rank; of several that
    split a block, the first. timeline: of a step by itself; step_seconds: of one among others."""

    completed: Completed
    dims: dict[str, int]
    device: Device
    block_seconds: tuple[float, ...]  # forward
    parameters: tuple[int, ...]  # per block
    compiled: CompiledPlan
    timeline: Timeline
    step_seconds: float
    is_fused: bool  # memory is that of segments which are compiled


def predict(
    facts: ModelFacts, plan: str, ranks: int | None, batch: int, dims: dict[str, int], device: Device,
    describe: Callable[[Plan], SplitFacts] | None = None, compiled: bool = True, update: Update = ADAMW,
) -> Prediction:  # fmt: skip
    """Completes the plan, compiles it and simulates a step of a batch of `dims`.

    describe: from the graph, what is not shipped about the model under a plan. compiled: segments are compiled, as on
    GPUs, and so keep less. update: as the options of a run.
    """
    # As a run balances its stages: by arithmetic.
    completed = complete(plan, world=ranks, batch_size=batch, costs=[evaluate(b.flops, dims) for b in facts.blocks])
    chosen = completed.plan
    if chosen.slices and facts.task in _SEE_LATER_TOKENS:
        message = f"plan: slices need causal attention, and in a model for {facts.task} tokens see later ones"
        raise PlanError(message, "leave slices out")
    part = dims | {"batch": -(-batch // (chosen.dp * chosen.mb))}
    described = shipped(facts, chosen) or (describe(chosen) if describe is not None else None)
    if described is None:
        raise PlanError(
            f"plan: no facts of {facts.name} are shipped that say what {chosen.shown} makes of it",
            "describe it from its graph (phalanx.engine.describe), as `phalanx program` does",
        )
    shape = described.shape(compiled)
    costs = costs_of_facts(described, shape, part, device, chosen.sum_bytes, update)
    program = compile_plan(chosen, shape)
    is_fused = compiled and described.compiled is not described.eager
    return Prediction(
        completed, part, device, costs.forward, described.parameters, program, simulate(program, costs),
        seconds_among_others(program, costs), is_fused,
    )  # fmt: skip

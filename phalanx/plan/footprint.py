"""Bytes that a rank needs for a plan, by what holds them: weights, gradients, optimizer state, activations, and what is
at work. Arithmetic on a model's work; `program/memory.py` follows every value of a program and is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from phalanx.plan.cost import num_held
from phalanx.plan.plan import Plan
from phalanx.plan.work import BlockWork, Kept, ModelWork

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "working")


def place_blocks(plan: Plan, place: int) -> list[int]:
    """The blocks that a place in the pipeline holds."""
    return [block for stage in plan.stages_of(place) for block in plan.stage_blocks(stage)]


def parameters_of(model: ModelWork, blocks: Sequence[int]) -> float:
    """Elements, tied ones once where several of their blocks are here."""
    own = [model.block(block) for block in blocks]
    tied = [work.tied for work in own if work.tied]
    holds_other = 0 in blocks  # what a head shares is the embedding's
    return sum(work.parameters for work in own) - (sum(tied) if holds_other else 0.0)


def kept_bytes(kept: Kept, plan: Plan) -> float:
    """Of one sample on one rank."""
    if plan.tp == 1:
        return kept.alone
    if not plan.sequence:
        return kept.split / plan.tp + kept.entries + kept.rest
    entries = kept.entries / (plan.tp if plan.saves == "input" else 1)
    return kept.split / plan.tp + entries + kept.rest / plan.tp


def state_bytes(
    model: ModelWork, plan: Plan, parameters: float, largest: float, gradient: float = 4.0
) -> dict[str, float]:
    """What is there during the whole step, of so many parameters; largest: those of the largest block. gradient: bytes
    of a parameter's sum."""
    width, own, largest = model.width, parameters / plan.tp, largest / plan.tp
    state = model.trained * model.state_width
    gradient = model.trained * plan.sum_bytes(max(gradient, width))
    weights, gradients = width * own, gradient * own
    if plan.zero == 3:
        gathered = weights if plan.gathers == "step" else min(weights, 2 * width * largest)
        weights = weights / plan.shards + gathered
    if plan.zero >= 2 and plan.reduces == "micro-batch":
        gradients = gradients / plan.shards + min(gradients, 2 * gradient * largest)
    return {"weights": weights, "gradients": gradients, "optimizer": state * own / (plan.shards if plan.zero else 1)}


def again_bytes(work: BlockWork, rung: str, plan: Plan) -> float:
    """What a sample needs more while its block is computed again."""
    if rung in ("none", "light"):
        return 0.0
    whole = kept_bytes(work.kept["none"], plan) - kept_bytes(work.kept[rung], plan)
    return 0.75 * whole if rung == "unit" else whole  # of two units the larger


def working_bytes(work: BlockWork, rung: str, plan: Plan, samples: int) -> float:
    """While a block is at work, beside all that is kept: also the gradients of what enters and leaves it."""
    own = (work.working / plan.tp + again_bytes(work, rung, plan) + 2 * work.crossing) * samples
    return own + work.fixed / plan.tp


def memory(
    model: ModelWork, plan: Plan, place: int, samples: int, rungs: Sequence[str], gradient: float = 4.0
) -> dict[str, float]:
    """At the moment at which a rank holds most. rungs: of every block of the model.

    While a block is at work, what later blocks of its place kept for the same micro-batch is gone already: an
    embedding needs most when little else is there."""
    blocks = place_blocks(plan, place)
    kept = [kept_bytes(model.block(block).kept[rungs[block]], plan) * samples for block in blocks]
    others = (num_held(plan, place) - 1) * sum(kept)
    moments = [
        (others + so_far, working_bytes(model.block(block), rungs[block], plan, samples))
        for block, so_far in zip(blocks, accumulate(kept), strict=True)
    ]
    held, working = max(moments, key=sum)
    largest = max(model.block(block).parameters for block in blocks)
    state = state_bytes(model, plan, parameters_of(model, blocks), largest, gradient)
    return {**state, "activations": held, "working": working}

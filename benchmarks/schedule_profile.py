"""From measured timelines to what the simulator must know: how long each block, the update and the norm take.

A profile is taken from two schedules only, one that computes gradients of inputs and weights together and one that
does not; what it predicts for the others was not looked at. Torch-free.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.plan.plan import Plan
from phalanx.predict.costs import BucketCosts, Costs, Link
from phalanx.predict.timeline import Timeline
from phalanx.program.holders import buckets_of
from phalanx.program.instructions import RECEIVES, SENDS, Op
from phalanx.program.shape import ModelShape

FUSED, SPLIT = "1f1b", "zb-h1"


@dataclass(frozen=True)
class Profile:
    """Seconds of F, B, W and BW per block; of the norm, once all ranks are there; of the update, per element; and of
    starting a message."""

    blocks: Mapping[Op, tuple[float, ...]]
    norm: float
    update: float
    issue: float


def profile(steps: Mapping[str, Sequence[Timeline]], plan: Plan, shape: ModelShape, elements: Sequence[int]) -> Profile:
    """steps: of the two schedules named above, recorded. elements: of each bucket. plan: the one of FUSED."""
    found = {op: _blocks(steps[SPLIT if op in (Op.B, Op.W) else FUSED], op, shape) for op in (Op.F, Op.B, Op.W, Op.BW)}
    norm = statistics.median(min(_seconds(step, Op.NORM)) for step in steps[FUSED])
    update = statistics.median(_per_element(step, plan, shape, elements) for step in steps[FUSED])
    issue = statistics.median(statistics.fmean(_issues(step)) for step in steps[FUSED])
    return Profile(found, norm, update, issue)


def costs(known: Profile, plan: Plan, elements: Sequence[int], dims: Mapping[str, int], link: Link) -> Costs:
    """dims: of a micro-batch."""
    together = plan.schedule not in ("zb-h1", "zb-v")
    return Costs(
        forward=known.blocks[Op.F],
        backward=known.blocks[Op.BW if together else Op.B],
        weight=(0.0,) * len(known.blocks[Op.F]) if together else known.blocks[Op.W],
        buckets=tuple(BucketCosts(step_seconds=known.update * count) for count in elements),
        message_link=link,
        group_link=Link(latency_s=known.norm / (2 * (plan.world - 1))),  # a ring of this many steps
        issue_seconds=known.issue,
        dims=dims,
    )


def _blocks(steps: Sequence[Timeline], op: Op, shape: ModelShape) -> tuple[float, ...]:
    """Per block the mean over micro-batches, of which the median over steps."""
    found: list[list[float]] = [[] for _ in range(shape.num_blocks)]
    for step in steps:
        seconds: list[list[float]] = [[] for _ in range(shape.num_blocks)]
        for event in step.events:
            if event.instruction.op is op:
                assert event.instruction.block is not None
                seconds[event.instruction.block].append(event.seconds)
        for block, values in enumerate(seconds):
            found[block].append(statistics.fmean(values))
    return tuple(statistics.median(values) for values in found)


def _seconds(step: Timeline, op: Op) -> list[float]:
    return [event.seconds for event in step.events if event.instruction.op is op]


def _issues(step: Timeline) -> list[float]:
    return [event.seconds for event in step.events if event.instruction.op in SENDS | RECEIVES]


def _per_element(step: Timeline, plan: Plan, shape: ModelShape, elements: Sequence[int]) -> float:
    held: Iterable[int] = (bucket for pp_index in range(plan.pp) for bucket in buckets_of(plan, shape, pp_index))
    return sum(_seconds(step, Op.STEP)) / sum(elements[bucket] for bucket in held)

"""A step of an estimated plan as a timeline: one pipeline of it, each stage as one block (of a long pipeline several
stages), and as many micro-batches as show how it fills, runs and drains. Its seconds are those of the estimate, so that
what is drawn is what was judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from phalanx.plan.plan import Plan
from phalanx.planning.cost import Machine, Seconds, Software, add, machines, times
from phalanx.planning.degrees import split_model
from phalanx.planning.estimate import Estimate, message_seconds, rungs_of
from phalanx.planning.footprint import most_slices, moved_share
from phalanx.planning.slice_shares import up_to
from phalanx.planning.work import ModelWork
from phalanx.predict.costs import BucketCosts, Costs, Link, SliceCost
from phalanx.predict.simulate import simulate
from phalanx.predict.timeline import Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.shape import ModelShape

MOST_MICRO_BATCHES = 32
MOST_PLACES = 16
MOST_FORWARDS = 2048  # of stages, micro-batches and slices


def shown_plan(plan: Plan) -> Plan:
    """One pipeline of it: the first replica's first tensor-parallel rank of every place. Of a long one several places
    stand together in a row, and as many micro-batches in one, which fill and drain it as all of them do."""
    together = _together(plan)
    rows = -(-plan.pp // together)
    most = max(rows, MOST_FORWARDS // (rows * plan.v * most_slices(plan)))
    mb = min(max(1, plan.mb // together), max(2 * rows, 8), MOST_MICRO_BATCHES, most)
    count = rows * plan.v
    return Plan(pp=rows, mb=mb, schedule=plan.schedule, v=plan.v, stages=(1,) * count, slices=plan.slices[:1])


def shown_words(plan: Plan) -> str:
    """What of it is drawn."""
    together, mb = _together(plan), shown_plan(plan).mb
    if together == 1:
        return f"One pipeline, {mb} of {plan.mb} micro-batches"
    return f"One pipeline, {together} places in a row and {together} micro-batches in one, {mb * together} of {plan.mb}"


def _together(plan: Plan) -> int:
    """Places that stand in one row: so many that there are few rows, and few parts of what fills them."""
    rows = min(MOST_PLACES, math.isqrt(MOST_FORWARDS // (plan.v * most_slices(plan))))
    return -(-plan.pp // max(2, rows))


def sketch(model: ModelWork, own: Estimate, software: Software) -> Timeline:
    """Without what replicas exchange, which comes after the last backward or beneath it."""
    plan, shown, model = own.plan, shown_plan(own.plan), split_model(model, own.plan)
    places = machines(own.cluster, software, plan, -(-own.batch // (plan.dp * plan.mb)))
    stages = [_shown_stage(model, plan, places, shown, stage) for stage in range(shown.num_stages)]
    shape = ModelShape(len(stages), (), (True,) * len(stages), (True,) * len(stages))
    update = own.parts["optimizer"] / plan.v
    message = _together(plan) * message_seconds(model, plan, places)
    costs = Costs(
        tuple(seconds.forward for seconds in stages), tuple(seconds.backward + seconds.again for seconds in stages),
        tuple(seconds.weight for seconds in stages), (BucketCosts(step_seconds=update),) * shape.num_buckets,
        message_link=Link(latency_s=message), dims={"tokens": model.tokens},
        slice_cost=_slice_cost(model, shown, places[0]) if shown.slices else None,
    )  # fmt: skip
    return simulate(compile_plan(shown, shape), costs)


def _shown_stage(model: ModelWork, plan: Plan, places: Sequence[Machine], shown: Plan, stage: int) -> Seconds:
    """Of those that one of the stages that are shown stands for the longest, for each of them: the others wait."""
    first, turn = shown.pp_index(stage) * _together(plan), stage // shown.pp
    own = range(first, min(plan.pp, first + _together(plan)))
    every = [_stage(model, plan, places[place], plan.stages_of(place)[turn]) for place in own]
    return times(max(every, key=lambda seconds: seconds.total), len(every))


def _stage(model: ModelWork, plan: Plan, machine: Machine, stage: int) -> Seconds:
    blocks, rungs = plan.stage_blocks(stage), rungs_of(model, plan)
    moved = moved_share(plan, sum(model.block(block).is_layer for block in blocks))
    shares = [moved if model.block(block).is_layer else 0.0 for block in blocks]
    return add([machine.seconds(model.block(b), rungs[b], share) for b, share in zip(blocks, shares, strict=True)])


def _slice_cost(model: ModelWork, plan: Plan, machine: Machine) -> SliceCost:
    """Of a stage's seconds, the share of a slice: later ones attend to more."""
    attention, lengths = machine.attention_share(model), plan.slices[0]
    ends = [up_to(end / sum(lengths), attention) for end in accumulate(lengths, initial=0)]
    return lambda _block, _micro_batch, slice: ends[slice + 1] - ends[slice]

"""A step of an estimated plan as a timeline: one pipeline of it, each stage as one block, and as many micro-batches as
show how it fills, runs and drains. Its seconds are those of the estimate, so that what is drawn is what was judged."""

from __future__ import annotations

from itertools import accumulate

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Machine, Seconds, Software, add, machines
from phalanx.planning.degrees import split_model
from phalanx.planning.estimate import Estimate, message_seconds, rungs_of
from phalanx.planning.footprint import moved_share
from phalanx.planning.slice_shares import up_to
from phalanx.planning.work import ModelWork
from phalanx.predict.costs import BucketCosts, Costs, Link, SliceCost
from phalanx.predict.simulate import simulate
from phalanx.predict.timeline import Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.shape import ModelShape

MOST_MICRO_BATCHES = 32


def shown_plan(plan: Plan) -> Plan:
    """One pipeline of it: the first replica's first tensor-parallel rank of every stage."""
    count = plan.num_stages
    mb = min(plan.mb, max(2 * plan.pp, 8), max(plan.pp, MOST_MICRO_BATCHES))
    return Plan(pp=plan.pp, mb=mb, schedule=plan.schedule, v=plan.v, stages=(1,) * count, slices=plan.slices[:1])


def sketch(model: ModelWork, own: Estimate, cluster: Cluster, software: Software) -> Timeline:
    """Without what replicas exchange, which comes after the last backward or beneath it."""
    plan, shown, model = own.plan, shown_plan(own.plan), split_model(model, own.plan)
    places = machines(cluster, software, plan, -(-own.batch // (plan.dp * plan.mb)))
    stages = [_stage(model, plan, places[stage % plan.pp], stage) for stage in range(plan.num_stages)]
    if plan.schedule == "zb-v":  # whose second stages come back over the same ranks
        folded = [*range(plan.pp), *reversed(range(plan.pp))]
        stages = [_stage(model, plan, places[place], stage) for stage, place in enumerate(folded)]
    shape = ModelShape(len(stages), (), (True,) * len(stages), (True,) * len(stages))
    update = own.parts["optimizer"] / plan.v
    costs = Costs(
        tuple(seconds.forward for seconds in stages), tuple(seconds.backward + seconds.again for seconds in stages),
        tuple(seconds.weight for seconds in stages), (BucketCosts(step_seconds=update),) * shape.num_buckets,
        message_link=Link(latency_s=message_seconds(model, plan, places)), dims={"tokens": model.tokens},
        slice_cost=_slice_cost(model, shown, places[0]) if shown.slices else None,
    )  # fmt: skip
    return simulate(compile_plan(shown, shape), costs)


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

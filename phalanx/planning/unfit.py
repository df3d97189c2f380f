"""Why there is no plan: what the leanest one lacks, and what would mend it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from phalanx.errors import PlanError
from phalanx.plan import fields
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS, divisors, listed
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.cost import machines
from phalanx.planning.devices import GIB
from phalanx.planning.estimate import Estimate, estimate
from phalanx.planning.partition import evenly
from phalanx.planning.problem import Problem
from phalanx.planning.space import MOST_STAGES, SHARDING, Change, keeps, meshes, offloads
from phalanx.planning.work import ModelWork


def no_candidates(model: ModelWork, cluster: Cluster, batch: int, fixed: Mapping[str, Any]) -> PlanError:
    given = _words(fixed)
    if given:
        message = f"plan: no plan with {given} divides {cluster.world} devices and a batch of {batch} samples"
        hint = (
            f"leave some of them open, or give numbers whose product divides the devices; pp × v ≤ {len(model.blocks)}"
        )
        parts = fixed.get("dp", 1) * fixed.get("mb", 1)
        if batch % parts:
            hint += f"; a batch of {-(-batch // parts) * parts} samples can be cut so"
        return PlanError(message, hint)
    message = f"plan: a batch of {batch} samples is too small for {cluster.world} devices: every replica needs a sample"
    return PlanError(message, f"use a batch of {fewest_replicas(model, cluster)} samples or more, or fewer devices")


def fewest_replicas(model: ModelWork, cluster: Cluster) -> int:
    """Of all plans for these devices: as many go into a pipeline and share its tensors as can."""
    return min(
        cluster.world // pp // tp
        for pp in divisors(cluster.world)
        if pp <= min(len(model.blocks), MOST_STAGES)
        for tp in divisors(cluster.world // pp)
        if tp <= min(2 * cluster.per_node, model.heads or tp)
    )


def _words(fixed: Mapping[str, Any]) -> str:
    return ", ".join(fields.write({name: value}) for name, value in fixed.items())


def nothing_fits(problem: Problem, fixed: Mapping[str, Any]) -> PlanError:
    """What the leanest plan lacks, and what would mend it. Where plans would fit if their hosts had more memory, that
    is what is missing; else the leanest one that the hosts have room for tells."""
    model, cluster = problem.model, problem.cluster
    every = list(leanest_plans(problem, fixed))
    leanest = min((own for own in every if own.lacks_on_host <= 0), key=lambda own: own.lacks)
    more_hosted = min((own for own in every if own.lacks <= 0), key=lambda own: own.lacks_on_host, default=None)
    place = leanest.fullest
    held = leanest.memory[place]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in held.items() if size > 0.01 * sum(held.values()))
    nodes = next((n for n in (2, 4, 8, 16, 32, 64) if _fits_on(problem, cluster.scaled(n), fixed)), None)
    hints = [f"{nodes} times the nodes"] if nodes else []
    needed = sum(held.values()) / (1 - problem.software.slack) + problem.software.reserved
    hints.append(f"devices with {math.ceil(needed / GIB)} GiB or more")
    if leanest.lacks < held["activations"] + held["working"]:
        hints.append("shorter samples")
    given = f" with {_words(fixed)}" if fixed else ""
    message = (
        f"plan: {model.name} does not fit on {cluster}{given}: the leanest plan ({leanest.plan.shown}) lacks "
        f"{leanest.lacks / GIB:.1f} GiB on each device of place {place} of the pipeline, which would hold {parts} GiB "
        f"of {leanest.budget[place] / GIB:.1f}"
    )
    if more_hosted is not None:
        message += f"; {_host_words(problem, more_hosted)}"
        size, kind = more_hosted.on_host[more_hosted.fullest_host], _kind_at(problem, more_hosted)
        hints.insert(0, f"nodes with {math.ceil(size * kind.devices / GIB)} GiB of main memory or more")
    return PlanError(message, f"use {listed(hints)}")


def _host_words(problem: Problem, own: Estimate) -> str:
    """What the hosts lack for a plan that the devices have room for."""
    kind, place = _kind_at(problem, own), own.fullest_host
    known = "" if kind.host else ", which is assumed where a cluster does not say `host 2TB`"
    return (
        f"main memory is missing, too: with {own.plan.shown} the devices would have room, and each needs "
        f"{own.on_host[place] / GIB:.1f} GiB of its host, of {own.host_budget[place] / GIB:.1f}{known}"
    )


def _kind_at(problem: Problem, own: Estimate) -> Nodes:
    """The nodes of the place whose host has the least room."""
    places = machines(problem.cluster, problem.software, own.plan, problem.samples(own.plan))
    return places[own.fullest_host].nodes


def leanest_plans(problem: Problem, fixed: Mapping[str, Any]) -> Iterator[Estimate]:
    """Of every mesh the plan that needs least: all state sharded, all layers computed again, smallest micro-batches;
    and the same with all that may lie on the host there."""
    smallest: dict[tuple[int, int], Plan] = {}
    for base in meshes(problem, fixed):
        key = base.plan.pp, base.plan.tp
        if key not in smallest or (base.plan.mb, not base.plan.pairs) > (smallest[key].mb, not smallest[key].pairs):
            smallest[key] = base.plan
    for plan in smallest.values():
        sharded = {"zero": 3} if plan.dp > 1 else {}
        counts = evenly([1.0] * len(problem.model.blocks), plan.pp)
        again = () if OVERLAPS[plan.overlap].recompute else ("block",)
        try:
            lean = replace(plan, **{**sharded, **_sharding(fixed)}, stages=counts, recompute=again)
        except PlanError:
            continue  # what is given does not go with this mesh
        every = [] if "offload" in fixed else _all_hosted(problem, lean)
        hosted = [change for change in every if keeps(change, fixed)]
        for own in (lean, *(replace(lean, **change) for change in hosted)):
            yield estimate(problem.model, own, problem.cluster, problem.software, problem.batch)


def _all_hosted(problem: Problem, plan: Plan) -> Iterator[Change]:
    """What may lie on the host beside a plan, of each word all."""
    for change, _ in offloads(problem, plan):
        if all(amount in (0, 1) for _, amount in change["offload"]):
            is_split = change.get("v", plan.v) != plan.v
            stages = {"stages": evenly([1.0] * len(problem.model.blocks), plan.pp * change["v"])} if is_split else {}
            yield {**change, **stages}


def _sharding(fixed: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fixed[name] for name in (*SHARDING, "offload") if name in fixed}


def _fits_on(problem: Problem, cluster: Cluster, fixed: Mapping[str, Any]) -> bool:
    larger = Problem(problem.model, cluster, problem.software, problem.batch)
    open_fields = {name: value for name, value in fixed.items() if name not in ("pp", "dp", "tp")}
    return any(own.fits for own in leanest_plans(larger, open_fields))

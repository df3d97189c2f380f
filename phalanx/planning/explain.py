"""Why a plan is as good as it is, in sentences: what limits it, why others lost, what would help, and what these links
say about pipelines and tensor parallelism. Everything follows from estimates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx.errors import PlanError
from phalanx.plan.plan import AXES, Plan
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.cost import Machine, Software
from phalanx.planning.estimate import Estimate
from phalanx.planning.search import search
from phalanx.planning.work import ModelWork

_WORDS = {
    "computation": "computation itself", "computed again": "computing activations again",
    "tensor communication": "sums over tensor-parallel ranks", "messages": "messages between stages",
    "gradients": "exchanging gradients and weights",
    "host copies": "waiting for copies to the host", "optimizer": "the optimizer", "bubble": "an idle pipeline",
    "other": "overheads",
}  # fmt: skip


def why_lost(best: Estimate, other: Estimate) -> str:
    """One line: what of a step takes longer than in the best plan."""
    more = {part: other.parts[part] - best.parts[part] for part in best.parts}
    worst = sorted(more, key=lambda part: more[part], reverse=True)[:2]
    slower = other.step_seconds / best.step_seconds - 1
    shown = [f"{_WORDS[part]} +{more[part] / best.step_seconds:.1%}" for part in worst if more[part] > 0]
    return f"{slower:.1%} slower: {', '.join(shown) or 'nothing stands out'}"


def what_limits(best: Estimate) -> str:
    """What takes most of a step beside the model's own arithmetic, and how full memory is."""
    beside = {part: seconds for part, seconds in best.parts.items() if part != "computation"}
    part = max(beside, key=lambda part: beside[part])
    full = best.peak_bytes / best.budget[best.fullest]
    computed = f"{best.parts['computation'] / best.step_seconds:.0%} of a step is computation"
    if beside[part] < 0.02 * best.step_seconds:
        return f"{computed}, at the rate that products and memory reach on this device; nothing else takes 2 %"
    cause = ", because memory is full" if part == "computed again" and full > 0.9 else ""
    return f"{computed}; {_WORDS[part]} takes {beside[part] / best.step_seconds:.1%}{cause}"


LOOKED_FOR_HELP = 3  # plans that are worked out for each change of a cluster
_GRAIN = 64  # tokens that kernels compute together


class Help(NamedTuple):
    """A change of the cluster, and how many times faster a step of the same batch then is."""

    what: str
    speedup: float


def what_helps(
    model: ModelWork, cluster: Cluster, software: Software, best: Estimate, fixed: Mapping[str, Any] | None = None
) -> list[Help]:
    """The most helpful first, each at least so much: the schedule stays. fixed: fields of a plan that are given; with
    more devices the mesh is open."""
    kinds = cluster.nodes
    changes = {"a second node" if cluster.num_nodes == 1 else "twice the nodes": cluster.scaled(2)}
    changes["twice the memory"] = Cluster(tuple(replace(kind, memory=2 * kind.memory) for kind in kinds))
    if cluster.num_nodes > 1:
        changes["twice the network"] = Cluster(tuple(replace(kind, network=2 * kind.network) for kind in kinds))
    if cluster.per_node > 1:
        changes["links twice as fast"] = Cluster(tuple(replace(kind, link=2 * kind.link) for kind in kinds))
    found: list[Help] = []
    kept = {"schedule": best.plan.schedule, "v": best.plan.v} | dict(fixed or {})
    for what, changed in changes.items():
        try:
            given = {name: v for name, v in kept.items() if changed.world == cluster.world or name not in AXES}
            other = search(model, changed, software, best.batch, given, keep=1, most=LOOKED_FOR_HELP).plans[0]
        except PlanError:
            continue  # a batch that has no sample for so many
        found.append(Help(what, best.step_seconds / other.step_seconds))
    return sorted(found, key=lambda help: help.speedup, reverse=True)


def slice_tokens(kind: Nodes, software: Software) -> int:
    """Tokens of a slice of one sample with which products reach two thirds of their rate: few rows lose time by
    themselves (`small`), and by reading weights that they hardly use. Nothing of a model or a plan is in it: both
    losses are per weight."""
    while_reading = kind.device.flops.value * software.products / (kind.device.bandwidth.value * software.memory)
    return _GRAIN * math.ceil(2 * (software.small + while_reading) / _GRAIN)


def slice_sentence(cluster: Cluster, software: Software) -> str:
    kind = min(cluster.nodes, key=lambda kind: kind.device.flops.value)
    tokens = slice_tokens(kind, software)
    return (
        f"{kind.device.name} wants slices of {tokens} tokens or more, whatever the model: with fewer in one sample, "
        "products lose over a third of their rate"
    )


def pipeline_or_tensor(model: ModelWork, cluster: Cluster, software: Software, best: Estimate) -> str:
    """For the links of this cluster: what splitting a layer costs beside what splitting the model into stages does."""
    kind = min(cluster.nodes, key=lambda kind: (kind.network, kind.link))
    ways = min(kind.devices if kind.devices > 1 else cluster.num_nodes, len(model.layers))
    if cluster.world == 1 or ways < 2:
        return "one device: neither a pipeline nor tensor parallelism has anything to split over"
    layer = max((work for work in model.classes if work.is_layer), key=lambda work: work.products, default=None)
    if layer is None:
        return "the model has no layers that tensor parallelism would split"
    samples = -(-best.batch // (best.plan.dp * best.plan.mb))
    seconds = Machine(kind, software, Plan(tp=ways), samples).seconds(layer, "none")
    waits = seconds.exposed / seconds.total
    micro_batches = max(1, best.batch * ways // (cluster.world * samples))
    idle = (ways - 1) / (micro_batches + ways - 1)
    where = f"over the {ways} devices of a node" if kind.devices > 1 else f"over {ways} nodes"
    better = "a pipeline" if idle < waits else "tensor parallelism"
    return (
        f"{where}, tensor parallelism waits {waits:.0%} of its time for sums, and a pipeline with {micro_batches} "
        f"micro-batches idles {idle:.0%}: on these links and for this batch {better} costs less"
    )

"""Why a plan is as good as it is, in sentences: what limits it, why others lost, what would help, and what these links
say about pipelines and tensor parallelism. Everything follows from estimates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from phalanx.plan.plan import AXES, Plan
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.cost import Machine, Software
from phalanx.planning.devices import GIB
from phalanx.planning.estimate import Estimate
from phalanx.planning.parts import left_out
from phalanx.planning.problem import Problem
from phalanx.planning.search import Found, better
from phalanx.planning.work import ModelWork

_WORDS = {
    "computation": "computation itself", "computed again": "computing activations again",
    "tensor communication": "sums over tensor-parallel ranks", "messages": "messages between stages",
    "gradients": "exchanging gradients and weights",
    "host copies": "waiting for copies to the host", "optimizer": "the optimizer", "bubble": "an idle pipeline",
    "other": "overheads",
}  # fmt: skip


def why_lost(best: Estimate, other: Estimate, objective: str = "time") -> str:
    """One line: what it lacks where it does not fit, else what of a step takes longer than in the best plan."""
    slower = _more(other.step_seconds / best.step_seconds, "slower", "faster")
    if not other.fits:
        return f"does not fit: {_lacks(other)}; {slower} if it did"
    if objective == "cost":
        return f"{_more(other.dollars / best.dollars, 'dearer', 'cheaper')}: {slower} on {_devices(other.cluster)}"
    is_slower = other.step_seconds >= best.step_seconds
    more = {part: other.parts[part] - best.parts[part] for part in best.parts}
    worst = sorted(more, key=lambda part: more[part], reverse=is_slower)[:2]
    shown = [f"{_WORDS[part]} {more[part] / best.step_seconds:+.1%}" for part in worst if (more[part] > 0) == is_slower]
    return f"{slower}: {', '.join(shown) or 'nothing stands out'}"


def _more(ratio: float, more: str, less: str) -> str:
    return f"{ratio - 1:.1%} {more}" if ratio >= 1 else f"{1 - ratio:.1%} {less}"


def _devices(cluster: Cluster) -> str:
    return f"{cluster.world} device{'s' * (cluster.world > 1)}"


def _lacks(own: Estimate) -> str:
    """What of memory, of a plan that does not fit."""
    device = f"{own.lacks / GIB:.1f} GiB too much at place {own.fullest} of the pipeline"
    host = f"{own.lacks_on_host / GIB:.1f} GiB of main memory are missing at place {own.fullest_host}"
    return " and ".join([device] * (own.lacks > 0) + [host] * (own.lacks_on_host > 0))


def what_is_left_out(cluster: Cluster, found: Found, objective: str = "time") -> str:
    """Where the best plan is for a part of the cluster: which devices have none, and what that brings; else empty."""
    best, whole = found.plans[0], found.whole
    out = left_out(cluster, best.cluster)
    if not out:
        return ""
    if whole is None:
        return f"leaves out {out}: no plan for all {_devices(cluster)} fits"
    brings = best.tokens_per_second / whole.tokens_per_second
    words = f"{brings:.2f}× as fast as the best plan for all {_devices(cluster)} ({whole.plan.shown})"
    if objective == "cost":
        words = f"{whole.dollars / best.dollars:.2f}× cheaper, and {words}"
    return f"leaves out {out}: {words}"


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
HELPS = 1.03  # times faster: less is not worth a word
_GRAIN = 64  # tokens that kernels compute together


class Help(NamedTuple):
    """A change of the cluster, and how many times faster a step of the same batch then is."""

    what: str
    speedup: float


def what_helps(
    model: ModelWork, cluster: Cluster, software: Software, found: Found, fixed: Mapping[str, Any] | None = None,
    objective: str = "time",
) -> list[Help]:  # fmt: skip
    """The most helpful first, each at least so much: of the meshes of the plans that were found, for more nodes of
    those that are twice as long along one axis, and the schedule stays. fixed: fields of a plan that are given; with
    more devices the mesh is open. Where the best plan leaves devices out, they may also be of use then, but for its
    cost."""
    best = found.plans[0]
    used = [best.cluster, cluster] if objective == "time" and cluster != best.cluster else [best.cluster]
    seconds: dict[str, float] = {}
    for own in used:
        shown = {(it.plan.pp, it.plan.dp, it.plan.tp) for it in found.plans if it.cluster == own}
        for what, changed in _changes(cluster, own, objective):
            grown = changed.world // own.world
            among = {(pp * a, dp * b, tp * c) for pp, dp, tp in shown for a, b, c in _SHARES if a * b * c == grown}
            kept = {"schedule": best.plan.schedule, "v": best.plan.v} if own == best.cluster else {}
            kept |= {name: value for name, value in (fixed or {}).items() if grown == 1 or name not in AXES}
            below = seconds.get(what, best.step_seconds / HELPS)
            problem = Problem(model, changed, software, best.batch, degrees_given="degrees" in kept)
            if (other := better(problem, kept, below, among, LOOKED_FOR_HELP)) is not None:
                seconds[what] = other.step_seconds
    helps = [Help(what, best.step_seconds / own) for what, own in seconds.items()]
    return sorted(helps, key=lambda help: help.speedup, reverse=True)


_SHARES = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))  # of pp, dp and tp


def _changes(cluster: Cluster, used: Cluster, objective: str) -> Iterator[tuple[str, Cluster]]:
    """Of all of a cluster, or a part of it that is used."""
    if objective == "time" and not _has_more(cluster, used):
        yield ("a second node" if used.num_nodes == 1 else "twice the nodes"), used.scaled(2)
    yield "twice the memory", _each(used, lambda kind: replace(kind, memory=2 * kind.memory))
    if used.num_nodes > 1:
        yield "twice the network", _each(used, lambda kind: replace(kind, network=2 * kind.network))
    if used.per_node > 1:
        yield "links twice as fast", _each(used, lambda kind: replace(kind, link=2 * kind.link))


def _has_more(cluster: Cluster, used: Cluster) -> bool:
    """Whether there are more devices like those that are used."""
    return any(own not in cluster.nodes for own in used.nodes)


def _each(cluster: Cluster, change: Callable[[Nodes], Nodes]) -> Cluster:
    return Cluster(tuple(map(change, cluster.nodes)))


def slice_tokens(kind: Nodes, software: Software) -> int:
    """Tokens of a slice of one sample with which products reach two thirds of their rate: few rows lose time by
    themselves (`small`), and by reading weights that they hardly use. Nothing of a model or a plan is in it: both
    losses are per weight."""
    while_reading = kind.device.flops.value * software.products / (kind.device.bandwidth.value * software.memory)
    return _GRAIN * math.ceil(2 * (software.small + while_reading) / _GRAIN)


def slice_sentence(cluster: Cluster, software: Software) -> str:
    wanted = {kind.device.name: slice_tokens(kind, software) for kind in cluster.nodes}
    every = [f"{name} wants slices of {tokens} tokens or more" for name, tokens in wanted.items()]
    return (
        f"{' and '.join(every)}, whatever the model: with fewer in one sample, products lose over a third of their rate"
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

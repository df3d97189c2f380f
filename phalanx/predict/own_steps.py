"""What a run's own steps say of other plans: seconds of its blocks, speed of its links and of its updates, in the place
of what was published, assumed or measured before.

What the ranks of one pipeline reported (`from_steps.py`) becomes what `planning` judges plans by, so that plans which
the run never had can be compared with the one it has. Plain data.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from phalanx.planning.cluster import Cluster
from phalanx.planning.collectives import all_reduce, consecutive
from phalanx.planning.cost import Machine, Software, machines
from phalanx.planning.devices import Figure
from phalanx.planning.estimate import estimate, loads_of, message_seconds
from phalanx.planning.fewer import Known
from phalanx.planning.work import BlockTime, ModelWork
from phalanx.predict.costs import kind_of
from phalanx.predict.from_steps import Report, costs_of
from phalanx.program.compile import CompiledPlan
from phalanx.program.instructions import COMPUTE, RECEIVES, Op

BY = "this run's own steps"
_TOLD_APART = 1.5  # times what something takes without contents, above which it says how fast bytes travel
_Links = tuple[Cluster, Software]
_Moving = Sequence[Mapping[str, float]]  # by place in the pipeline and kind of instruction


@dataclass(frozen=True)
class _Transfer:
    """seconds: that it took; expected: that it would over given links; is_near: whether it stays inside a node."""

    seconds: float
    expected: Callable[[Cluster, Software], float]
    is_near: bool

    def carried(self, links: _Links) -> float:
        """Seconds for its bytes."""
        return self.expected(*links) - self.bare(links)

    def bare(self, links: _Links) -> float:
        """Seconds of which no link is the cause."""
        cluster, software = links
        endless = tuple(replace(kind, link=math.inf, network=math.inf) for kind in cluster.nodes)
        return self.expected(Cluster(endless), software)


def by_own_steps(known: Known, programs: CompiledPlan, reports: Sequence[Report], step_seconds: float) -> Known:
    """known: what is known without them. reports: of one pipeline, first to last. step_seconds: that a step takes."""
    plan, batch = programs.plan, known.batch
    samples = -(-batch // (plan.dp * plan.mb))
    model = _timed(known.model, programs, reports, samples)
    links = known.cluster, known.software
    if plan.world > 1:
        measured = costs_of(programs, reports).measured
        assert measured is not None
        links = _with_latency(programs, measured.moving, links)
        links = _linked(model, programs, measured.moving, links, samples)
    cluster, software = _updating(model, programs, reports, links, batch)
    rest = step_seconds - estimate(model, plan, cluster, software, batch).step_seconds
    return Known(model, cluster, replace(software, step=max(0.0, software.step + rest)), batch, BY)


def _all(programs: CompiledPlan, seconds: _Moving, ops: Collection[Op]) -> list[list[float]]:
    """Of every instruction of these kinds, for each place."""
    return [
        [own[kind] for row in table.rows if row.instruction.op in ops and (kind := kind_of(row.instruction)) in own]
        for table, own in zip(programs.tables, seconds, strict=True)
    ]


def _timed(model: ModelWork, programs: CompiledPlan, reports: Sequence[Report], samples: int) -> ModelWork:
    """Classes of blocks with what they took. Planning has no times of slices, nor of units of a smaller degree."""
    plan = programs.plan
    if plan.slices or plan.degrees:
        return model
    taken: defaultdict[int, defaultdict[Op, float]] = defaultdict(lambda: defaultdict(float))
    for table, each in zip(programs.tables, reports, strict=True):
        for it in (row.instruction for row in table.rows if row.instruction.op in COMPUTE):
            assert it.block is not None
            taken[it.block][it.op] += each.own[kind_of(it)] / (plan.mb * plan.halves)
    of_class: defaultdict[int, list[BlockTime]] = defaultdict(list)
    for block, own in taken.items():
        both = own[Op.BW] / 2
        time = BlockTime(samples / plan.halves, own[Op.F], own[Op.B] + both, own[Op.W] + both)
        of_class[model.blocks[block]].append(time)
    return model.timed({
        model.classes[place].name: {plan.tp: (BlockTime(*map(mean, zip(*found, strict=True))),)}
        for place, found in of_class.items()
    })  # fmt: skip


def _with_latency(programs: CompiledPlan, moving: _Moving, links: _Links) -> _Links:
    """A sum of a few numbers over all ranks says how long a hop takes."""
    seen = _all(programs, moving, {Op.NORM})[0]
    machine = machines(*links, programs.plan, 1)[0]
    everyone = consecutive(programs.plan.world, 1, machine.nodes.devices)
    expected = all_reduce(machine.links, everyone, 1.0)
    if not seen or min(*seen, expected) <= 0:
        return links
    cluster, software = links
    share = seen[0] / expected
    hops = {name: share * getattr(software, name) for name in ("link_latency", "network_latency")}
    return cluster, replace(software, **hops)


def _linked(model: ModelWork, programs: CompiledPlan, moving: _Moving, links: _Links, samples: int) -> _Links:
    """Messages and sums say how fast bytes travel: inside a node and between nodes, whichever of them takes longest for
    its bytes."""
    found = list(_transfers(model, programs, moving, samples, machines(*links, programs.plan, samples)[0]))
    for is_near in (True, False):
        own = max((own for own in found if own.is_near == is_near), key=lambda own: own.carried(links), default=None)
        if own is None or own.seconds <= _TOLD_APART * own.bare(links) or own.carried(links) <= 0:
            continue
        slower = (own.seconds - own.bare(links)) / own.carried(links)
        name = "link" if is_near else "network"
        kinds = (replace(kind, **{name: getattr(kind, name) / slower}) for kind in links[0].nodes)
        links = Cluster(tuple(kinds)), links[1]
    return links


def _transfers(
    model: ModelWork, programs: CompiledPlan, moving: _Moving, samples: int, machine: Machine
) -> Iterator[_Transfer]:  # fmt: skip
    plan = programs.plan
    messages = [seconds for own in _all(programs, moving, RECEIVES) for seconds in own]
    if messages:

        def message(cluster: Cluster, software: Software) -> float:
            return message_seconds(model, plan, machines(cluster, software, plan, samples))

        yield _Transfer(median(messages), message, plan.world <= machine.nodes.devices)
    sums = [sum(own) for own in _all(programs, moving, {Op.REDUCE})]
    if plan.dp > 1 and not plan.zero and plan.reduces == "step" and any(sums):
        place = max(range(plan.pp), key=sums.__getitem__)
        parameters = model.trained * loads_of(model, plan)[place].parameters

        def reduced(cluster: Cluster, software: Software) -> float:
            return machines(cluster, software, plan, samples)[place].reduce_seconds(parameters)

        yield _Transfer(sums[place], reduced, machine.dp_group.num_nodes == 1)


def _updating(
    model: ModelWork, programs: CompiledPlan, reports: Sequence[Report], links: _Links, batch: int
) -> _Links:  # fmt: skip
    """With the memory as fast as updates went, where that is all they are."""
    (cluster, software), plan = links, programs.plan
    seen = max(map(sum, _all(programs, [each.own for each in reports], {Op.STEP})))
    if plan.zero or plan.offload or seen <= 0:
        return links
    faster = estimate(model, plan, cluster, software, batch).parts["optimizer"] / seen
    kinds = (
        replace(kind, device=replace(kind.device, bandwidth=_times(kind.device.bandwidth, faster)))
        for kind in cluster.nodes
    )
    return Cluster(tuple(kinds)), software


def _times(figure: Figure, share: float) -> Figure:
    return figure._replace(value=share * figure.value)

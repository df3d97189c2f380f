"""Seconds of a block, of a stage and of a step, for hardware that may not be here: arithmetic, memory traffic and
collectives, by a device's published figures and the few shares of them that software reaches.

Those shares (`Software`) belong to hardware and programs, never to a model or a plan; `calibrate.py` fits them to runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.collectives import Group, Links, all_reduce, consecutive, gather, send
from phalanx.planning.footprint import kept_bytes, most_slices
from phalanx.planning.work import BlockWork, Exchange, ModelWork, at_degree

MOST_RESERVED = 0.1  # of a device's memory, what libraries keep of it at most
NARROW_HEAD = 64  # elements of a head, of which attention reaches half of what it could
ALONE, MEETING = 6.0, 2.5  # how sharply a device passes from waiting for its host to computing without a pause
LISTENED = 0.75  # of the time of a pipeline, that a rank waits for a neighbour's next message (fitted: decision 26)
SLICED_ATTENTION = 1.25  # of the time of attention, where it is computed in slices (measured 1.12 to 1.33 on an H200)
SLICED_LAYER = 1.15  # of the time of a layer that was measured whole (1.12 of its kernels, 1.17 of starting them)


@dataclass(frozen=True)
class Software:
    """What programs reach of what devices and links offer.

    products, attention: shares of a device's FLOP/s. small: rows, or a side, of a matrix with which products reach half
    of that. odd: of that, where a side is not a multiple of 8. memory: of its bandwidth. passes, between, scores: times
    that element-wise work goes over what it moves inside units, between them, and in attention. launch: seconds that a
    host takes to start a unit's forward; call: to start a collective. link, network: shares of bandwidths that sums
    reach; *gathers, *sends: times that, gathers and messages. *_latency: seconds of one hop. behind_weights: of a
    backward's sums over tensor-parallel ranks, the share that travels behind weight gradients. hidden: of the backward
    of a last micro-batch, the share behind which gradients are reduced. messages: of messages between stages, the share
    that is waited for. contention: seconds that computation loses for each of communication beneath it; listening: of a
    message that its rank waits for, which takes a part of a GPU. crowded: times that a rank computes faster than beside
    all others of its node, with whom it shares what computes; one_machine: whether those of all nodes share it, as in a
    lab. step, micro_batch: seconds besides. gradient: bytes of a parameter's gradient sum, kept and reduced; logits: of
    each logit, where tensor-parallel ranks all have them whole. reserved: bytes that libraries keep of a device's
    memory; slack: share of the rest that an allocator cannot use. host_updates: parameters that the host updates in a
    second for each device (3.8e9 measured on 16 cores). host_copies: bytes/s each way that the memory of a node
    reaches. host_memory: of a device's own memory, how many times as much it may use of its host's.
    """

    products: float = 0.72
    attention: float = 0.45
    small: float = 180.0
    odd: float = 0.4
    memory: float = 0.8
    passes: float = 1.0
    between: float = 1.0
    scores: float = 1.0
    launch: float = 60e-6
    call: float = 20e-6
    link: float = 0.75
    network: float = 0.75
    link_latency: float = 4e-6
    network_latency: float = 1.5e-5
    gathers: float = 1.0
    sends: float = 1.0
    network_gathers: float = 1.0
    network_sends: float = 1.0
    behind_weights: float = 0.8
    hidden: float = 0.8
    messages: float = 1.0
    contention: float = 0.3
    listening: float = 0.0
    crowded: float = 1.0
    one_machine: bool = False
    step: float = 5e-3
    micro_batch: float = 0.0
    gradient: float = 4.0
    logits: float = 0.0
    reserved: float = 2.0e9
    slack: float = 0.03
    host_updates: float = 3.8e9
    host_copies: float = 2e11
    host_memory: float = 1.5


class Seconds(NamedTuple):
    """Of one micro-batch in a block or stage. again: what is computed a second time."""

    forward: float
    backward: float  # gradients of inputs
    weight: float
    again: float
    exposed: float  # of all of these, the part that is waiting for other tensor-parallel ranks
    copied: float = 0.0  # and for copies between device and host

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight + self.again

    @property
    def drained(self) -> float:
        """What a stage adds to the time that the others wait, where weight gradients fill gaps."""
        return self.forward + self.backward + self.again - self.weight

    @property
    def in_step(self) -> float:
        """What a micro-batch takes where ranks do a forward, a backward and weight gradients all at the same time."""
        return max(self.total, 3 * max(self.forward, self.backward + self.again, self.weight))


def add(parts: Sequence[Seconds]) -> Seconds:
    return Seconds(*(sum(column) for column in zip(*parts, strict=True))) if parts else Seconds(0, 0, 0, 0, 0)


def among_others(through: float, least: float, crowded: float) -> float:
    """Seconds of the way through a pipeline, whose ranks are faster while others wait. through: if none ever waited;
    least: what each has to do on average while none does."""
    return max(least, through / crowded) if crowded > 1 else through


def times(seconds: Seconds, count: int) -> Seconds:
    return Seconds(*(count * own for own in seconds))


def _launched(busy: float, launch: float, meets: bool) -> float:
    """Seconds of a device that is busy so long with kernels that a host starts in so long: the longer of both, and some
    more where they are alike, since not every kernel is as long as its start. A host that is ahead makes up for most
    of that, unless ranks meet: at every sum all of them wait for the one that was started last."""
    if not launch:
        return busy
    sharpness = MEETING if meets else ALONE
    return (busy**sharpness + launch**sharpness) ** (1 / sharpness)


class Machine:
    """Devices as software uses them, under the mesh of a plan: those of one place in its pipeline."""

    def __init__(
        self, nodes: Nodes, software: Software, plan: Plan, samples: int, kinds: tuple[int, ...] = (),
        to: Nodes | None = None,
    ) -> None:  # fmt: skip
        """nodes: of several kinds the slowest in every respect. samples: of a micro-batch. kinds: which of the
        cluster's they are. to: the same of this place and the next together, between which messages go."""
        self.nodes, self.software, self.plan, self.samples, self.kinds = nodes, software, plan, samples, kinds
        self.to = to or nodes
        self.links = _links(nodes, software)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What the seconds and bytes of a block depend on, beside the block."""
        plan, shared = self.plan, self.plan.mb if self.plan.pairs else 0
        split = plan.tp, plan.sequence, plan.saves, plan.degrees
        return self.kinds, split, self.samples, plan.overlap, shared, self.parts, self.slowed

    @cached_property
    def budget(self) -> float:
        """bytes that a rank may use of its device's memory. Of a small one libraries keep less."""
        software, size = self.software, self.nodes.memory
        return (size - min(software.reserved, MOST_RESERVED * size)) * (1 - software.slack)

    @cached_property
    def host_rate(self) -> float:
        """bytes/s each way between a device and the memory of its host, which the devices of a node share."""
        return min(self.nodes.device.host.value, self.software.host_copies / self.nodes.devices)

    @property
    def host_memory(self) -> float:
        """bytes that a device may use of the memory of its host."""
        usual = self.software.host_memory * self.nodes.device.memory.value
        return self.nodes.host / self.nodes.devices if self.nodes.host else usual

    @property
    def near(self) -> int:
        """Places of the pipeline that lie on one node, or on parts of one machine."""
        if self.software.one_machine:
            return self.plan.pp
        return max(1, min(self.plan.pp, self.nodes.devices // (self.plan.tp * self.plan.dp)))

    @property
    def crowded(self) -> float:
        """Times that a rank is faster while the other places of the pipeline wait."""
        return self.software.crowded if self.near > 1 else 1.0

    @cached_property
    def slowed(self) -> float:
        """Times that computation takes longer beside messages that ranks wait for, from both sides of the pipeline
        or, where all forwards come first, from one at a time."""
        plan = self.plan
        ways = 1 if plan.schedule == "gpipe" else 2
        return 1 + self.software.listening * LISTENED * ways * (plan.pp - 1) / plan.pp

    @cached_property
    def tp_group(self) -> Group:
        return consecutive(self.plan.tp, 1, self.nodes.devices)

    @cached_property
    def dp_group(self) -> Group:
        return consecutive(self.plan.dp, self.plan.tp, self.nodes.devices)

    @cached_property
    def shard_group(self) -> Group:
        return consecutive(self.plan.shards, self.plan.tp, self.nodes.devices)

    @cached_property
    def parts(self) -> int:
        """In how many parts a micro-batch is computed, each by itself."""
        return self.plan.halves * most_slices(self.plan)

    def seconds(self, work: BlockWork, rung: str, moved: float = 0.0) -> Seconds:
        """Of a micro-batch in one block. moved: of what it keeps, the share that lies on the host in between."""
        own = self._part_seconds(work, rung)
        whole = own if self.parts == 1 else times(own, self.parts)
        return self._with_copies(whole, work, rung, moved) if moved else whole

    def _part_seconds(self, work: BlockWork, rung: str) -> Seconds:
        """Of one part of a micro-batch."""
        computed, inputs, weight = self._computed(work)
        sums = self.sums_seconds(work)
        again, repeated = {
            "none": (0.0, 0.0), "light": (self._moved_share(work) * computed, 0.0),
            "unit": (computed, 0.0), "block": (computed, sums),
        }[rung]  # fmt: skip
        ahead, behind = self._hidden(sums, repeated, computed, inputs + again, weight) if sums else (0.0, 0.0)
        lost = 1 - self.software.contention
        waits, first = sums + repeated - lost * behind, sums - lost * ahead
        launch, meets = self._launch(work), sums > 0
        again = _launched(again, launch, meets) if rung in ("unit", "block") else again
        forward = _launched(computed + first, launch, meets)
        backward = _launched(inputs + waits + weight, launch, meets) - weight
        return Seconds(forward, backward, weight, again, first + waits)

    def _computed(self, work: BlockWork) -> tuple[float, float, float]:
        """Forward, gradients of inputs and those of weights: as they were measured, or by what the device offers."""
        if work.times:
            forward, backward, weight = at_degree(work.times, self.plan.tp, self.samples / self.parts)
        else:
            forward, backward, weight = self._offered(work)
        sliced = work.times and self.plan.slices and work.attention
        slower = self.slowed * (SLICED_LAYER if sliced else 1.0)
        return slower * forward, slower * backward, slower * weight

    def _moved_share(self, work: BlockWork) -> float:
        """Of a forward, what all but products and attention takes: of what was measured, the share that the device
        offers it."""
        offered = self._offered(work)[0]
        return self._moved(work) / offered if offered else 0.0

    def _offered(self, work: BlockWork) -> tuple[float, float, float]:
        products, moved, weights = self._products(work), self._moved(work), self._weights(work)
        attention = self._attention(work)
        # Attention's own backward computes two and a half times what its forward does, and element-wise work reads
        # gradients beside what was kept.
        backward = products + 2.5 * attention + 2 * moved + weights
        return products + attention + moved + weights, backward, work.learns * (products + weights)

    def _launch(self, work: BlockWork) -> float:
        """Seconds that a host takes to start the kernels of a forward; what was measured has them already."""
        if work.times:
            return 0.0
        calls = (work.exchanges + len(work.moves) / 2) * self.software.call if self.plan.tp > 1 else 0.0
        return self.software.launch * (max(1, work.units) + work.apart) + calls

    def _hidden(
        self, sums: float, repeated: float, forward: float, backward: float, weight: float
    ) -> tuple[float, float]:
        """Of sums over tensor-parallel ranks, what travels beneath computation in the forward and in the backward:
        behind weight gradients, or all that the other half of the samples or the next micro-batch computes."""
        plan, share = self.plan, self.software.behind_weights
        if plan.halves > 1:
            ahead, behind = min(sums, share * forward), min(sums + repeated, share * (backward + weight))
        else:
            ahead, behind = 0.0, min(sums, share * weight)
        if plan.pairs:  # all but the first forward and the last backward have a partner
            every = 2 * sums + repeated
            covered = min(every, share * (forward + backward + weight))
            paired = (plan.mb - 1) / plan.mb
            ahead += paired * max(0.0, covered * sums / every - ahead)
            behind += paired * max(0.0, covered * (sums + repeated) / every - behind)
        return ahead, behind

    def _with_copies(self, own: Seconds, work: BlockWork, rung: str, moved: float) -> Seconds:
        """What leaves in the forward and comes back in the backward travels beneath them, as far as they last."""
        copy = moved * kept_bytes(work.kept[rung], self.plan) * self.samples / self.host_rate
        out, back = max(0.0, copy - own.forward), max(0.0, copy - own.backward - own.weight - own.again)
        return own._replace(forward=own.forward + out, backward=own.backward + back, copied=out + back)

    def _products(self, work: BlockWork) -> float:
        if not work.products:
            return 0.0
        lost = self.software.small * self._narrowness(work) if work.parameters else 0.0
        rate = self.nodes.device.flops.value * self.software.products / (1 + lost)
        odd = self.software.odd if work.odd and self.plan.tp == 1 else 1.0  # what is split is padded first
        return work.products * self.samples / self.parts / self.plan.tp / (rate * odd)

    def _narrowness(self, work: BlockWork) -> float:
        """How much kernels lose on matrices that are narrow or short: 1 / side and 1 / rows, of a unit's on average."""
        narrow = (work.side or math.sqrt(work.parameters / max(1, work.units))) / self.plan.tp
        rows = work.products / (2 * work.parameters) * self.samples / self.parts
        return 1 / narrow + 1 / rows

    def _attention(self, work: BlockWork) -> float:
        rate = self.nodes.device.flops.value * self.software.attention
        if work.head_dim:
            rate *= (1 + NARROW_HEAD / 128) / (1 + NARROW_HEAD / work.head_dim)
        slower = SLICED_ATTENTION if self.plan.slices else 1.0
        return slower * work.attention * self.samples / self.parts / self.plan.tp / rate

    def attention_share(self, model: ModelWork) -> float:
        """Of the time of a micro-batch, what attention takes: what later slices have more of."""
        every = [(work, model.blocks.count(place)) for place, work in enumerate(model.classes)]
        attention = sum(n * self._attention_seconds(work) for work, n in every)
        return attention / sum(n * self._part_seconds(work, "none").total for work, n in every)

    def _attention_seconds(self, work: BlockWork) -> float:
        """Of a part of a micro-batch, forward and back: of what was measured, the share that the device offers it."""
        share = 3.5 * self._attention(work) / sum(self._offered(work)) if work.attention else 0.0
        return share * sum(self._computed(work))

    def _moved(self, work: BlockWork) -> float:
        """Element-wise work between units is done by all ranks alike, unless the tokens are split."""
        moved, software, tp = work.moved, self.software, self.plan.tp
        inside = (software.passes * moved.split + software.scores * work.scores) / tp
        between = software.between * (moved.entries + moved.rest) / (tp if self.plan.sequence else 1)
        return (inside + between) * self.samples / self.parts / self.bandwidth

    def _weights(self, work: BlockWork) -> float:
        """Products also read their weights, which few samples do not make up for."""
        return 2 * work.parameters / self.plan.tp / self.bandwidth if work.products else 0.0

    @property
    def bandwidth(self) -> float:
        return self.nodes.device.bandwidth.value * self.software.memory

    def sum_seconds(self, work: BlockWork) -> float:
        """One sum over the tensor-parallel ranks; scattered and gathered, where tokens are split, takes as long."""
        return all_reduce(self.links, self.tp_group, work.crossing * self.samples / self.parts)

    def sums_seconds(self, work: BlockWork) -> float:
        """All sums of a forward, and half of what moves between units of different degrees in it and its backward."""
        if not work.copied:
            sums = work.exchanges * self.sum_seconds(work)
        else:
            sums = sum(2 * self._gathered(own) for own in work.sums)
        return sums + sum(map(self._gathered, work.moves)) / 2

    def _gathered(self, own: Exchange) -> float:
        group = consecutive(own.ranks, own.stride, self.nodes.devices)
        return gather(self.links, group, own.size * self.samples / self.parts)

    def message_seconds(self, size: float) -> float:
        """From a stage to the next, of `size` bytes that cross for one sample: of one part of a micro-batch."""
        plan = self.plan
        parts = self.parts * (plan.tp if plan.sequence else 1)
        is_near = plan.pp * plan.dp * plan.tp <= self.to.devices
        links = self.links if self.to is self.nodes else _links(self.to, self.software)
        return send(links, size * self.samples / parts, is_near)

    # What replicas do, of so many parameters.

    def gather_seconds(self, parameters: float, width: int) -> float:
        """ZeRO 3: weights, from the ranks that share them."""
        return gather(self.links, self.shard_group, width * parameters / self.plan.tp)

    def reduce_seconds(self, parameters: float, copies: int = 1) -> float:
        """Gradients, over all replicas. copies: groups of tensor-parallel ranks that have the same parameters."""
        plan, size = self.plan, self.plan.sum_bytes(self.software.gradient) * parameters / self.plan.tp
        if plan.dp * copies == 1:
            return 0.0
        if not plan.zero:
            return all_reduce(self.links, self._beside(self.dp_group, copies), size)
        scattered = gather(self.links, self.shard_group, size)
        across = consecutive(plan.dp // plan.shards, plan.tp * plan.shards, self.nodes.devices)
        return scattered + all_reduce(self.links, self._beside(across, copies), size / plan.shards)

    def _beside(self, group: Group, copies: int) -> Group:
        """A group with, for each of its ranks, those of the other copies among its tensor-parallel ranks."""
        if copies == 1:
            return group
        own = consecutive(copies, self.plan.tp // copies, self.nodes.devices)
        return Group(copies * group.size, own.on_node * (group.on_node if own.num_nodes == 1 else 1))

    def host_seconds(self, parameters: float, width: float) -> float:
        """Between a device and its host one way: of a rank's part of so many parameters, `width` bytes of each."""
        return width * parameters / self.plan.tp / self.plan.shards / self.host_rate

    def update_seconds(self, parameters: float, width: int, state: float, share: float) -> float:
        """The optimizer, and with ZeRO 1 and 2 the updated weights shared. state: bytes that it keeps of a parameter,
        of which a share on the host comes to the device and leaves again at the same time, or is updated there."""
        plan, own = self.plan, parameters / self.plan.tp
        hosted = share * own / plan.shards
        here = own / plan.shards - (hosted if plan.steps_on_host else 0.0)
        moved = update_bytes(width, state) * here / self.bandwidth
        if hosted:
            # Gradients of parameters that lie on the host left before, and come back where the device updates.
            there, back = (0.0, 4.0) if plan.hosts_parameters else (4.0 + width, 0.0)
            comes = plan.device_updates if plan.steps_on_host else 1.0
            sent = hosted * (there if plan.steps_on_host else 0.0) + comes * hosted * (state + back)
            moved += max(sent / self.host_rate, (1 - comes) * hosted / self.software.host_updates)
        shares = plan.zero in (1, 2)
        return moved + (gather(self.links, self.shard_group, width * own) if shares else 0.0)


def update_bytes(width: float, state: float) -> float:
    """That an update reads and writes for a parameter of so many bytes with so many of state: all, and reads the sum of
    its gradients."""
    return 2 * (width + state) + max(4.0, width)


def _links(nodes: Nodes, software: Software) -> Links:
    return Links(
        nodes.link * software.link, nodes.network * software.network, nodes.devices, software.link_latency,
        software.network_latency, software.gathers, software.sends, software.network_gathers, software.network_sends,
    )  # fmt: skip


def machines(cluster: Cluster, software: Software, plan: Plan, samples: int) -> list[Machine]:
    """One for each place in the pipeline, with the links of the nodes that its groups touch: those of tensor-parallel
    ranks and of replicas lie inside a place, and messages go from one to the next."""
    if len(cluster.nodes) == 1:
        return [Machine(cluster.nodes[0], software, plan, samples)] * plan.pp
    ranks = plan.dp * plan.tp
    own = [cluster.numbers_of(range(place * ranks, (place + 1) * ranks)) for place in range(plan.pp)]
    after = [*own[1:], own[0] if plan.v > 1 and plan.schedule != "zb-v" else own[-1]]
    made: dict[tuple[tuple[int, ...], tuple[int, ...]], Machine] = {}
    for kinds, to in dict.fromkeys(zip(own, after, strict=True)):
        both = cluster.together(tuple(sorted({*kinds, *to})))
        made[kinds, to] = Machine(cluster.together(kinds), software, plan, samples, kinds, both)
    return [made[pair] for pair in zip(own, after, strict=True)]

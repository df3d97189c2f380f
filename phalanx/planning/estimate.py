"""What a plan takes on a cluster: seconds of a step and where they go, bytes of every place in the pipeline.

The one judge of plans: the search compares what it says, the report prints it. Stages are taken as they are on average;
a program's every wait is `predict/simulate.py`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Machine, Seconds, Software, add, among_others, machines, times
from phalanx.planning.degrees import all_copied, split_model
from phalanx.planning.footprint import (
    fetched_share,
    host_bytes,
    hosted_share,
    memory,
    most_slices,
    moved_share,
    parameters_of,
    place_blocks,
)
from phalanx.planning.slice_shares import slowest
from phalanx.planning.work import Copied, ModelWork

PARTS = (
    "computation",
    "computed again",
    "tensor communication",
    "host copies",
    "messages",
    "gradients",
    "optimizer",
    "bubble",
    "other",
)


@dataclass(frozen=True)
class Estimate:
    """cluster: the devices that take part. parts: where the seconds of a step go, as the busiest place in the pipeline
    sees them. memory: of each place, by component; budget: what each has. on_host, host_budget: the same of the memory
    of its host, for each device."""

    plan: Plan
    batch: int
    cluster: Cluster
    step_seconds: float
    parts: dict[str, float]
    memory: tuple[dict[str, float], ...]
    budget: tuple[float, ...]
    tokens: int
    flops: float
    peak_flops: float
    price: float = 0.0
    on_host: tuple[float, ...] = ()
    host_budget: tuple[float, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """Of what all devices offer, the share that the model itself needs."""
        return self.flops / self.step_seconds / self.peak_flops

    @property
    def bubble(self) -> float:
        return self.parts["bubble"] / self.step_seconds

    @property
    def exposed(self) -> float:
        """The share of a step that ranks wait for communication."""
        waits = ("tensor communication", "messages", "gradients")
        return sum(self.parts[part] for part in waits) / self.step_seconds

    @cached_property
    def fullest(self) -> int:
        """The place in the pipeline with the least room left."""
        return min(range(len(self.memory)), key=lambda place: self.budget[place] - sum(self.memory[place].values()))

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory[self.fullest].values())

    @property
    def lacks(self) -> float:
        """bytes of its device that the fullest place would need beyond what it has; below 0: that it has left."""
        return self.peak_bytes - self.budget[self.fullest]

    @property
    def fullest_host(self) -> int:
        """The place whose host has the least room left."""
        return max(range(len(self.on_host)), key=lambda place: self.on_host[place] - self.host_budget[place])

    @property
    def lacks_on_host(self) -> float:
        return self.on_host[self.fullest_host] - self.host_budget[self.fullest_host] if self.plan.offload else 0.0

    @property
    def fits(self) -> bool:
        return self.lacks <= 0 and self.lacks_on_host <= 0

    @property
    def dollars(self) -> float:
        """Of a step."""
        return self.price / 3600 * self.step_seconds

    @property
    def dollars_per_million_tokens(self) -> float:
        return self.dollars / self.tokens * 1e6


def estimate(model: ModelWork, plan: Plan, cluster: Cluster, software: Software, batch: int) -> Estimate:
    """plan: with its stages."""
    model = split_model(model, plan)
    samples = -(-batch // (plan.dp * plan.mb))
    places = machines(cluster, software, plan, samples)
    rungs = rungs_of(model, plan)
    parts = parts_of(model, plan, places, loads_of(model, plan))
    bytes_of = software.gradient, software.logits
    used = [memory(model, plan, place, samples, rungs, *bytes_of) for place in range(plan.pp)]
    hosted = [host_bytes(model, plan, place, samples, rungs, software.gradient) for place in range(plan.pp)]
    peak = sum(kind.total * kind.device.flops.value for kind in cluster.nodes) / cluster.world * plan.world
    return Estimate(
        plan, batch, cluster, sum(parts.values()), parts, tuple(used), tuple(place.budget for place in places),
        model.tokens * batch, model.flops * batch, peak, cluster.price * plan.world / cluster.world, tuple(hosted),
        tuple(place.host_memory for place in places),
    )  # fmt: skip


def rungs_of(model: ModelWork, plan: Plan) -> list[str]:
    """What of each block is computed again; nothing of one that cannot."""
    given = [plan.recompute_of(model.layers[0], model.layers)] if model.layers else []
    policies = plan.policies if len(plan.policies) > 1 else plan.policies * max(1, len(model.layers))
    rungs = [plan.policies[0] if len(plan.policies) == 1 else "none"] * len(model.blocks)
    for block, rung in zip(model.layers, policies, strict=bool(given)):
        rungs[block] = rung
    return [rung if rung in model.block(block).kept else "none" for block, rung in enumerate(rungs)]


@dataclass(frozen=True)
class Place:
    """What a place in the pipeline takes. seconds: of a micro-batch; waits: for parameters and gradients of it.
    reduce, window: of a step's gradients, and what they hide behind. update: the optimizer. fetch: of a step, for
    parameters and gradients between device and host."""

    seconds: Seconds
    waits: float
    reduce: float
    window: float
    update: float
    fetch: float = 0.0


@dataclass(frozen=True)
class Load:
    """What a place in the pipeline holds: how many blocks of each class and rung, their parameters, those of the
    largest block, and those that several groups of its tensor-parallel ranks have."""

    counts: frozenset[tuple[tuple[int, str], int]]
    parameters: float
    largest: float
    copied: tuple[Copied, ...] = ()


def loads_of(model: ModelWork, plan: Plan) -> list[Load]:
    rungs = rungs_of(model, plan)
    found: list[Load] = []
    for place in range(plan.pp):
        blocks = place_blocks(plan, place)
        counts = Counter((model.blocks[block], rungs[block]) for block in blocks)
        largest = max(model.classes[kind].parameters for kind, _ in counts)
        copied = all_copied(model.block(block) for block in blocks)
        found.append(Load(frozenset(counts.items()), parameters_of(model, blocks), largest, copied))
    return found


def parts_of(model: ModelWork, plan: Plan, places: Sequence[Machine], loads: Sequence[Load]) -> dict[str, float]:
    """Where the seconds of a step go. Places that hold as many of the same blocks take as long."""
    known: dict[tuple[tuple[int, ...], Load], Place] = {}
    for machine, load in zip(places, loads, strict=True):
        if (machine.kinds, load) not in known:
            moved = moved_share(plan, sum(n for (kind, _), n in load.counts if model.classes[kind].is_layer))
            own = [
                times(machine.seconds(work, rung, moved if work.is_layer else 0.0), n)
                for (kind, rung), n in load.counts
                for work in (model.classes[kind],)
            ]
            held = load.parameters, load.largest, load.copied
            known[machine.kinds, load] = timed_place(model, plan, machine, add(own), *held)
    timed = [known[machine.kinds, load] for machine, load in zip(places, loads, strict=True)]
    longest = longest_slice(model, plan, places[0])
    return step_parts(plan, timed, message_seconds(model, plan, places), places[0].software, longest, places[0].near)


def longest_slice(model: ModelWork, plan: Plan, machine: Machine) -> float:
    """Of what a micro-batch takes; 1 where it is not cut."""
    if not plan.slices:
        return 1.0
    attention = machine.attention_share(model)
    return max(slowest(slicing, attention) for slicing in plan.slices)


def timed_place(
    model: ModelWork, plan: Plan, machine: Machine, seconds: Seconds, parameters: float, largest: float,
    copied: Sequence[Copied] = (),
) -> Place:  # fmt: skip
    """parameters: elements of all blocks of the place; largest: of the largest block; copied: of those that several
    groups of tensor-parallel ranks have."""
    hidden, contention, width = machine.software.hidden, machine.software.contention, model.width
    learning = model.trained * parameters
    behind = hidden * (seconds.backward + seconds.weight + seconds.again)
    single = learning - model.trained * sum(own.elements for own in copied)
    reduce = machine.reduce_seconds(single) + sum(
        machine.reduce_seconds(model.trained * own.elements, own.copies) for own in copied
    )
    # Of a single micro-batch, gradients are reduced beneath the same backward whatever a plan calls that.
    is_each = plan.reduces == "micro-batch" or (plan.gathers == "micro-batch" and plan.mb == 1)
    per_micro_batch = reduce if is_each else 0.0
    waits, left = 0.0, behind  # left: of the last backward, what no gathering is beneath
    if plan.gathers == "micro-batch":
        gathered = plan.v * machine.gather_seconds(parameters / plan.v, width)
        waits += beneath(gathered, hidden * seconds.forward, contention)
        per_micro_batch += gathered
        left = max(0.0, behind - gathered)
    waits += beneath(per_micro_batch, behind, contention)
    once = machine.gather_seconds(parameters, width) if plan.gathers == "step" else 0.0
    last = machine.reduce_seconds(model.trained * largest)
    tail = last if is_each and reduce else max(min(reduce, last), beneath(reduce, left, contention))
    update = machine.update_seconds(learning, width, model.state_width, hosted_share(model, plan)) + once
    fetch = 0.0
    if plan.hosts_parameters:
        fetched = fetched_share(model, plan)
        come = machine.host_seconds(fetched * parameters, width)
        leave = machine.host_seconds(fetched * learning, plan.sum_bytes(machine.software.gradient))
        fetch = fetch_seconds(plan, seconds, come, leave, min(1.0, largest / parameters))
    return Place(seconds, waits, tail, behind, update, fetch)


def fetch_seconds(plan: Plan, seconds: Seconds, come: float, leave: float, largest: float) -> float:
    """What a step waits for parameters that come from the host one block ahead, forward and back, with every
    micro-batch or once for all, and for gradients that leave behind the last backward of the next block. come, leave:
    seconds of those of all blocks, one way; largest: share of the largest block, of which nothing hides the first
    parameters and the last gradients."""
    together = plan.mb if plan.schedule == "block-major" else 1
    times = plan.mb / together
    backward = together * (seconds.backward + seconds.weight + seconds.again)
    forth = times * max(0.0, come - together * seconds.forward)
    back = (times - 1) * max(0.0, come - backward) + max(0.0, come - backward, leave - backward)
    return forth + back + (come + leave) * largest


def beneath(communication: float, window: float, contention: float) -> float:
    """What communication costs that may take place beneath computation of so many seconds."""
    covered = min(communication, window)
    return communication - covered + contention * covered


def message_seconds(model: ModelWork, plan: Plan, places: Sequence[Machine]) -> float:
    """The longest message that there may be between stages."""
    if plan.pp == 1:
        return 0.0
    largest = max(work.crossing for work in model.classes)
    return max(place.message_seconds(largest) for place in set(places))


def step_parts(
    plan: Plan, places: Sequence[Place], message: float, software: Software, longest: float = 1.0, near: int = 1
) -> dict[str, float]:
    """Where the seconds of a step go, for the place with most to do. message: of one part of a micro-batch. longest:
    share of a micro-batch that its longest slice is. near: places of the pipeline that lie on the same node."""
    busiest = max(places, key=lambda place: place.seconds.total + place.waits)
    seconds = busiest.seconds
    others = sum(_adds(place, plan.schedule) for place in places) - _adds(busiest, plan.schedule)
    fill = max(0.0, others) * longest / plan.v + _num_messages(plan) * message
    slack, gradients = 0.0, 0.0
    for place in places:  # a later stage is done earlier
        gradients = max(gradients, place.reduce - slack)
        slack += place.seconds.backward + place.seconds.weight
    exposed, copied = seconds.exposed, seconds.copied
    own = seconds.total - seconds.again - exposed - copied
    idle = seconds.in_step - seconds.total if plan.schedule == "zb-v" else 0.0
    totals = [plan.mb * (place.seconds.total - place.seconds.exposed - place.seconds.copied) for place in places]
    nodes = [totals[first : first + near] for first in range(0, len(totals), near)]
    least = max(sum(node) / len(node) for node in nodes)
    through = plan.mb * (own + seconds.again + idle) + fill
    share = among_others(through, least, software.crowded if near > 1 else 1.0) / through if through else 1.0
    return {
        "computation": share * plan.mb * own,
        "computed again": share * plan.mb * seconds.again,
        "tensor communication": plan.mb * exposed,
        "host copies": plan.mb * copied + max(place.fetch for place in places),
        "messages": plan.mb * waits_for_messages(plan) * message * software.messages,
        "gradients": plan.mb * busiest.waits + gradients,
        "optimizer": max(place.update for place in places),
        "bubble": share * (fill + plan.mb * idle),
        "other": software.step + plan.mb * software.micro_batch,
    }


_IN_ZB_V = 4 / 3 / 3  # of two thirds of a stage that others wait for, as it is simulated


def _adds(place: Place, schedule: str) -> float:
    """What a place adds to the time that a pipeline takes to fill and drain: less where weight gradients fill gaps."""
    if schedule == "zb-v":
        return _IN_ZB_V * place.seconds.total
    return place.seconds.drained if schedule == "zb-h1" else place.seconds.total


def waits_for_messages(plan: Plan) -> float:
    """Messages that a rank waits for with every micro-batch: under 1F1B again with each, under ZB-V for those of both
    stages; other schedules have more under way."""
    if plan.pp == 1:
        return 0.0
    parts = plan.halves * most_slices(plan)
    if plan.schedule == "zb-v":
        return min(4, plan.pp)
    return 2 * (plan.pp - 1) / plan.pp * parts if plan.schedule in ("1f1b", "gpipe") else 0.0


def _num_messages(plan: Plan) -> int:
    """That follow each other while a pipeline fills and drains."""
    if plan.pp == 1:
        return 0
    return 4 * (plan.pp - 1) if plan.schedule == "zb-h1" else 2 * (plan.num_stages - 1)

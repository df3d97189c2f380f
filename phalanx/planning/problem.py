"""What is searched for: a model, a cluster and a batch; and what plans have in common (a class of blocks under a degree
and a number of samples, a mesh and a way to shard), which is worked out once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from phalanx.plan.plan import Plan
from phalanx.plan.rules import may_host_parameters
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Machine, Seconds, Software, add, machines, times
from phalanx.planning.degrees import Degrees, choices, split_block
from phalanx.planning.footprint import Largest, hosted_share, kept_here, largest_of, state_widths
from phalanx.planning.mixes import best_mixes
from phalanx.planning.work import RUNGS, BlockWork, ModelWork

FEW_BLOCKS = 12
Known = TypeVar("Known")
Runs = tuple[tuple[int, int], ...]  # of consecutive blocks: the first, and the one behind the last


class Sharded(NamedTuple):
    """room: bytes that the average place of a pipeline has left beside its state, of which `optimizer` may lie on the
    host, and `rest` where parameters do. update: seconds of the optimizer there; waits: for what replicas exchange with
    every micro-batch, at least."""

    room: float
    optimizer: float
    rest: float
    update: float
    waits: float


@dataclass
class Problem:
    """What is searched for, and what is known of it by now. slot: samples of every micro-batch, where that is given.
    degrees_given: that a plan's degrees are those of every layer. Otherwise each unit of each layer has one of them, or
    all tensor-parallel ranks."""

    model: ModelWork
    cluster: Cluster
    software: Software
    batch: int
    slot: int | None = None
    degrees_given: bool = False

    def __post_init__(self) -> None:
        self._known: defaultdict[str, dict[object, Any]] = defaultdict(dict)
        blocks, layers = self.model.blocks, set(self.model.layers)
        self.ends = tuple(block for block in range(len(blocks)) if block not in layers)
        """Blocks that are no layers; before[i]: how many of them are before block i."""
        self.before = list(accumulate((block not in layers for block in range(len(blocks))), initial=0))
        self.kinds = tuple(place for place, work in enumerate(self.model.classes) if work.is_layer)
        """Classes of layers; counted[k][i]: how many of the k-th are before block i."""
        self.counted = [list(accumulate((own == kind for own in blocks), initial=0)) for kind in self.kinds]
        self.parameters = list(accumulate((self.model.block(b).parameters for b in range(len(blocks))), initial=0.0))

    def once(self, what: str, key: object, work: Callable[[], Known]) -> Known:
        """What `work` gives, done for the first plan that has this key and kept for all others. what: names it."""
        known = self._known[what]
        found = known.get(key)
        if found is None:
            found = known[key] = work()
        return found

    @property
    def is_small(self) -> bool:
        """Whether the model has so few blocks that all plans are looked at that may be best."""
        return len(self.model.blocks) <= FEW_BLOCKS

    @property
    def can_cap(self) -> bool:
        """Whether units with too few heads may be split over fewer ranks than others of the same layers."""
        layers = [self.model.classes[kind] for kind in self.kinds]
        return all(len({unit.attends for unit in work.parts}) == 2 for work in layers)

    def samples(self, plan: Plan) -> int:
        """Of the largest micro-batch."""
        return -(-self.batch // (plan.dp * plan.mb))

    def attention(self, plan: Plan) -> float:
        """The share of the time that attention takes, on the first place of a pipeline."""
        machine = machines(self.cluster, self.software, plan, self.samples(plan))[0]
        return self.once("attention", machine.key, lambda: machine.attention_share(self.model))

    def seconds_of(self, machine: Machine, runs: Iterable[tuple[int, int]]) -> float:
        """Of runs of consecutive blocks that keep everything."""
        before = self.once("seconds before blocks", machine.key, lambda: self._seconds_before(machine))
        return sum(before[end] - before[begin] for begin, end in runs)

    def _seconds_before(self, machine: Machine) -> list[float]:
        own = self.class_seconds(machine)
        return list(accumulate((own[place].total for place in self.model.blocks), initial=0.0))

    def sharded(self, plan: Plan) -> Sharded:
        """What a mesh and a way to shard mean, whatever else is planned."""
        key = (plan.pp, plan.tp, plan.dp, plan.zero, plan.zero_degree, plan.gathers, plan.reduces, plan.adds_gradients)
        if plan.offload:
            key = (*key, plan.offload, plan.schedule, plan.mb == 1)
        return self.once("sharded", key, lambda: self._sharded(plan))

    def _sharded(self, plan: Plan) -> Sharded:
        model, parameters = self.model, self.model.num_parameters / plan.pp
        own = [Machine(kind, self.software, plan, 1) for kind in self.cluster.nodes]
        state = state_widths(model, plan, self.software.gradient).state(parameters, Largest(0.0, 0.0))
        share, learning = hosted_share(model, plan), model.trained * parameters
        update = min(one.update_seconds(learning, model.width, model.state_width, share) for one in own)
        room = max(one.budget for one in own) - sum(state.values())
        exchanged = min(_exchanged(one, model, parameters) for one in own)
        waits = min(1.0, self.software.contention) * exchanged
        rest = state["weights"] + state["gradients"] if may_host_parameters(plan) else 0.0
        return Sharded(room, state["optimizer"], rest, update, waits)

    def again_seconds(self, machine: Machine, room: float) -> float:
        """About what a layer computes again for a micro-batch so that layers keep `room` bytes of it on average; as
        much as it can where that is not enough."""
        rungs = self.once("rungs", machine.key, lambda: self._rungs(machine))
        kept, seconds = rungs[0]
        for less, more in rungs[1:]:
            if kept <= room:
                break
            if less <= room:
                return seconds + (more - seconds) * (kept - room) / (kept - less)
            kept, seconds = less, more
        return seconds

    def copied_seconds(self, machine: Machine, moved: float) -> float:
        """What a layer waits at least, for a micro-batch of which so much of what it keeps lies on the host."""
        return self.once("copied", (machine.key, moved), lambda: self._copied(machine, moved)) if moved else 0.0

    def _copied(self, machine: Machine, moved: float) -> float:
        layers = [self.model.classes[kind] for kind in self.kinds]
        waits = [min(machine.seconds(work, rung, moved).copied for rung in work.kept) for work in layers]
        return min(waits, default=0.0)

    def _rungs(self, machine: Machine) -> list[tuple[float, float]]:
        """Bytes that a layer keeps of a micro-batch, and seconds for that beyond those that it takes anyway."""
        layers = [self.model.classes[kind] for kind in self.kinds]
        shares = [self.counted[place][-1] / len(self.model.layers) for place in range(len(self.kinds))]
        every = [rung for rung in RUNGS if all(rung in work.kept for work in layers)]
        single = state_widths(self.model, machine.plan, self.software.gradient).single
        found: list[tuple[float, float]] = []
        for rung in every:
            both = list(zip(layers, shares, strict=True))
            kept = sum(
                share * (kept_here(work, rung, machine.plan, machine.samples) - single * work.parameters)
                for work, share in both
            )
            found.append((kept, sum(share * machine.seconds(work, rung).total for work, share in both)))
        return best_mixes([(kept, seconds - found[0][1]) for kept, seconds in found])[::-1]

    def blocks_of(self, runs: Runs) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many layers of each kind they have, and their blocks that are no layers."""
        if len(runs) == 1:  # as almost always
            (begin, end) = runs[0]
            return tuple([own[end] - own[begin] for own in self.counted]), self.ends[
                self.before[begin] : self.before[end]
            ]
        layers = tuple(sum(own[end] - own[begin] for begin, end in runs) for own in self.counted)
        among = ((self.before[begin], self.before[end]) for begin, end in runs)
        return layers, tuple(self.ends[i] for begin, end in among for i in range(begin, end))

    def parameters_of(self, runs: Runs, layers: tuple[int, ...], ends: tuple[int, ...]) -> tuple[float, Largest]:
        """Of all their blocks, and of the largest ones."""
        model, before = self.model, self.parameters
        total = sum([before[end] - before[begin] for begin, end in runs])
        if 0 in ends:
            total -= sum(model.block(block).tied for block in ends)
        return total, self.once("largest", (*map(bool, layers), *ends), lambda: self._largest(layers, ends))

    def _largest(self, layers: tuple[int, ...], ends: tuple[int, ...]) -> Largest:
        present = [self.model.classes[kind] for kind, count in zip(self.kinds, layers, strict=True) if count]
        return largest_of([*present, *map(self.model.block, ends)])

    def load(self, machine: Machine, runs: Runs) -> tuple[Seconds, float, float]:
        """Seconds of runs of blocks that keep everything, their parameters, and those of the largest."""
        return self.once("load", (machine.key, runs), lambda: self._load(machine, runs))

    def _load(self, machine: Machine, runs: Runs) -> tuple[Seconds, float, float]:
        seconds, (layers, ends) = self.class_seconds(machine), self.blocks_of(runs)
        counts = [*zip(self.kinds, layers, strict=True), *((self.model.blocks[block], 1) for block in ends)]
        own = add([times(seconds[kind], n) for kind, n in counts])
        total, largest = self.parameters_of(runs, layers, ends)
        return own, total, largest.block

    def class_seconds(self, machine: Machine) -> list[Seconds]:
        """Of each class of blocks that keeps everything, and whose units have the degrees that are quickest."""
        classes = self.model.classes
        if machine.plan.degrees:
            return self.once("seconds", machine.key, lambda: [self._quickest(machine, own) for own in classes])
        return self.once("seconds", machine.key, lambda: [machine.seconds(work, "none") for work in classes])

    def _quickest(self, machine: Machine, work: BlockWork) -> Seconds:
        ways = choices(work, machine.plan, self.model.heads, self.degrees_given) if work.is_layer else []
        split = [self.split(work, degrees, machine.plan) for degrees in ways] or [work]
        return min((machine.seconds(own, "none") for own in split), key=lambda own: own.total)

    def split(self, work: BlockWork, degrees: Degrees, plan: Plan) -> BlockWork:
        """A layer among others whose units have the same degrees."""
        key = (work.name, degrees, plan.tp, plan.sequence, plan.saves)
        return self.once("split", key, lambda: split_block(work, degrees, degrees[-1], plan))

    def splits(self, plan: Plan) -> list[tuple[Degrees, ...]]:
        """Degrees that the units of layers may have, for each kind of layers; none where the plan says nothing."""
        if not plan.degrees:
            return []
        works, heads = [self.model.classes[kind] for kind in self.kinds], self.model.heads
        if any(work.tied for work in works) and not self.degrees_given:
            return []  # layers that share parameters share how they are split
        every = [choices(work, plan, heads, self.degrees_given) for work in works]
        if len(works) == 1:
            return [(own,) for own in every[0]]
        alike = [[own for own in ways if len(set(own)) == 1 or len(ways) == 1] for ways in every]
        return list(zip(*alike, strict=True)) if len({len(ways) for ways in alike}) == 1 else []


def _exchanged(machine: Machine, model: ModelWork, parameters: float) -> float:
    """Seconds that replicas take for weights and gradients with every micro-batch."""
    plan, found = machine.plan, 0.0
    if plan.gathers == "micro-batch":
        found += 2 * machine.gather_seconds(parameters, model.width)
    if plan.reduces == "micro-batch" and plan.dp > 1:
        found += machine.reduce_seconds(model.trained * parameters)
    return found

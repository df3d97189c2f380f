"""What runs of consecutive blocks take on each place of a pipeline, with what their layers compute again so that they
fit. What several plans have in common (a class of blocks under a degree and a number of samples) is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from phalanx.plan.cluster import Cluster
from phalanx.plan.cost import Machine, Seconds, Software, machines
from phalanx.plan.estimate import (
    Estimate,
    Place,
    budget_of,
    estimate,
    longest_slice,
    message_seconds,
    step_parts,
    timed_place,
)
from phalanx.plan.footprint import (
    hosted_bytes,
    kept_here,
    moved_share,
    num_held,
    past_bytes,
    state_bytes,
    working_bytes,
)
from phalanx.plan.mixes import Ends, Mix, Mixer, Option
from phalanx.plan.partition import evenly, partition
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS
from phalanx.plan.work import RUNGS, BlockWork, ModelWork

Key = tuple[object, ...]


class Quick(NamedTuple):
    """About the seconds of a step, inf where it does not fit; and what they would be if everything could be kept."""

    seconds: float
    free: float


class Sharded(NamedTuple):
    """room: bytes that the average place of a pipeline has left beside its state, of which `optimizer` may lie on the
    host. update: seconds of the optimizer there; waits: for what replicas exchange with every micro-batch, at least."""

    room: float
    optimizer: float
    update: float
    waits: float


@dataclass
class Problem:
    """What is searched for, and what is known of it by now. slot: samples of every micro-batch, where that is given."""

    model: ModelWork
    cluster: Cluster
    software: Software
    batch: int
    slot: int | None = None
    seconds: dict[Key, list[Seconds]] = field(default_factory=dict[Key, list[Seconds]])
    mixers: dict[Key, Mixer] = field(default_factory=dict[Key, Mixer])
    evens: dict[Key, tuple[int, ...]] = field(default_factory=dict[Key, tuple[int, ...]])
    drained: dict[Key, float] = field(default_factory=dict[Key, float])
    held: dict[Key, float] = field(default_factory=dict[Key, float])
    waiting: dict[Key, float] = field(default_factory=dict[Key, float])
    shares: dict[Key, float] = field(default_factory=dict[Key, float])
    looked_at: dict[Key, list[int]] = field(default_factory=dict[Key, list[int]])
    sums: dict[Key, list[float]] = field(default_factory=dict[Key, list[float]])
    rungs: dict[Key, list[tuple[float, float]]] = field(default_factory=dict[Key, list[tuple[float, float]]])
    shardings: dict[Key, Sharded] = field(default_factory=dict[Key, "Sharded"])

    def samples(self, plan: Plan) -> int:
        """Of the largest micro-batch."""
        return -(-self.batch // (plan.dp * plan.mb))

    def attention(self, plan: Plan) -> float:
        """The share of the time that attention takes, on the first place of a pipeline."""
        machine = machines(self.cluster, self.software, plan, self.samples(plan))[0]
        key = _key(machine)
        if key not in self.shares:
            self.shares[key] = machine.attention_share(self.model)
        return self.shares[key]

    def seconds_of(self, machine: Machine, runs: Iterable[tuple[int, int]]) -> float:
        """Of runs of consecutive blocks that keep everything."""
        key = _key(machine)
        if key not in self.sums:
            own = self.class_seconds(machine)
            self.sums[key] = list(accumulate((own[place].total for place in self.model.blocks), initial=0.0))
        before = self.sums[key]
        return sum(before[end] - before[begin] for begin, end in runs)

    def sharded(self, plan: Plan) -> Sharded:
        """What a mesh and a way to shard mean, whatever else is planned."""
        key = (plan.pp, plan.tp, plan.dp, plan.zero, plan.zero_degree, plan.gathers, plan.reduces)
        if key not in self.shardings:
            model, parameters = self.model, self.model.num_parameters / plan.pp
            own = [Machine(kind, self.software, plan, 1) for kind in self.cluster.nodes]
            state = state_bytes(model, plan, parameters, 0.0, self.software.gradient)
            update = min(one.update_seconds(model.trained * parameters, model.width, model.state_width) for one in own)
            room = max(map(budget_of, own)) - sum(state.values())
            exchanged = min(_exchanged(one, model, parameters) for one in own)
            waits = min(1.0, self.software.contention) * exchanged
            self.shardings[key] = Sharded(room, state["optimizer"], update, waits)
        return self.shardings[key]

    def again_seconds(self, machine: Machine, room: float) -> float:
        """About what a layer computes again for a micro-batch so that layers keep `room` bytes of it on average; as
        much as it can where that is not enough."""
        key = _key(machine)
        if key not in self.rungs:
            self.rungs[key] = self._rungs(machine)
        kept, seconds = self.rungs[key][0]
        for less, more in self.rungs[key][1:]:
            if kept <= room:
                break
            if less <= room:
                return seconds + (more - seconds) * (kept - room) / (kept - less)
            kept, seconds = less, more
        return seconds

    def _rungs(self, machine: Machine) -> list[tuple[float, float]]:
        """Bytes that a layer keeps of a micro-batch, and seconds for that beyond those that it takes anyway."""
        layers = [self.model.classes[kind] for kind in self.kinds]
        shares = [self.counted[place][-1] / len(self.model.layers) for place in range(len(self.kinds))]
        every = [rung for rung in RUNGS if all(rung in work.kept for work in layers)]
        found: list[tuple[float, float]] = []
        for rung in every:
            both = list(zip(layers, shares, strict=True))
            kept = sum(share * kept_here(work, rung, machine.plan, machine.samples) for work, share in both)
            found.append((kept, sum(share * machine.seconds(work, rung).total for work, share in both)))
        return _cheapest([(kept, seconds - found[0][1]) for kept, seconds in found])

    def class_seconds(self, machine: Machine) -> list[Seconds]:
        """Of each class of blocks that keeps everything."""
        key = _key(machine)
        if key not in self.seconds:
            self.seconds[key] = [machine.seconds(work, "none") for work in self.model.classes]
        return self.seconds[key]

    def __post_init__(self) -> None:
        blocks = self.model.blocks
        layers = set(self.model.layers)
        self.ends = tuple(block for block in range(len(blocks)) if block not in layers)
        """Blocks that are no layers; before[i]: how many of them are before block i."""
        self.before = list(accumulate((block not in layers for block in range(len(blocks))), initial=0))
        kinds = [place for place, work in enumerate(self.model.classes) if work.is_layer]
        self.kinds = tuple(kinds)
        self.counted = [
            list(accumulate((own == kind for own in blocks), initial=0)) for kind in kinds
        ]  # of each class of layers, how many are before block i
        self.parameters = list(accumulate((self.model.block(b).parameters for b in range(len(blocks))), initial=0.0))


def _cheapest(rungs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without those that a mix of two others beats. rungs: bytes and seconds, in the order of fewer bytes."""
    left: list[tuple[float, float]] = []
    for kept, seconds in rungs:
        if left and kept >= left[-1][0]:
            continue
        while len(left) > 1 and _above(left[-2], left[-1], (kept, seconds)):
            left.pop()
        left.append((kept, seconds))
    return left


def _above(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Whether the middle one takes longer than a mix of the others that keeps as much."""
    share = (first[0] - middle[0]) / (first[0] - last[0]) if first[0] > last[0] else 1.0
    return middle[1] >= first[1] + share * (last[1] - first[1])


def _exchanged(machine: Machine, model: ModelWork, parameters: float) -> float:
    """Seconds that replicas take for weights and gradients with every micro-batch."""
    plan, found = machine.plan, 0.0
    if plan.gathers == "micro-batch":
        found += 2 * machine.gather_seconds(parameters, model.width)
    if plan.reduces == "micro-batch" and plan.dp > 1:
        found += machine.reduce_seconds(model.trained * parameters)
    return found


def _key(machine: Machine) -> Key:
    """What a block's seconds and bytes depend on."""
    plan = machine.plan
    shared = plan.mb if plan.pairs else 0
    return machine.number, plan.tp, plan.sequence, plan.saves, machine.samples, plan.overlap, shared, machine.parts


class StageTimes:
    """Of one plan whose stages are open."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._problem, self._plan, self._samples = problem, plan, problem.samples(plan)
        self._places = machines(problem.cluster, problem.software, plan, self._samples)
        self._held: dict[int, float] = {}
        self._implied = OVERLAPS[plan.overlap].recompute
        self._times: dict[Key, tuple[float, Mix | None]] = {}
        self._runs_seen: dict[tuple[int, int, int], float] = {}

    # What blocks take.

    def time(self, place: int, begin: int, end: int) -> float:
        """Of a micro-batch; inf where it does not fit."""
        key = (place, begin, end)
        found = self._runs_seen.get(key)
        if found is None:
            found = self._runs_seen[key] = self._own(place, ((begin, end),))[0]
        return found

    def _own(self, place: int, runs: tuple[tuple[int, int], ...]) -> tuple[float, Mix | None]:
        problem, machine = self._problem, self._places[place]
        if len(runs) == 1:  # as almost always
            (begin, end) = runs[0]
            layers = tuple([own[end] - own[begin] for own in problem.counted])
            ends = problem.ends[problem.before[begin] : problem.before[end]]
        else:
            layers = tuple(sum(own[end] - own[begin] for begin, end in runs) for own in problem.counted)
            among = ((problem.before[begin], problem.before[end]) for begin, end in runs)
            ends = tuple(problem.ends[i] for begin, end in among for i in range(begin, end))
        held = self._held.get(place)
        if held is None:
            held = self._held[place] = num_held(self._plan, place)
        key = (machine.number, held, layers, ends)
        if key not in self._times:
            self._times[key] = self._worked_out(place, runs, layers, ends)
        return self._times[key]

    def _worked_out(
        self, place: int, runs: tuple[tuple[int, int], ...], layers: tuple[int, ...], ends: tuple[int, ...]
    ) -> tuple[float, Mix | None]:
        problem, machine = self._problem, self._places[place]
        model = problem.model
        parameters, largest = self._parameters(runs, layers, ends)
        gradient = problem.software.gradient
        room = budget_of(machine) - sum(state_bytes(model, self._plan, parameters, largest, gradient).values())
        if room <= 0:
            return math.inf, None
        if self._plan.slices:
            room -= self._past(layers)
        fixed = sum(self._end_seconds(machine, block) for block in ends)
        mix = self._mixer(machine, layers).best(sum(layers), self._held[place], room, self._ends(runs, ends))
        if mix is None or (self._plan.offload and self._on_host(place, mix, layers, parameters) > machine.host_memory):
            return math.inf, None
        return fixed + mix.seconds, mix

    def _on_host(self, place: int, mix: Mix, layers: tuple[int, ...], parameters: float) -> float:
        """Bytes that a place keeps in the memory of its host."""
        plan, model = self._plan, self._problem.model
        moved, samples, total = moved_share(plan, sum(layers)), self._samples, max(1, sum(layers))
        kinds = [(model.classes[kind], n / total) for kind, n in zip(self._problem.kinds, layers, strict=True) if n]
        kept = sum(
            count * share * kept_here(work, rung, plan, samples)
            for rung, count in mix.rungs for work, share in kinds
        )  # fmt: skip
        return moved * self._held[place] * kept + hosted_bytes(model, plan, parameters)

    def _parameters(
        self, runs: tuple[tuple[int, int], ...], layers: tuple[int, ...], ends: tuple[int, ...]
    ) -> tuple[float, float]:
        """Of a place, and of its largest block."""
        model, before = self._problem.model, self._problem.parameters
        total = sum(before[end] - before[begin] for begin, end in runs)
        if 0 in ends:
            total -= sum(model.block(block).tied for block in ends)
        present = [model.classes[kind] for kind, count in zip(self._problem.kinds, layers, strict=True) if count]
        return total, max(work.parameters for work in (*present, *map(model.block, ends)))

    def _past(self, layers: tuple[int, ...]) -> float:
        kinds = zip(self._problem.kinds, layers, strict=True)
        return sum(n * past_bytes(self._problem.model.classes[kind], self._plan, self._samples) for kind, n in kinds)

    def _end_rung(self, block: int) -> str:
        """Of a block that is no layer: it keeps everything, unless a name of `overlap` says what all compute again."""
        return self._implied if self._implied in self._problem.model.block(block).kept else "none"

    def _end_seconds(self, machine: Machine, block: int) -> float:
        if self._implied:
            return machine.seconds(self._problem.model.block(block), self._end_rung(block)).total
        return self._problem.class_seconds(machine)[self._problem.model.blocks[block]].total

    def _ends(self, runs: tuple[tuple[int, int], ...], ends: tuple[int, ...]) -> Ends:
        """What stands before the first layer, and all else as if it stood behind the last."""
        if not ends:
            return _NOTHING
        first = runs[0][0]
        while first in ends:
            first += 1
        sizes = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for block in ends:
            work, rung, own = self._problem.model.block(block), self._end_rung(block), sizes[block < first]
            own[0] += kept_here(work, rung, self._plan, self._samples)
            whole = self._problem.software.logits
            own[1] = max(own[1], working_bytes(work, rung, self._plan, self._samples, logits=whole))
        return Ends(*sizes[True], *sizes[False])

    def _mixer(self, machine: Machine, layers: tuple[int, ...]) -> Mixer:
        """Of the layers of a stage as they are on average."""
        total = sum(layers) or 1
        shares = tuple(round(count / total, 3) for count in layers)
        moved = moved_share(self._plan, sum(layers))
        key = (*_key(machine), shares, moved)
        if key not in self._problem.mixers:
            classes = [self._problem.model.classes[kind] for kind in self._problem.kinds]
            present = [(work, share) for work, share in zip(classes, shares, strict=True) if share]
            self._problem.mixers[key] = Mixer(self._options(machine, present, moved))
        return self._problem.mixers[key]

    def _options(self, machine: Machine, present: Sequence[tuple[BlockWork, float]], moved: float) -> list[Option]:
        plan, samples = self._plan, self._samples
        rungs = [rung for rung in RUNGS if all(rung in work.kept for work, _ in present)]
        if self._implied in rungs:
            rungs = [self._implied]
        return [
            Option(
                rung,
                sum(machine.seconds(work, rung, moved).total * share for work, share in present),
                sum(kept_here(work, rung, plan, samples, moved) * share for work, share in present),
                max((working_bytes(work, rung, plan, samples, moved) for work, _ in present), default=0.0),
            )
            for rung in rungs
        ]

    # Stages.

    def even(self) -> tuple[int, ...]:
        """Blocks of each stage, balanced by their time where nothing is computed again."""
        problem, plan = self._problem, self._plan
        key = (*_key(self._places[0]), plan.num_stages)
        if key not in problem.evens:
            seconds = problem.class_seconds(self._places[0])
            problem.evens[key] = evenly([seconds[own].total for own in problem.model.blocks], plan.num_stages)
        return problem.evens[key]

    def quick(self, limit: float = math.inf) -> Quick:
        """With even stages, of which a few are looked at. limit: more seconds are of no interest."""
        plan, counts = self._plan, self.even()
        places = self._looked_at(counts)
        runs = [self._runs(counts, place) for place in places]
        first = self._timed(0, runs[0])
        rest = plan.mb * first.waits + first.reduce + first.update + self._waiting() + self._problem.software.step
        kept = [self._problem.seconds_of(self._places[place], own) for place, own in zip(places, runs, strict=True)]
        free = self._step(kept, first) + rest
        if free >= limit:
            return Quick(math.inf, free)
        totals: list[float] = []
        for place, own in zip(places, runs, strict=True):
            totals.append(self._own(place, own)[0])
            if math.isinf(totals[-1]):
                return Quick(math.inf, free)
        return Quick(self._step(totals, first) + rest, free)

    def _looked_at(self, counts: tuple[int, ...]) -> list[int]:
        """The first, middle and last place of a pipeline, and the one with most blocks."""
        plan, known = self._plan, self._problem.looked_at
        key = (plan.pp, plan.v, plan.schedule == "zb-v", counts)
        if key not in known:
            sizes = [sum(counts[stage] for stage in plan.stages_of(place)) for place in range(plan.pp)]
            known[key] = sorted({0, plan.pp // 2, plan.pp - 1, sizes.index(max(sizes))})
        return known[key]

    def _step(self, totals: Sequence[float], first: Place) -> float:
        """Of places that take so long, of which the first is as given where it keeps everything."""
        plan, longest = self._plan, max(totals)
        others = (sum(totals) / len(totals) * plan.pp - longest) * self.drained()
        if plan.schedule == "zb-v":
            longest *= first.seconds.in_step / first.seconds.total
        return plan.mb * longest + others

    def _waiting(self) -> float:
        """For messages."""
        problem, plan = self._problem, self._plan
        key = (*_key(self._places[0]), plan.pp, plan.dp, plan.mb, plan.schedule, plan.v)
        if key not in problem.waiting:
            message = message_seconds(problem.model, plan, self._places)
            parts = step_parts(plan, [_IDLE] * plan.pp, message, problem.software)
            problem.waiting[key] = parts["messages"] + parts["bubble"]
        return problem.waiting[key]

    def _timed(self, place: int, runs: tuple[tuple[int, int], ...]) -> Place:
        problem, machine = self._problem, self._places[place]
        seconds = problem.class_seconds(machine)
        layers = tuple(sum(n[end] - n[begin] for begin, end in runs) for n in problem.counted)
        among = ((problem.before[begin], problem.before[end]) for begin, end in runs)
        ends = tuple(problem.ends[i] for begin, end in among for i in range(begin, end))
        kinds = [*zip(problem.kinds, layers, strict=True), *((problem.model.blocks[block], 1) for block in ends)]
        own = Seconds(*(sum(n * seconds[kind][part] for kind, n in kinds) for part in range(len(_IDLE.seconds))))
        parameters, largest = self._parameters(runs, layers, ends)
        return timed_place(problem.model, self._plan, machine, own, parameters, largest)

    def drained(self) -> float:
        """Of a stage's seconds, the share that adds to the time that others wait."""
        plan, places = self._plan, self._places
        key = (*_key(places[0]), plan.schedule, plan.v, plan.slices)
        if key not in self._problem.drained:
            self._problem.drained[key] = self._drained() * longest_slice(self._problem.model, plan, places[0])
        return self._problem.drained[key]

    def _drained(self) -> float:
        if self._plan.schedule == "zb-v":
            return 0.25
        if self._plan.schedule != "zb-h1":
            return 1.0 / self._plan.v
        own = self._problem.class_seconds(self._places[0])
        whole = Seconds(*map(sum, zip(*(own[place] for place in self._problem.model.blocks), strict=True)))
        return max(0.05, whole.drained / whole.total)

    def _runs(self, counts: Sequence[int], place: int) -> tuple[tuple[int, int], ...]:
        plan = self._plan
        edges = list(accumulate(counts, initial=0))
        return tuple((edges[stage], edges[stage + 1]) for stage in plan.stages_of(place))

    def best(self) -> tuple[int, ...] | None:
        """Blocks of each stage; None where nothing fits. Where a rank has several stages, what it holds is shared out
        among them: layers are alike."""
        plan, blocks = self._plan, len(self._problem.model.blocks)
        if plan.pp == 1:
            return (blocks,) if math.isfinite(self.time(0, 0, blocks)) else None
        if plan.schedule == "zb-v":  # whose first rank has the first stage and the last
            return self._if_fits(self.even())
        kinds = [self._problem.class_seconds(machine) for machine in set(self._places)]
        least = sum(min(seconds[own].total for seconds in kinds) for own in self._problem.model.blocks)
        share = self.drained()
        held = partition(blocks, plan.pp, self.time, (plan.mb - share) / share, least)
        if held is None or plan.v == 1:
            return held
        return self._if_fits(_shared_out(held, plan.v) if min(held) >= plan.v else self.even())

    def _if_fits(self, counts: tuple[int, ...]) -> tuple[int, ...] | None:
        times = (self._own(place, self._runs(counts, place))[0] for place in range(self._plan.pp))
        return counts if all(map(math.isfinite, times)) else None

    def estimate(self, counts: tuple[int, ...]) -> Estimate | None:
        """The whole plan, judged; None where it does not fit, such as when its layers are not all alike."""
        chosen: dict[int, str] = {}
        for place in range(self._plan.pp):
            runs = self._runs(counts, place)
            mix = self._own(place, runs)[1]
            if mix is None:
                return None
            layers = iter(b for begin, end in runs for b in range(begin, end) if b not in self._problem.ends)
            chosen |= {next(layers): rung for rung, count in mix.rungs for _ in range(count)}
        policies = tuple(chosen[block] for block in self._problem.model.layers)
        recompute = () if self._implied or set(policies) <= {"none"} else policies
        plan = replace(self._plan, stages=counts, recompute=recompute)
        found = estimate(self._problem.model, plan, self._problem.cluster, self._problem.software, self._problem.batch)
        return found if found.fits else None


def _shared_out(held: Sequence[int], v: int) -> tuple[int, ...]:
    """Blocks of each stage, from those of each rank: in rounds, the first ones with what is left over."""
    return tuple(count // v + (turn < count % v) for turn in range(v) for count in held)


_NOTHING = Ends()
_IDLE = Place(Seconds(0, 0, 0, 0, 0), 0, 0, 0, 0)

"""What runs of consecutive blocks take on each place of a pipeline, with what their layers compute again so that they
fit. What several plans have in common (a class of blocks under a degree and a number of samples) is worked out once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from phalanx.plan.cluster import Cluster
from phalanx.plan.cost import Machine, Seconds, Software, machines, num_held
from phalanx.plan.estimate import Estimate, Place, budget_of, estimate, message_seconds, step_parts, timed_place
from phalanx.plan.footprint import kept_bytes, state_bytes, working_bytes
from phalanx.plan.mixes import Ends, Mix, Mixer, Option
from phalanx.plan.partition import evenly, partition
from phalanx.plan.plan import Plan
from phalanx.plan.work import RUNGS, BlockWork, ModelWork

Key = tuple[object, ...]


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

    def samples(self, plan: Plan) -> int:
        """Of the largest micro-batch."""
        return -(-self.batch // (plan.dp * plan.mb))

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


def _key(machine: Machine) -> Key:
    """What a block's seconds and bytes depend on."""
    plan = machine.plan
    return machine.number, plan.tp, plan.sequence, plan.saves, machine.samples


class StageTimes:
    """Of one plan whose stages are open."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._problem, self._plan, self._samples = problem, plan, problem.samples(plan)
        self._places = machines(problem.cluster, problem.software, plan, self._samples)
        self._held = [num_held(plan, place) for place in range(plan.pp)]
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
        key = (machine.number, self._held[place], layers, ends)
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
        seconds = problem.class_seconds(machine)
        fixed = sum(seconds[model.blocks[block]].total for block in ends)
        mix = self._mixer(machine, layers).best(sum(layers), self._held[place], room, self._ends(runs, ends))
        return (math.inf, None) if mix is None else (fixed + mix.seconds, mix)

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

    def _ends(self, runs: tuple[tuple[int, int], ...], ends: tuple[int, ...]) -> Ends:
        """What stands before the first layer, and all else as if it stood behind the last."""
        if not ends:
            return _NOTHING
        first = runs[0][0]
        while first in ends:
            first += 1
        sizes = {True: [0.0, 0.0], False: [0.0, 0.0]}
        for block in ends:
            work, own = self._problem.model.block(block), sizes[block < first]
            own[0] += kept_bytes(work.kept["none"], self._plan) * self._samples
            own[1] = max(own[1], working_bytes(work, "none", self._plan, self._samples))
        return Ends(*sizes[True], *sizes[False])

    def _mixer(self, machine: Machine, layers: tuple[int, ...]) -> Mixer:
        """Of the layers of a stage as they are on average."""
        total = sum(layers) or 1
        shares = tuple(round(count / total, 3) for count in layers)
        key = (*_key(machine), shares)
        if key not in self._problem.mixers:
            classes = [self._problem.model.classes[kind] for kind in self._problem.kinds]
            present = [(work, share) for work, share in zip(classes, shares, strict=True) if share]
            self._problem.mixers[key] = Mixer(self._options(machine, present))
        return self._problem.mixers[key]

    def _options(self, machine: Machine, present: Sequence[tuple[BlockWork, float]]) -> list[Option]:
        rungs = [rung for rung in RUNGS if all(rung in work.kept for work, _ in present)]
        return [
            Option(
                rung,
                sum(machine.seconds(work, rung).total * share for work, share in present),
                sum(kept_bytes(work.kept[rung], self._plan) * share for work, share in present) * self._samples,
                max((working_bytes(work, rung, self._plan, self._samples) for work, _ in present), default=0.0),
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

    def quick(self) -> float:
        """About the seconds of a step: with even stages, of which a few are looked at; inf where they do not fit."""
        plan, counts = self._plan, self.even()
        places = sorted({0, plan.pp // 2, plan.pp - 1})
        runs = [self._runs(counts, place) for place in places]
        totals: list[float] = []
        for place, own in zip(places, runs, strict=True):
            totals.append(self._own(place, own)[0])
            if math.isinf(totals[-1]):
                return math.inf
        longest = max(totals)
        share = self.drained()
        first = self._timed(0, runs[0])
        waiting = plan.mb * first.waits + first.reduce + first.update
        others = (sum(totals) / len(totals) * plan.pp - longest) * share
        return plan.mb * longest + others + waiting + self._waiting() + self._problem.software.step

    def is_hopeless(self) -> bool:
        """Whether the state of all blocks is more than all places together have room for."""
        parameters = self._problem.model.num_parameters / self._plan.pp
        model, gradient = self._problem.model, self._problem.software.gradient
        state = sum(state_bytes(model, self._plan, parameters, 0.0, gradient).values())
        return state > max(map(budget_of, set(self._places)))

    def _waiting(self) -> float:
        """For messages."""
        problem, plan = self._problem, self._plan
        message = message_seconds(problem.model, plan, self._places)
        parts = step_parts(plan, [_IDLE] * plan.pp, message, problem.software)
        return parts["messages"] + parts["bubble"]

    def _timed(self, place: int, runs: tuple[tuple[int, int], ...]) -> Place:
        problem, machine = self._problem, self._places[place]
        seconds = problem.class_seconds(machine)
        blocks = [block for begin, end in runs for block in range(begin, end)]
        own = Seconds(*map(sum, zip(*(seconds[problem.model.blocks[block]] for block in blocks), strict=True)))
        layers = tuple(sum(n[end] - n[begin] for begin, end in runs) for n in problem.counted)
        parameters, largest = self._parameters(runs, layers, tuple(b for b in blocks if b in problem.ends))
        return timed_place(problem.model, self._plan, machine, own, parameters, largest)

    def drained(self) -> float:
        """Of a stage's seconds, the share that adds to the time that others wait."""
        if self._plan.schedule != "zb-h1":
            return 1.0 / self._plan.v
        own = self._problem.class_seconds(self._places[0])
        whole = Seconds(*map(sum, zip(*(own[place] for place in self._problem.model.blocks), strict=True)))
        return max(0.05, whole.drained / whole.total)

    def _runs(self, counts: Sequence[int], place: int) -> tuple[tuple[int, int], ...]:
        plan = self._plan
        edges = list(accumulate(counts, initial=0))
        return tuple((edges[stage], edges[stage + 1]) for stage in range(place, plan.num_stages, plan.pp))

    def best(self) -> tuple[int, ...] | None:
        """Blocks of each stage; None where nothing fits. Where a rank has several stages, what it holds is shared out
        among them: layers are alike."""
        plan, blocks = self._plan, len(self._problem.model.blocks)
        if plan.pp == 1:
            return (blocks,) if math.isfinite(self.time(0, 0, blocks)) else None
        kinds = [self._problem.class_seconds(machine) for machine in set(self._places)]
        least = sum(min(seconds[own].total for seconds in kinds) for own in self._problem.model.blocks)
        share = self.drained()
        held = partition(blocks, plan.pp, self.time, (plan.mb - share) / share, least)
        if held is None or plan.v == 1:
            return held
        counts = _shared_out(held, plan.v) if min(held) >= plan.v else self.even()
        times = [self._own(place, self._runs(counts, place))[0] for place in range(plan.pp)]
        return counts if math.isfinite(max(times)) else None

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
        recompute = () if set(policies) <= {"none"} else policies
        plan = replace(self._plan, stages=counts, recompute=recompute)
        found = estimate(self._problem.model, plan, self._problem.cluster, self._problem.software, self._problem.batch)
        return found if found.fits else None


def _shared_out(held: Sequence[int], v: int) -> tuple[int, ...]:
    """Blocks of each stage, from those of each rank: in rounds, the first ones with what is left over."""
    return tuple(count // v + (turn < count % v) for turn in range(v) for count in held)


_NOTHING = Ends()
_IDLE = Place(Seconds(0, 0, 0, 0, 0), 0, 0, 0, 0)

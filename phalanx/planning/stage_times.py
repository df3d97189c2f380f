"""What runs of consecutive blocks take on each place of a pipeline, with what their layers compute again so that they
fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from phalanx.plan.plan import Plan
from phalanx.plan.rules import divisors
from phalanx.planning.cost import Machine, Seconds, among_others, machines
from phalanx.planning.degrees import Degrees, split_block
from phalanx.planning.estimate import (
    Estimate,
    Place,
    estimate,
    longest_slice,
    message_seconds,
    step_parts,
    timed_place,
)
from phalanx.planning.footprint import (
    Largest,
    kept_here,
    moved_share,
    num_held,
    past_bytes,
    staged_bytes,
    state_widths,
    untied_of,
    working_bytes,
)
from phalanx.planning.layer_options import LayerOptions
from phalanx.planning.mixes import FEW, Ends, Mix, Option
from phalanx.planning.partition import evenly, partition
from phalanx.planning.problem import Problem, Runs
from phalanx.planning.sequences import MOST_LAYERS, Beside, Taken, together


class Quick(NamedTuple):
    """About the seconds of a step, inf where it does not fit; and what they would be if everything could be kept."""

    seconds: float
    free: float


class StageTimes:
    """Of one plan whose stages are open. in_order: whether few layers of different degrees are tried one after the
    other."""

    def __init__(self, problem: Problem, plan: Plan, in_order: bool = False) -> None:
        self._problem, self._plan, self._samples = problem, plan, problem.samples(plan)
        self._places = machines(problem.cluster, problem.software, plan, self._samples)
        self._held: dict[int, float] = {}
        self._implied = plan.policies[0] if plan.policies != ("none",) else ""  # by every block
        self._widths = state_widths(problem.model, plan, problem.software.gradient)
        self._staged = staged_bytes(problem.model, plan, problem.software.gradient)
        self._in_order = in_order
        self._layers = LayerOptions(problem, plan, self._samples, self._implied, self._widths)
        self._ends_seen: dict[tuple[tuple[int, ...], int], Ends] = {}
        self._times: dict[tuple[object, ...], tuple[float, Mix | None]] = {}
        self._runs_seen: dict[tuple[int, int, int], float] = {}

    # What blocks take.

    def time(self, place: int, begin: int, end: int) -> float:
        """Of a micro-batch; inf where it does not fit."""
        key = (place, begin, end)
        found = self._runs_seen.get(key)
        if found is None:
            found = self._runs_seen[key] = self._own(place, ((begin, end),))[0]
        return found

    def _own(self, place: int, runs: Runs) -> tuple[float, Mix | None]:
        problem, machine = self._problem, self._places[place]
        layers, ends = problem.blocks_of(runs)
        held = self._held.get(place)
        if held is None:
            held = self._held[place] = num_held(self._plan, place)
        key = (machine.kinds, held, layers, ends)
        if key not in self._times:
            self._times[key] = self._worked_out(place, runs, layers, ends)
        return self._times[key]

    def _worked_out(
        self, place: int, runs: Runs, layers: tuple[int, ...], ends: tuple[int, ...]
    ) -> tuple[float, Mix | None]:
        machine = self._places[place]
        parameters, largest = self._problem.parameters_of(runs, layers, ends)
        room = machine.budget - self._widths.total(parameters, largest)
        if room <= 0 or self._widths.total(parameters, Largest(0.0, 0.0)) + self._staged > machine.budget:
            return math.inf, None
        if self._plan.slices:
            room -= self._past(layers)
        fixed = sum(self._end_seconds(machine, block) for block in ends)
        mix = self._mixed(place, runs, layers, ends, room)
        if mix is None or (self._plan.offload and self._on_host(place, mix, layers, parameters) > machine.host_memory):
            return math.inf, None
        return fixed + mix.seconds, mix

    def _on_host(self, place: int, mix: Mix, layers: tuple[int, ...], parameters: float) -> float:
        """Bytes that a place keeps in the memory of its host."""
        plan, model = self._plan, self._problem.model
        if not dict(plan.offload).keys() & {"activations"}:
            return self._widths.hosted * parameters
        moved, samples, total = moved_share(plan, sum(layers)), self._samples, max(1, sum(layers))
        kinds = [(model.classes[kind], n / total) for kind, n in zip(self._problem.kinds, layers, strict=True) if n]
        kept = sum(
            count * share * kept_here(work, option.rung, plan, samples)
            for option, count in mix.options for work, share in kinds
        )  # fmt: skip
        return moved * self._held[place] * kept + self._widths.hosted * parameters

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

    def _ends(self, runs: Runs, ends: tuple[int, ...]) -> Ends:
        """What stands before the first layer, and all else as if it stood behind the last."""
        if not ends:
            return _NOTHING
        first = runs[0][0]
        while first in ends:
            first += 1
        if (ends, first) not in self._ends_seen:
            self._ends_seen[ends, first] = self._beside_layers(ends, first)
        return self._ends_seen[ends, first]

    def _beside_layers(self, ends: tuple[int, ...], first: int) -> Ends:
        """first: the first layer."""
        sizes, model = {True: [0.0, 0.0], False: [0.0, 0.0]}, self._problem.model
        for block, elements in zip(ends, untied_of(model, ends), strict=True):
            work, rung, own = model.block(block), self._end_rung(block), sizes[block < first]
            own[0] += kept_here(work, rung, self._plan, self._samples) - self._widths.single * elements
            whole = self._problem.software.logits
            own[1] = max(own[1], working_bytes(work, rung, self._plan, self._samples, logits=whole))
        return Ends(*sizes[True], *sizes[False])

    def _mixed(self, place: int, runs: Runs, layers: tuple[int, ...], ends: tuple[int, ...], room: float) -> Mix | None:
        """What layers take, each as it is on average. room: bytes for what they keep and what is at work."""
        machine, held, count = self._places[place], self._held[place], sum(layers)
        total, moved = count or 1, moved_share(self._plan, count)
        shares = tuple(round(own / total, 3) for own in layers)
        beside = self._ends(runs, ends)
        if not self._plan.degrees:
            return self._layers.mixer(machine, shares, moved).best(count, held, room, beside)
        if self._in_order and 0 < count <= MOST_LAYERS and len(self._problem.kinds) == 1:
            own = self._layers.sequences(machine, moved, held, count)
            return own.best(count, held, room, beside, self._beside(machine, runs, ends))
        mixer = self._layers.split_mixer(machine, shares, moved, held, is_few=count <= FEW)
        return mixer.best(count, held, room, beside)

    def _beside(self, machine: Machine, runs: Runs, ends: tuple[int, ...]) -> Beside:
        """What these blocks take that are no layers, beyond what they take where all is split over all ranks."""
        degrees, model = divisors(self._plan.tp), self._problem.model
        layers = [b for begin, end in runs for b in range(begin, end) if b not in ends]
        entering = len(degrees) - 1 if layers[0] - 1 in (-1, *self._problem.ends) else None

        def taken(block: int, degree: int) -> Taken:
            own = degree if block == layers[-1] + 1 else self._plan.tp
            work = split_block(model.block(block), (), own, self._plan)
            return self._layers.taken(machine, work, self._end_rung(block))

        found = [together([taken(block, degree) for block in ends]) for degree in degrees]
        return Beside(entering, [own._replace(seconds=own.seconds - found[-1].seconds) for own in found])

    # Stages.

    def even(self) -> tuple[int, ...]:
        """Blocks of each stage, balanced by their time where nothing is computed again."""
        return self._problem.once("even", (self._places[0].key, self._plan.num_stages), self._even)

    def _even(self) -> tuple[int, ...]:
        seconds = self._problem.class_seconds(self._places[0])
        return evenly([seconds[own].total for own in self._problem.model.blocks], self._plan.num_stages)

    def quick(self, limit: float = math.inf) -> Quick:
        """With even stages, of which a few are looked at. limit: more seconds are of no interest."""
        plan, counts = self._plan, self.even()
        places = self._looked_at(counts)
        runs = [self._runs(counts, place) for place in places]
        first = self._timed(0, runs[0])
        rest = (
            plan.mb * first.waits
            + first.reduce
            + first.update
            + first.fetch
            + self._waiting()
            + self._problem.software.step
        )
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
        """The first, middle and last place of a pipeline, and the one with most layers."""
        plan = self._plan
        key = (plan.pp, plan.v, plan.schedule == "zb-v", counts)
        return self._problem.once("looked at", key, lambda: self._ends_middle_and_largest(counts))

    def _ends_middle_and_largest(self, counts: tuple[int, ...]) -> list[int]:
        pp = self._plan.pp
        sizes = [sum(self._problem.blocks_of(self._runs(counts, place))[0]) for place in range(pp)]
        return sorted({0, pp // 2, pp - 1, sizes.index(max(sizes))})

    def _step(self, totals: Sequence[float], first: Place) -> float:
        """Of places that take so long, of which the first is as given where it keeps everything."""
        plan, longest = self._plan, max(totals)
        others = (sum(totals) / len(totals) * plan.pp - longest) * self.drained()
        if plan.schedule == "zb-v":
            longest *= first.seconds.in_step / first.seconds.total
        least = plan.mb * sum(totals) / len(totals)
        return among_others(plan.mb * longest + others, least, self._places[0].crowded)

    def _waiting(self) -> float:
        """For messages."""
        plan = self._plan
        key = (self._places[0].key, plan.pp, plan.dp, plan.mb, plan.schedule, plan.v)
        return self._problem.once("waiting", key, self._waited)

    def _waited(self) -> float:
        problem, plan = self._problem, self._plan
        message = message_seconds(problem.model, plan, self._places)
        parts = step_parts(plan, [_IDLE] * plan.pp, message, problem.software)
        return parts["messages"] + parts["bubble"]

    def _timed(self, place: int, runs: Runs) -> Place:
        machine = self._places[place]
        return timed_place(self._problem.model, self._plan, machine, *self._problem.load(machine, runs))

    def drained(self) -> float:
        """Of a stage's seconds, the share that adds to the time that others wait."""
        plan = self._plan
        return self._problem.once("drained", (self._places[0].key, plan.schedule, plan.v, plan.slices), self._drained)

    def _drained(self) -> float:
        return self._drained_whole() * longest_slice(self._problem.model, self._plan, self._places[0])

    def _drained_whole(self) -> float:
        """Where micro-batches are not cut."""
        if self._plan.schedule == "zb-v":
            return 0.25
        if self._plan.schedule != "zb-h1":
            return 1.0 / self._plan.v
        own = self._problem.class_seconds(self._places[0])
        whole = Seconds(*map(sum, zip(*(own[place] for place in self._problem.model.blocks), strict=True)))
        return max(0.05, whole.drained / whole.total)

    def _runs(self, counts: Sequence[int], place: int) -> Runs:
        plan = self._plan
        edges = list(accumulate(counts, initial=0))
        return tuple((edges[stage], edges[stage + 1]) for stage in plan.stages_of(place))

    def best(self) -> tuple[int, ...] | None:
        """Blocks of each stage; None where nothing fits. Where a rank has several stages, what it holds is shared out
        among them: layers are alike."""
        plan, blocks = self._plan, len(self._problem.model.blocks)
        if plan.pp == 1:
            return self.even() if math.isfinite(self.time(0, 0, blocks)) else None
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
        chosen: dict[int, Option] = {}
        for place in range(self._plan.pp):
            runs = self._runs(counts, place)
            mix = self._own(place, runs)[1]
            if mix is None:
                return None
            layers = iter(b for begin, end in runs for b in range(begin, end) if b not in self._problem.ends)
            chosen |= {next(layers): option for option, count in mix.options for _ in range(count)}
        options = [chosen[block] for block in self._problem.model.layers]
        recompute = self._plan.recompute if self._implied else tuple(option.rung for option in options)
        plan = replace(self._plan, stages=counts, recompute=recompute, degrees=self._degrees(options))
        found = estimate(self._problem.model, plan, self._problem.cluster, self._problem.software, self._problem.batch)
        return found if found.fits else None

    def _degrees(self, options: Sequence[Option]) -> tuple[Degrees, ...]:
        """Of the units of every layer; nothing where all have all ranks, and once where all have the same."""
        model, kinds = self._problem.model, self._problem.kinds
        if not self._plan.degrees:
            return ()
        places = [kinds.index(model.blocks[block]) for block in model.layers]
        found = [option.degrees[place] for option, place in zip(options, places, strict=True)]
        short = [own[:1] if len(set(own)) == 1 else own for own in found]
        if all(own == (self._plan.tp,) for own in short):
            return ()
        return tuple(short[:1] if len(set(short)) == 1 else short)


def worked_out(problem: Problem, plan: Plan) -> Estimate | None:
    """With the best stages and layers that compute again as little as fits; None where nothing does."""
    stages = StageTimes(problem, plan, in_order=problem.is_small)
    counts = stages.best()
    return None if counts is None else stages.estimate(counts)


def _shared_out(held: Sequence[int], v: int) -> tuple[int, ...]:
    """Blocks of each stage, from those of each rank: in rounds, the first ones with what is left over."""
    return tuple(count // v + (turn < count % v) for turn in range(v) for count in held)


_NOTHING = Ends()
_IDLE = Place(Seconds(0, 0, 0, 0, 0), 0, 0, 0, 0)

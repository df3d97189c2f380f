"""The ways to treat a layer, as rows of a table: what of it is computed again, and over how many ranks its units are
split; each with its seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from phalanx.plan.plan import Plan
from phalanx.plan.rules import divisors
from phalanx.planning.cost import Machine
from phalanx.planning.degrees import Degrees, split_block
from phalanx.planning.footprint import Largest, Widths, hosted_share, kept_here, working_bytes
from phalanx.planning.mixes import MOST_OPTIONS, Mixer, Option, undominated, worth_mixing
from phalanx.planning.problem import Problem
from phalanx.planning.sequences import Sequences, Taken, most_options
from phalanx.planning.work import RUNGS, BlockWork, Copied

Present = list[tuple[BlockWork, float]]  # kinds of layers, each with its share of those of a place


class LayerOptions:
    """Of one plan. implied: what all layers compute again, where that is given. widths: bytes of a parameter."""

    def __init__(self, problem: Problem, plan: Plan, samples: int, implied: str, widths: Widths) -> None:
        self._problem, self._plan, self._samples, self._implied, self._widths = problem, plan, samples, implied, widths
        self._sharding = plan.mb, plan.dp, plan.shards, plan.zero, plan.gathers, plan.reduces, plan.offload

    def mixer(self, machine: Machine, shares: tuple[float, ...], moved: float) -> Mixer:
        """Of layers that are split over all tensor-parallel ranks. shares: of each kind of layers; moved: of what they
        keep, the share that lies on the host in between."""
        key = (machine.key, shares, moved, self._widths.single)
        return self._problem.once("mixer", key, lambda: Mixer(self._rungs(machine, self._present(shares), moved)))

    def split_mixer(
        self, machine: Machine, shares: tuple[float, ...], moved: float, held: float, is_few: bool
    ) -> Mixer:
        """Of layers whose units may be split over fewer. is_few: so few layers that all options may be mixed."""

        def mixer() -> Mixer:
            options = self._split(machine, shares, moved)
            return Mixer(options if is_few else worth_mixing(options, held, MOST_OPTIONS))

        key = (machine.key, shares, moved, self._sharding, None if is_few else held)
        return self._problem.once("split mixer", key, mixer)

    def sequences(self, machine: Machine, moved: float, held: float, num_layers: int) -> Sequences:
        """Of so many layers of one kind."""
        most = most_options(num_layers)

        def sequences() -> Sequences:
            every = groupby(self._split(machine, (1.0,), moved), key=lambda option: option.degrees)
            own = [option for _, alike in every for option in undominated(list(alike))]
            options = own if len(own) <= most else worth_mixing(own, held, most)
            degrees = divisors(self._plan.tp)
            taken = [[self._after(machine, option, moved, degree) for degree in degrees] for option in options]
            contention = self._problem.software.contention
            return Sequences(options, taken, degrees, self._sums_per_micro_batch, contention)

        key = (machine.key, moved, self._sharding, held, most)
        return self._problem.once("sequences", key, sequences)

    def _present(self, shares: Sequence[float], degrees: Sequence[Degrees] = ()) -> Present:
        problem = self._problem
        works = [problem.model.classes[kind] for kind in problem.kinds]
        if degrees:
            works = [problem.split(work, own, self._plan) for work, own in zip(works, degrees, strict=True)]
        return [(work, share) for work, share in zip(works, shares, strict=True) if share]

    def _rungs(self, machine: Machine, present: Present, moved: float) -> list[Option]:
        """What layers may compute again."""
        plan, samples = self._plan, self._samples
        rungs = [rung for rung in RUNGS if all(rung in work.kept for work, _ in present)]
        if self._implied in rungs:
            rungs = [self._implied]
        return [
            Option(
                rung,
                sum(machine.seconds(work, rung, moved).total * share for work, share in present),
                sum(self._left(work, rung, moved) * share for work, share in present),
                max((working_bytes(work, rung, plan, samples, moved) for work, _ in present), default=0.0),
            )
            for rung in rungs
        ]

    def _left(self, work: BlockWork, rung: str, moved: float) -> float:
        """What a layer's backward frees that was kept for it, beyond what it leaves."""
        kept = kept_here(work, rung, self._plan, self._samples, moved)
        return kept - self._widths.single * work.parameters

    def _split(self, machine: Machine, shares: Sequence[float], moved: float) -> list[Option]:
        """For every way to split units, beside others like it: with the parameters that then lie on several groups of
        ranks, and what these take for them in a step, as a part of each micro-batch."""
        whole, found = self._present(shares), list[Option]()
        for degrees in self._problem.splits(self._plan):
            present = self._present(shares, degrees)
            both = list(zip(present, whole, strict=True))
            more = sum(share * (own.parameters - work.parameters) for (own, share), (work, _) in both)
            seconds = sum(share * self._copies_take(machine, own, work) for (own, share), (work, _) in both)
            state = self._widths.total(more, Largest(0.0, 0.0))
            beside = 2 * (self._widths.gathered + self._widths.reduced) * more
            found += [
                option._replace(
                    seconds=option.seconds + seconds / self._plan.mb, working=option.working + beside, state=state,
                    degrees=degrees,
                )
                for option in self._rungs(machine, present, moved)
            ]  # fmt: skip
        return found

    def _copies_take(self, machine: Machine, own: BlockWork, work: BlockWork) -> float:
        """Of a step, what a layer takes longer whose parameters several groups of ranks have: its update, and what
        summing their gradients slows computation."""
        slowed = self._problem.software.contention * self._plan.mb * self._sums_per_micro_batch
        update, reduce = self._update(machine, own), self._reduce(machine, own)
        return update - self._update(machine, work) + slowed * (reduce - self._reduce(machine, work))

    @property
    def _sums_per_micro_batch(self) -> float:
        """How often gradients are summed for each."""
        return 1 / self._plan.mb if self._plan.reduces == "step" else 1.0

    def _update(self, machine: Machine, work: BlockWork) -> float:
        model, trained = self._problem.model, self._problem.model.trained * work.parameters
        return machine.update_seconds(trained, model.width, model.state_width, hosted_share(model, self._plan))

    def _reduce(self, machine: Machine, work: BlockWork) -> float:
        trained, copied = self._problem.model.trained, work.copied or (Copied(1, work.parameters),)
        return sum(machine.reduce_seconds(trained * own.elements, own.copies) for own in copied)

    def _after(self, machine: Machine, option: Option, moved: float, entering: int) -> Taken:
        """A layer that what has this degree enters, with its part of the update."""
        work, (degrees,) = self._problem.model.classes[self._problem.kinds[0]], option.degrees
        split = split_block(work, degrees, entering, self._plan)
        own = self.taken(machine, split, option.rung, moved)
        return own._replace(seconds=own.seconds + self._update(machine, split) / self._plan.mb)

    def taken(self, machine: Machine, work: BlockWork, rung: str, moved: float = 0.0) -> Taken:
        """By a block."""
        own = machine.seconds(work, rung, moved)
        window = self._problem.software.hidden * (own.backward + own.weight + own.again)
        last = machine.reduce_seconds(self._problem.model.trained * work.parameters)
        return Taken(own.total, self._reduce(machine, work), window, last)

"""What a step of a plan is predicted to take, from what `own_runs_rank.py` measured apart from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from own_runs_rank import REFERENCES, Seen, Task, kinds_of, usual

from phalanx.engine.describe import describe
from phalanx.model.captured import Captured
from phalanx.plan.plan import Plan
from phalanx.predict.costs import Costs
from phalanx.predict.from_facts import Device, costs_of_facts
from phalanx.predict.from_profile import RankProfile, Reference, SegmentSeconds, overheads, profiled
from phalanx.predict.simulate import seconds_among_others, simulate
from phalanx.predict.split_facts import Split, SplitFacts
from phalanx.profile.beside import Seen as Beside
from phalanx.program.compile import CompiledPlan, compile_plan


class Known:
    """What was measured, as predictions use it. is_apart: every rank has its own network."""

    def __init__(self, task: Task, captured: Captured, seen: Seen, is_apart: bool = False) -> None:
        self._task, self._captured, self._seen = task, captured, seen
        self._kinds, self._described = kinds_of(task, captured), dict[Split, SplitFacts]()
        self._nodes = tuple(range(task.world)) if is_apart else ()
        others = joined(seen.others)
        elements = sum(self._facts(Plan()).elements)
        self._profile = RankProfile(
            statistics.median(seen.update) / elements, issue=others.issue, start=others.start,
            meeting=others.meeting, transfers=others.transfers, beside=others.beside,
        )  # fmt: skip
        per_micro_batch, per_step = overheads([self._reference(mb) for mb in REFERENCES])
        self._profile = replace(self._profile, input=per_micro_batch, step=per_step)

    def step(self, name: str, plan: Plan) -> float:
        """Seconds of a step of one of the task's plans."""
        return seconds_among_others(self._program(plan), self._costs(name, plan, (0,) * self._task.world))

    def bubble(self, name: str, plan: Plan) -> float:
        return simulate(self._program(plan), self._costs(name, plan, (0,) * self._task.world)).mean_bubble

    def _reference(self, mb: int) -> Reference:
        """One rank while all others do the same, which its seconds already hold."""
        plan = Plan(mb=mb, stages=(len(self._captured.blocks.blocks),))
        costs = self._costs(f"reference {mb}", plan, (0,))
        simulated = seconds_among_others(self._program(plan), costs)
        return Reference(mb, statistics.median(self._seen.references[mb]), simulated)

    def _program(self, plan: Plan) -> CompiledPlan:
        return compile_plan(plan, self._facts(plan).eager)

    def _costs(self, name: str, plan: Plan, devices: tuple[int, ...]) -> Costs:
        kind, samples = self._kinds[name]
        facts = self._facts(plan)
        dims = self._captured.dims({n: t[:samples] for n, t in self._task.setting.batch().items()})
        assumed = costs_of_facts(facts, facts.eager, dims, Device(), plan.sum_bytes)
        times = self._seen.segments[replace(kind, mb=samples)]
        segments = {place: SegmentSeconds(*usual(own)) for place, own in times.items()}
        return profiled(
            assumed, segments, facts.elements, self._profile, devices, self._nodes if plan.world > 1 else ()
        )

    def _facts(self, plan: Plan) -> SplitFacts:
        split = Split.of(plan)
        if split not in self._described:
            self._described[split] = describe(self._captured, plan, self._task.setting.dtype, "cpu")
        return self._described[split]


def joined(seen: Sequence[Beside]) -> Beside:
    """The medians of all passes."""

    def points(key: tuple[str, int]):
        columns = zip(*(own.transfers[key] for own in seen), strict=True)
        return tuple((column[0][0], statistics.median(seconds for _, seconds in column)) for column in columns)

    beside = {key: tuple(map(statistics.median, zip(*(own.beside[key] for own in seen), strict=True)))
              for key in seen[0].beside}  # fmt: skip
    meeting = {size: statistics.median(own.meeting[size] for own in seen) for size in seen[0].meeting}
    issue, start = (statistics.median(getattr(own, name) for own in seen) for name in ("issue", "start"))
    return Beside({key: points(key) for key in seen[0].transfers}, beside, issue, start, meeting)

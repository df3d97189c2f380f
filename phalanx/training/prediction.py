"""What a step should take, from what its instructions took in the first steps of the run.

The second and third step of a run are recorded, on all ranks alike. Those of the first pipeline, which stands for all,
tell rank 0 what they saw, and rank 0 simulates the plan with it. A device that was not measured predicts nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from phalanx.engine.compiled import Compiled
from phalanx.engine.measured import Recorder, clock_ahead, recording
from phalanx.engine.memory import bucket_costs
from phalanx.launch.context import RankContext
from phalanx.predict.from_steps import Moment, Report, costs_of, report
from phalanx.predict.simulate import seconds_among_others
from phalanx.program.compile import CompiledPlan
from phalanx.program.instructions import Instruction
from phalanx.session.session import Session
from phalanx.state.rendezvous import MissingRanks, StoreRendezvous

NUM_RECORDED = 2
NUM_STEPS = 1 + NUM_RECORDED  # the first of a run compiles
_KEY = "what instructions took"


@dataclass(frozen=True)
class Seen:
    """What the ranks of one pipeline reported of measured steps, first to last, and what a step takes by that."""

    programs: CompiledPlan
    reports: list[Report]
    step_seconds: float


class Predictor:
    """One rank's part; it is told of every step with this session, from the first on. name: another one for every
    session of a job. seen: on rank 0, once it was due."""

    seen: Seen | None = None

    def __init__(self, session: Session, context: RankContext, timeout: float, name: str = "") -> None:
        self._session, self._context, self._timeout, self._key = session, context, timeout, f"{_KEY}{name}"
        self._recording = contextlib.ExitStack()
        self._recorder: Recorder | None = None
        self._paused: list[float] = []
        self._count = 0

    @contextlib.contextmanager
    def step(self, paused_seconds: float) -> Iterator[None]:
        """Around a step. paused_seconds: how long the run has been busy so far with what is no part of a step."""
        self._count += 1
        if self._count == NUM_STEPS - NUM_RECORDED + 1:
            self._recorder = self._recording.enter_context(recording(self._session.step.engine))
        if self._count <= NUM_STEPS:
            self._paused.append(paused_seconds)
        yield
        if self._count == NUM_STEPS:
            self._recording.close()

    @property
    def is_due(self) -> bool:
        return self._count == NUM_STEPS

    @property
    def was_due(self) -> bool:
        return self._count >= NUM_STEPS

    def fields(self, memory: int) -> dict[str, Any]:
        """What a record says of it, and why of something it says nothing; on rank 0. Every rank must come here when it
        is due. memory: bytes that were predicted before the first step."""
        try:
            seconds = self.seconds()
        except MissingRanks as missing:  # nothing depends on it, and who failed will be said elsewhere
            return {"no_step_seconds": str(missing)}
        if seconds is None:
            return {}
        found: dict[str, Any] = {"predicted_step_seconds": seconds}
        if self._session.compiled.device.type != "cuda":
            return found | {"no_memory": "what a process holds in main memory is more than its tensors"}
        return found | {"predicted_memory_bytes": memory}

    def seconds(self) -> float | None:
        """What a step takes, from its beginning to that of the next; on rank 0."""
        compiled, context = self._session.compiled, self._context
        ahead = clock_ahead(context, self._session.connected.world) if compiled.plan.pp > 1 else 0.0
        formation = compiled.formation
        if formation.dp_index or formation.tp_index:
            return None
        steps = self._moments(ahead)
        sizes = [bucket.weight_bytes for bucket in bucket_costs(compiled)]
        own = report(compiled.programs, compiled.rank, steps, lambda it: _alike(compiled, it), sizes)
        reports = [own]
        if compiled.plan.pp > 1:
            meeting = StoreRendezvous(context.store, formation.pp_index)
            meeting.arrive(self._key, own.to_json())
            if context.rank == 0:
                reports = [
                    Report.from_json(text) for text in meeting.wait_all(self._key, compiled.plan.pp, self._timeout)
                ]
        if context.rank > 0:
            return None
        seconds = seconds_among_others(compiled.programs, costs_of(compiled.programs, reports)) + self._between(steps)
        self.seen = Seen(compiled.programs, reports, seconds)
        return seconds

    def _moments(self, ahead: float) -> list[list[Moment]]:
        """Of each recorded step, on rank 0's clock."""
        assert self._recorder is not None
        found = [Moment(*(time - ahead for time in moment)) for moment in self._recorder.moments()]
        length = len(found) // NUM_RECORDED
        return [found[i : i + length] for i in range(0, len(found), length)]

    def _between(self, steps: list[list[Moment]]) -> float:
        """From the end of one program to the beginning of the next: the batch, and whatever is said about a step."""
        *_, (before, after) = pairwise(steps)
        *_, earlier, later = self._paused
        return max(0.0, after[0].begin - before[-1].end - (later - earlier))


def _alike(compiled: Compiled, it: Instruction) -> Hashable:
    """Of blocks with the same template, those take equally long whose gradients are wanted alike."""
    assert it.block is not None
    trained, blocks = compiled.formation.shape.trained, compiled.graph.model.blocks
    first = trained.index(True) if True in trained else len(trained)
    return (blocks[it.block].template, it.op_index, trained[it.block], it.block > first, it.slice,
            it.micro_batch if it.slice is not None else None)  # fmt: skip

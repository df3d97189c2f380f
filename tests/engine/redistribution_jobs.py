"""What ranks are asked to do in tests that count collectives."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.comm.links import Links
from phalanx.launch.context import RankContext
from phalanx.program.instructions import REDISTRIBUTIONS, Instruction
from tests.captured import Case


@dataclass(frozen=True)
class Sent:
    """A collective that really went over the links, and the instruction that started it."""

    op: str
    block: int
    kind: str
    bytes: int


@dataclass
class Counter:
    """Watches a rank's links: what each instruction adds to their traffic."""

    links: Links
    sent: list[Sent] = field(default_factory=list)
    _before: dict[str, tuple[int, int]] = field(default_factory=dict)

    def begin(self, instruction: Instruction) -> None:
        self._before = self._traffic()

    def ready(self, instruction: Instruction) -> None:
        pass

    def end(self, instruction: Instruction) -> None:
        if instruction.op not in REDISTRIBUTIONS:
            return
        for kind, (calls, size) in self._traffic().items():
            calls_before, size_before = self._before.get(kind, (0, 0))
            assert calls - calls_before in (0, 1) and instruction.block is not None
            if calls > calls_before:
                self.sent.append(Sent(str(instruction.op), instruction.block, kind, size - size_before))

    def _traffic(self) -> dict[str, tuple[int, int]]:
        return {kind: (traffic.calls, traffic.bytes) for kind, traffic in self.links.traffic.items()}


def count(context: RankContext, case: Case, plan: str) -> list[Sent]:
    """The collectives of one training step."""
    session = case.session(plan, context=context)
    counter = Counter(session.connected.links)
    session.step.engine.watches.append(counter)
    session.step(case.batch, 0, lr=0.0)
    session.close()
    return counter.sent

"""A machine that runs a program on names of wires instead of tensors, and drops them when it is told to."""

from __future__ import annotations

from collections import defaultdict

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.lifetimes import Leaving, drops, stays
from phalanx.program.shape import ModelShape
from phalanx.program.wires import Wires

Place = tuple[int | None, int | None, int | None, int | None]  # stage, micro-batch, slice, half


def leaving_of(plan: Plan) -> Leaving:
    """Of models in which block n reads h{n} and writes h{n + 1}, and nothing else crosses."""
    return lambda stage: {f"h{plan.stage_blocks(stage)[-1] + 1}"}


class Machine:
    """Reads fail where a wire is not there. `there` is what is left behind."""

    def __init__(self, plan: Plan, shape: ModelShape, program: Program, leaving: Leaving | None = None) -> None:
        self.leaving = leaving or leaving_of(plan)
        self.plan, self.shape, self.wires = plan, shape, Wires(shape)
        self.drops, self.stays = drops(program, shape, self.leaving), stays(program, shape, self.leaving)
        self.there: defaultdict[Place, set[str]] = defaultdict(set)
        self.gathered: set[tuple[Place, str]] = set()
        self.last = {self.place(it): it for it in program if it.op in (Op.F, Op.CF, Op.SEND_F)}
        self.sending = {it.stage for it in program if it.op is Op.SEND_F}
        for instruction in program:
            self.run(instruction)

    def place(self, it: Instruction, wire: str = "") -> Place:
        """Where a wire is kept: with the slice, or with the micro-batch it belongs to."""
        return it.stage, it.micro_batch, None if wire in self.shape.whole_wires else it.slice, it.half

    def run(self, it: Instruction) -> None:
        if it.step is not None and it.block is not None and it.op in (Op.F, Op.CF, Op.A, Op.CA):
            step = self.shape.steps_of(it.block)[it.step]
            for wire in step.reads:
                self.read(it, wire)
            for wire in step.writes:
                self.there[self.place(it, wire)].add(wire)
                self.gathered |= {(self.place(it, wire), wire)} if it.op is Op.CA else set()
        elif it.step is not None and it.block is not None and it.op in (Op.B, Op.BW) and not self.plan.again:
            for wire in self.shape.steps_of(it.block)[it.step].reads:
                origin = self.wires.origin(wire)
                if (self.place(it, origin), origin) in self.gathered:
                    self.read(it, wire)
        if self.last.get(self.place(it)) == it:
            self.hand_on(it)
        for wire in self.drops.get(it, ()):
            assert wire in self.there[self.place(it, wire)], f"{it} drops {wire}, which is not there"
            self.there[self.place(it, wire)].remove(wire)

    def read(self, it: Instruction, wire: str) -> None:
        if wire in self.there[self.place(it, wire)]:
            return
        assert it.stage is not None
        source = self.wires.source(wire, self.plan.stage_blocks(it.stage))
        if source is None:
            # Only what comes from the stage before is nobody's result; after the forward it must still be there.
            assert it.op in (Op.F, Op.CF, Op.SEND_F), f"{it} misses {wire}"
            assert wire in self.arriving(it), f"{it} misses {wire}"
        else:
            self.read(it, source)
        self.there[self.place(it, wire)].add(wire)

    def arriving(self, it: Instruction) -> set[str]:
        assert it.stage is not None
        wires = set(self.leaving(it.stage - 1)) if it.stage else {"h0"}
        return wires - self.shape.whole_wires if it.slice else wires

    def hand_on(self, it: Instruction) -> None:
        """What is not sent is taken by the next stage later; it is whole by then all the same."""
        assert it.stage is not None
        own = set(self.leaving(it.stage)) - (self.shape.whole_wires if it.slice else set())
        for wire in own:
            self.read(it, wire)
        for wire in own - self.stays.get(it.stage, frozenset()) if it.op is Op.SEND_F else ():
            self.there[self.place(it, wire)].remove(wire)

    def left_behind(self) -> set[str]:
        """But for what the next stage takes from the same rank."""
        return {
            wire
            for (stage, *_), wires in self.there.items()
            for wire in wires
            if stage is not None and (stage in self.sending or wire not in self.leaving(stage))
        }

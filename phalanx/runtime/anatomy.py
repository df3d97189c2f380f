"""How the model's blocks are made of segments and exchanges on this rank, and what a program does with them.

Without tensor parallelism every block is one segment. Everything here follows from the program and is known before it
runs; nothing is decided while it runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from phalanx.model.graph.blocks import Blocks
from phalanx.model.shard.sharded import Part, Sharded
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.lifetimes import drops, stays
from phalanx.program.shape import ModelShape

_Place = tuple[int | None, int | None, int | None, int | None, int | None]


@dataclass(frozen=True)
class Anatomy:
    """model: the blocks that a plan speaks of. segments: what is run. parts: how the former are made of the latter."""

    model: Blocks
    segments: Blocks
    parts: tuple[tuple[Part, ...], ...]

    @staticmethod
    def of(model: Blocks, sharded: Sharded | None) -> Anatomy:
        if sharded is not None:
            return Anatomy(model, sharded.blocks, sharded.parts)
        return Anatomy(model, model, tuple((Part(segment=number),) for number in range(len(model.blocks))))

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor degree of each segment."""
        found = {part.segment: part.degree for block in self.parts for part in block if part.segment is not None}
        return tuple(found[number] for number in range(len(self.segments.blocks)))

    def part(self, instruction: Instruction) -> Part:
        assert instruction.block is not None
        return self.parts[instruction.block][instruction.step or 0]

    def segment(self, instruction: Instruction) -> int:
        number = self.part(instruction).segment
        assert number is not None, f"{instruction} is not about a segment"
        return number

    def crossing(self, plan: Plan, stage: int) -> tuple[str, ...]:
        """The wires that a stage hands on; the last one the loss."""
        if stage == plan.num_stages - 1:
            return (self.model.loss,)
        return self.model.crossing(plan.stage_blocks(stage + 1)[0])


@dataclass
class Knowledge:
    """What is known of programs before they run: which wires are done with after an instruction, which forwards keep
    nothing because they are done again, and which of those must give their outputs too."""

    drops: dict[Instruction, tuple[str, ...]] = field(default_factory=dict)
    stays: dict[int, frozenset[str]] = field(default_factory=dict)
    again: set[_Place] = field(default_factory=set)
    gives: set[Instruction] = field(default_factory=set)
    regathered: dict[Instruction, tuple[str, ...]] = field(default_factory=dict)

    def learn(self, program: Program, plan: Plan, shape: ModelShape, anatomy: Anatomy) -> None:
        if not shape.steps:
            done = {stage: _done_with(stage, plan, shape, anatomy) for stage in {it.stage for it in program}}
            self.drops |= {it: done[it.stage].get(it.block, ()) for it in program if it.op is Op.F}
            return

        def leaving(stage: int) -> Collection[str]:
            return anatomy.crossing(plan, stage)

        self.drops |= drops(program, shape, leaving)
        self.stays |= stays(program, shape, leaving)
        self.again |= {_place(it) for it in program if it.op is Op.A}
        self.gives |= _giving(program, shape)
        self.regathered |= self._regathered(program, shape)

    def keeps(self, instruction: Instruction) -> bool:
        """Whether a forward leaves something for its backward."""
        return _place(instruction) not in self.again

    def _regathered(self, program: Program, shape: ModelShape) -> dict[Instruction, tuple[str, ...]]:
        """Per forward of a segment that is not done again, the inputs that a collective brings again."""
        wires = {
            (it.stage, it.micro_batch, it.half, wire)
            for it in program
            if it.op is Op.CA and it.block is not None and it.step is not None
            for wire in shape.steps_of(it.block)[it.step].writes
        }
        found: dict[Instruction, tuple[str, ...]] = {}
        for it in program:
            if it.op is Op.F and it.block is not None and it.step is not None and self.keeps(it):
                reads = shape.steps_of(it.block)[it.step].reads
                found[it] = tuple(w for w in reads if (it.stage, it.micro_batch, it.half, w) in wires)
        return {it: gone for it, gone in found.items() if gone}


def _place(it: Instruction) -> _Place:
    return it.stage, it.micro_batch, it.half, it.block, it.step


def _giving(program: Iterable[Instruction], shape: ModelShape) -> set[Instruction]:
    """The repetitions whose outputs another repetition reads."""
    exchanges = {step.writes[0]: step for steps in shape.steps for step in steps if step.kind == "exchange"}
    read: set[tuple[int | None, int | None, int | None, str]] = set()
    found: set[Instruction] = set()
    for it in reversed(list(program)):
        if it.op not in (Op.A, Op.CA):
            continue
        assert it.block is not None and it.step is not None
        step, place = shape.steps_of(it.block)[it.step], (it.stage, it.micro_batch, it.half)
        if it.op is Op.A and any((*place, wire) in read for wire in step.writes):
            found.add(it)
        for wire in step.reads:
            read.add((*place, wire))
            while (maker := exchanges.get(wire)) is not None and not maker.forward:
                wire = maker.reads[0]
                read.add((*place, wire))
    return found


def _done_with(stage: int | None, plan: Plan, shape: ModelShape, anatomy: Anatomy) -> dict[int | None, tuple[str, ...]]:
    """Per block of a stage the wires that nobody there needs once it has run, where blocks are single segments. What
    belongs to all slices of a micro-batch goes when the micro-batch does."""
    if stage is None:  # of what concerns the whole step
        return {}
    blocks, stays = anatomy.model.blocks, {*anatomy.crossing(plan, stage), *shape.whole_wires}
    last: dict[str, int] = {}
    for number in plan.stage_blocks(stage):
        last |= dict.fromkeys((*blocks[number].outputs, *blocks[number].names("wire")), number)
    found: dict[int | None, tuple[str, ...]] = {}
    for wire, number in last.items():
        if wire not in stays:
            found[number] = (*found.get(number, ()), wire)
    return found

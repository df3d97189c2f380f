"""When wires are dropped: a machine that runs the programs and drops them so always has what it reads, and no leak."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings

from phalanx.plan.plan import Plan
from phalanx.program.instructions import Instruction, Op, Program, from_text
from phalanx.program.lifetimes import Leaving, drops, stays
from phalanx.program.lower import lower, lower_forward
from phalanx.program.shape import ModelShape
from phalanx.program.wires import Wires
from tests.program.tensor_shapes import exchange, segment, stack, tensor_cases

Case = tuple[Plan, ModelShape]
Place = tuple[int | None, int | None, int | None]


def dropped(plan_text: str, shape: ModelShape) -> dict[str, tuple[str, ...]]:
    plan = Plan.parse(f"tp=2,{plan_text}")
    found = drops(lower(plan, shape)[0], shape, leaving_of(plan))
    return {str(instruction): tuple(sorted(wires)) for instruction, wires in found.items()}


def leaving_of(plan: Plan) -> Leaving:
    return lambda stage: {f"h{plan.stage_blocks(stage)[-1] + 1}"}


def test_a_wire_is_dropped_after_its_last_reader_and_a_source_when_its_target_was_made() -> None:
    assert dropped("stages=1", stack(1)) == {
        "F0.0/0:2": ("e0", "n0"),
        "CF0.0/0:3": ("p0",),
        "F0.0/0:4": ("a0", "h0"),
        "F0.0/0:6": ("f0", "m0"),
        "CF0.0/0:7": ("q0",),
        "F0.0/0:8": ("o0", "r0"),
    }


def test_what_is_computed_again_reads_is_kept_and_what_it_writes_is_not() -> None:
    found = dropped("overlap=optim_comm_checkpoint,stages=1", stack(1))
    assert found["F0.0/0:2"] == ("e0", "n0")  # A0.0/0:0 writes n0 again
    assert "F0.0/0:4" not in found  # h0 and a0 are read by A0.0/0:4
    assert found["A0.0/0:6"] == ("f0", "m0", "q0")  # nothing reads q0: its sum was kept
    assert found["A0.0/0:4"] == ("a0", "r0")
    assert found["A0.0/0:0"] == ("h0",)
    assert found["A0.0/0:8"] == ("h1", "o0", "r0")  # a copy of the output that nobody waits for


def test_a_gather_done_again_keeps_its_input_until_then_and_its_result_until_the_backward() -> None:
    found = dropped("sequence=yes,save=input,stages=1", stack(1, sequence=True))
    assert found["F0.0/0:2"] == ("e0",) and found["CA0.0/0:1"] == ("n0",)
    assert found["B0.0/0:2"] == ("e0",)
    again = dropped("sequence=yes,save=input,overlap=optim_comm_checkpoint,stages=1", stack(1, sequence=True))
    assert again["F0.0/0:2"] == ("e0",) and again["A0.0/0:2"] == ("e0", "p0") and "B0.0/0:2" not in again


def test_halves_are_dropped_by_themselves() -> None:
    found = dropped("overlap=halves,stages=1", stack(1))
    assert found["F0.0a/0:2"] == found["F0.0b/0:2"] == ("e0", "n0")


def test_a_wire_that_leaves_is_left_to_what_hands_it_on_unless_it_is_read_again() -> None:
    # h0 goes on to the next stage, and is read when the block is computed again.
    shape = ModelShape(1, (), (True,), (True,), ((segment("h0", "h1"),),))
    plan = Plan.parse("tp=2,overlap=default_checkpoint,stages=1")
    program = lower(plan, shape)[0]

    def both(stage: int) -> tuple[str, str]:
        return "h0", "h1"

    assert {str(it): set(wires) for it, wires in drops(program, shape, both).items()} == {"A0.0/0:0": {"h0", "h1"}}
    assert stays(program, shape, both) == {0: frozenset(("h0",))}
    assert stays(program, shape, leaving_of(plan)) == {}


def test_the_source_of_a_wire_that_leaves_lives_until_it_is_sent() -> None:
    shape = ModelShape(1, (), (True,), (True,), ((segment("h0", "x"), exchange("x", "h1", ((0, 1),))),))
    leaving = leaving_of(Plan(stages=(1,)))
    sent = drops(from_text("F0.0/0:0 SF0.0>2"), shape, leaving)
    assert {str(it): wires for it, wires in sent.items()} == {"F0.0/0:0": ("h0",), "SF0.0>2": ("x",)}
    kept = drops(from_text("F0.0/0:0"), shape, leaving)
    assert {str(it): set(wires) for it, wires in kept.items()} == {"F0.0/0:0": {"h0", "x"}}


def test_blocks_without_steps_have_no_wires_here() -> None:
    plan = Plan(stages=(2,))
    shape = ModelShape(2, (), (True,) * 2, (True,) * 2)
    assert drops(lower(plan, shape)[0], shape, leaving_of(plan)) == {}


class Machine:
    """Runs a program on names instead of tensors: reads fail where a wire is not there."""

    def __init__(self, plan: Plan, shape: ModelShape, program: Program) -> None:
        leaving = leaving_of(plan)
        self.plan, self.shape, self.wires = plan, shape, Wires(shape)
        self.drops, self.stays = drops(program, shape, leaving), stays(program, shape, leaving)
        self.there: defaultdict[Place, set[str]] = defaultdict(set)
        self.gathered: set[tuple[Place, str]] = set()
        self.last = {(it.stage, it.micro_batch, it.half): it for it in program if it.op in (Op.F, Op.CF, Op.SEND_F)}
        for instruction in program:
            self.run(instruction)

    def run(self, it: Instruction) -> None:
        place = (it.stage, it.micro_batch, it.half)
        if it.step is not None and it.block is not None and it.op in (Op.F, Op.CF, Op.A, Op.CA):
            step = self.shape.steps_of(it.block)[it.step]
            for wire in step.reads:
                self.read(place, wire, it)
            self.there[place] |= set(step.writes)
            self.gathered |= {(place, wire) for wire in step.writes if it.op is Op.CA}
        elif it.step is not None and it.block is not None and it.op in (Op.B, Op.BW) and not self.plan.again:
            wires = self.shape.steps_of(it.block)[it.step].reads
            for wire in (wire for wire in wires if (place, self.wires.origin(wire)) in self.gathered):
                self.read(place, wire, it)
        if self.last.get(place) == it:
            self.hand_on(place, sends=it.op is Op.SEND_F)
        for wire in self.drops.get(it, ()):
            assert wire in self.there[place], f"{it} drops {wire}, which is not there"
            self.there[place].remove(wire)

    def read(self, place: Place, wire: str, it: Instruction) -> None:
        if wire in self.there[place]:
            return
        assert it.stage is not None
        source = self.wires.source(wire, self.plan.stage_blocks(it.stage))
        if source is None:
            # Only what comes from the stage before is nobody's result; after the forward it must still be there.
            assert it.op in (Op.F, Op.CF), f"{it} misses {wire}"
            assert wire == f"h{self.plan.stage_blocks(it.stage)[0]}", f"{it} misses {wire}"
        else:
            self.read(place, source, it)
        self.there[place].add(wire)

    def hand_on(self, place: Place, sends: bool) -> None:
        """What is not sent is taken by the next stage later; it is whole by then all the same."""
        stage = place[0]
        assert stage is not None
        (wire,) = leaving_of(self.plan)(stage)
        self.read(place, wire, Instruction(Op.F, stage))
        self.there[place] -= ({wire} if sends else set()) - self.stays.get(stage, frozenset())


@settings(max_examples=50, deadline=None)
@given(tensor_cases())
def test_every_program_has_what_it_reads_and_leaves_nothing_behind(case: Case) -> None:
    plan, shape = case
    for program in lower(plan, shape):
        sends = {(it.stage, it.micro_batch, it.half) for it in program if it.op is Op.SEND_F}
        machine = Machine(plan, shape, program)
        for place, wires in machine.there.items():
            stage = place[0]
            assert stage is not None
            assert wires <= (set() if place in sends else set(leaving_of(plan)(stage)))


@pytest.mark.parametrize("overlap", ["none", "oases"])
def test_an_evaluation_drops_everything_too(overlap: str) -> None:
    plan, shape = Plan.parse(f"tp=2,overlap={overlap},stages=2"), stack(2)
    machine = Machine(plan, shape, lower_forward(plan, shape, 2)[0])
    assert all(wires == {"h2"} for wires in machine.there.values()) and len(machine.there) == 2

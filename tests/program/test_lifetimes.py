"""When wires are dropped: a machine that runs the programs and drops them so always has what it reads, and no leak."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from phalanx.plan.plan import Plan
from phalanx.program.instructions import from_text
from phalanx.program.lifetimes import drops, stays
from phalanx.program.lower import lower, lower_forward
from phalanx.program.shape import ModelShape
from tests.program.tensor_shapes import exchange, segment, stack, tensor_cases
from tests.program.wire_machine import Machine, leaving_of

Case = tuple[Plan, ModelShape]


def dropped(plan_text: str, shape: ModelShape) -> dict[str, tuple[str, ...]]:
    plan = Plan.parse(f"tp=2,{plan_text}")
    found = drops(lower(plan, shape)[0], shape, leaving_of(plan))
    return {str(instruction): tuple(sorted(wires)) for instruction, wires in found.items()}


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


@settings(max_examples=50, deadline=None)
@given(tensor_cases())
def test_every_program_has_what_it_reads_and_leaves_nothing_behind(case: Case) -> None:
    plan, shape = case
    for program in lower(plan, shape):
        assert Machine(plan, shape, program).left_behind() == set()


@pytest.mark.parametrize("overlap", ["none", "oases"])
def test_an_evaluation_drops_everything_too(overlap: str) -> None:
    plan, shape = Plan.parse(f"tp=2,overlap={overlap},stages=2"), stack(2)
    machine = Machine(plan, shape, lower_forward(plan, shape, 2)[0])
    assert all(wires == {"h2"} for wires in machine.there.values()) and len(machine.there) == 2

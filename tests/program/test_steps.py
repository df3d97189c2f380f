"""Blocks of several steps: how many collectives there are in each overlap mode, and where they stand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from phalanx.plan.plan import Plan
from phalanx.program.block_ops import BlockOps
from phalanx.program.compile import compile_forward, compile_plan
from phalanx.program.instructions import COMPUTE, REDISTRIBUTIONS, Instruction, Op, Program, to_text
from phalanx.program.lower import lower, lower_forward
from phalanx.program.shape import ModelShape
from tests.program.tensor_shapes import layer, redistribution, segment, stack, tensor_cases

Case = tuple[Plan, ModelShape]


def lowered(text: str, shape: ModelShape | None = None) -> Program:
    plan = Plan.parse(f"tp=2,{text}")
    return lower(plan, shape or stack(sum(plan.stages), sequence=plan.sequence))[0]


def counts(program: Program, shape: ModelShape) -> tuple[Counter[str], Counter[str]]:
    """The collectives of the forward and of the backward, by kind."""
    forward, backward = Counter[str](), Counter[str]()
    for it in program:
        if it.op in REDISTRIBUTIONS:
            assert it.block is not None and it.op_index is not None
            step = shape.ops_of(it.block)[it.op_index]
            (forward if it.op is Op.CF else backward)[step.backward if it.op is Op.CB else step.forward] += 1
    return forward, backward


@pytest.mark.parametrize("overlap, forward, backward, half", [
    ("none", 2, 2, False),
    ("default_checkpoint", 2, 4, False),
    ("optim_comm_checkpoint", 2, 2, False),
    ("overlap_checkpoint", 4, 8, True),
    ("oases", 4, 4, True),
    ("halves", 4, 4, True),
])  # fmt: skip
def test_a_layer_has_the_published_number_of_all_reduces(overlap: str, forward: int, backward: int, half: bool) -> None:
    shape = stack(3)
    program = lowered(f"overlap={overlap},mb=2,stages=3", shape)
    layers = 3 * 2
    assert counts(program, shape) == ({"all_reduce": layers * forward}, {"all_reduce": layers * backward})
    assert all((it.half is not None) == half for it in program if it.op in REDISTRIBUTIONS)


@pytest.mark.parametrize("overlap, save, gathers, scatters", [
    ("none", "result", 2, 2),
    ("none", "input", 4, 2),
    ("default_checkpoint", "", 4, 4),
    ("optim_comm_checkpoint", "result", 2, 2),
    ("optim_comm_checkpoint", "input", 4, 2),
    ("overlap_checkpoint", "", 8, 8),
    ("oases", "result", 4, 4),
    ("oases", "input", 8, 4),
    ("halves", "result", 4, 4),
    ("halves", "input", 8, 4),
])  # fmt: skip
def test_with_tokens_split_a_gather_is_repeated_where_its_input_is_kept(
    overlap: str, save: str, gathers: int, scatters: int
) -> None:
    shape = stack(1, sequence=True)
    program = lowered(f"sequence=yes,{f'save={save},' if save else ''}overlap={overlap},stages=1", shape)
    halves = 2 if any(it.half for it in program) else 1
    forward, backward = counts(program, shape)
    assert forward == {"all_gather": 2 * halves, "reduce_scatter": 2 * halves}
    assert backward == {"all_gather": gathers, "reduce_scatter": scatters}


def test_a_layer_is_lowered_as_stored() -> None:
    assert to_text(lowered("stages=1")) == (
        "COUNT I.0 F0.0/0:0 F0.0/0:2 CF0.0/0:3 F0.0/0:4 F0.0/0:6 CF0.0/0:7 F0.0/0:8 "
        "BW0.0/0:8 B0.0/0:6 CB0.0/0:5 W0.0/0:6 BW0.0/0:4 B0.0/0:2 CB0.0/0:1 W0.0/0:2 BW0.0/0:0 NORM STEP"
    )


def test_what_an_redistribution_does_alone_is_an_instruction_of_its_own() -> None:
    cells = ((0, 1),)
    steps = (segment("", "x"), redistribution("x", "s", cells, "shard", "all_gather"), segment("s", "y"),
             redistribution("y", "z", cells, "all_gather", "shard"), segment("z", "h1"))  # fmt: skip
    shape = ModelShape(1, (), (True,), (True,), (steps,))
    assert to_text(lowered("stages=1", shape)) == (
        "COUNT I.0 F0.0/0:0 LF0.0/0:1 F0.0/0:2 CF0.0/0:3 F0.0/0:4 "
        "B0.0/0:4 LB0.0/0:3 W0.0/0:4 B0.0/0:2 CB0.0/0:1 W0.0/0:2 BW0.0/0:0 NORM STEP"
    )
    again = [str(it) for it in lowered("overlap=default_checkpoint,stages=1", shape) if it.op in (Op.A, Op.CA, Op.LA)]
    assert again == ["A0.0/0:0", "LA0.0/0:1", "A0.0/0:2", "CA0.0/0:3", "A0.0/0:4"]
    compile_plan(Plan.parse("tp=2,overlap=default_checkpoint,stages=1"), shape)


def test_units_are_computed_again_directly_before_their_backward() -> None:
    text = to_text(
        it for it in lowered("overlap=optim_comm_checkpoint,stages=1") if it.op in (Op.A, Op.B, Op.W, Op.BW, Op.CB)
    )
    assert text == (
        "A0.0/0:8 BW0.0/0:8 A0.0/0:4 A0.0/0:6 B0.0/0:6 CB0.0/0:5 W0.0/0:6 BW0.0/0:4 "
        "A0.0/0:0 A0.0/0:2 B0.0/0:2 CB0.0/0:1 W0.0/0:2 BW0.0/0:0"
    )


def test_halves_take_turns_at_collectives_across_layers() -> None:
    program = lowered("overlap=oases,stages=2")
    forwards = to_text(it for it in program if it.op in (Op.F, Op.CF))
    assert forwards.startswith("F0.0a/0:0 F0.0a/0:2 CF0.0a/0:3 F0.0b/0:0 F0.0b/0:2 CF0.0b/0:3 F0.0a/0:4")
    assert "F0.0a/0:8 F0.0a/1:0 F0.0a/1:2 CF0.0a/1:3 F0.0b/0:8 F0.0b/1:0 F0.0b/1:2 CF0.0b/1:3" in forwards
    # One half's unit is computed again, and its backward begun, while the other's gradient travels.
    backward = (
        "CB0.0b/1:5 W0.0b/1:6 BW0.0a/1:4 A0.0a/1:0 A0.0a/1:2 B0.0a/1:2 CB0.0a/1:1 W0.0a/1:2 "
        "BW0.0b/1:4 A0.0b/1:0 A0.0b/1:2 B0.0b/1:2 CB0.0b/1:1"
    )
    assert backward in to_text(program)


def test_a_gradient_that_comes_from_the_next_block_travels_behind_what_is_computed_again() -> None:
    cells = ((0, 1),)
    steps = (segment("", "p"), redistribution("p", "h1", cells, "reduce_scatter", "all_gather"))
    shape = ModelShape(2, (), (True,) * 2, (True,) * 2, (steps, (segment("h1", "h2"),)))
    assert [str(it) for it in lowered("overlap=default_checkpoint,stages=2", shape) if it.block == 0] == [
        "F0.0/0:0", "CF0.0/0:1", "CB0.0/0:1", "A0.0/0:0", "CA0.0/0:1", "BW0.0/0:0",
    ]  # fmt: skip


def test_a_gather_is_kept_where_other_units_read_it_too() -> None:
    cells = ((0, 1),)
    gather = redistribution("h0", "g", cells, "all_gather", "reduce_scatter")
    steps = (gather, segment("g", "p"), redistribution("p", "a", cells, "all_reduce"), segment("a g", "h1"))
    assert BlockOps(steps, "unit", regathers=True).sent_again == ()
    assert BlockOps(steps, "", regathers=True).sent_again == (0,)
    assert BlockOps(steps, "", regathers=False).sent_again == ()


def test_the_backward_of_an_redistribution_waits_for_readers_behind_redistributions_that_send_nothing() -> None:
    cells = ((0, 1),)
    steps = (
        redistribution("h0", "g", cells, backward="all_reduce"),
        redistribution("g", "s", cells),
        segment("s", "x"),
        segment("x", "y"),
        redistribution("g", "t", cells, backward="all_gather"),
        segment("t y", "h1"),
    )
    block = BlockOps(steps)
    assert block.gradient_readers(0) == (2, 4) and block.first_reader(0) == 2 and block.first_reader(4) == 5


def test_messages_go_per_half_and_both_are_asked_for_one_computation_ahead() -> None:
    first, last = lower(Plan.parse("pp=2,tp=2,mb=2,overlap=halves,stages=1-1"), stack(2))
    assert [str(it) for it in first if it.peer is not None] == [
        "SF0.0a>1", "SF0.0b>1", "RB0.0a<1", "RB0.0b<1", "SF0.1a>1", "SF0.1b>1", "RB0.1a<1", "RB0.1b<1",
    ]  # fmt: skip
    words = to_text(last).split()
    assert words[:5] == ["COUNT", "I.0a", "RF1.0a<0", "RF1.0b<0", "F1.0a/1:0"]
    assert words[words.index("SB1.0a>0") - 1] == "BW1.0a/1:0"


def test_each_half_has_its_inputs_directly_before_its_first_computation() -> None:
    words = to_text(lowered("overlap=halves,mb=2,stages=1")).split()
    after = [words[position + 1] for position, word in enumerate(words) if word.startswith("I.")]
    assert after == ["F0.0a/0:0", "F0.0b/0:0", "F0.1a/0:0", "F0.1b/0:0"]


def test_a_backward_and_the_forward_of_the_next_micro_batch_take_turns() -> None:
    words = to_text(it for it in lowered("mb=2,pairs=yes,stages=1") if it.op is not Op.INPUT).split()[1:]
    first, paired, last = words[:7], words[7:23], words[23:-2]
    assert all(".0/" in word and word.startswith(("F", "CF")) for word in first)
    assert paired == [
        "BW0.0/0:8", "B0.0/0:6", "CB0.0/0:5", "W0.0/0:6", "F0.1/0:0", "F0.1/0:2", "CF0.1/0:3",
        "BW0.0/0:4", "B0.0/0:2", "CB0.0/0:1", "W0.0/0:2", "F0.1/0:4", "F0.1/0:6", "CF0.1/0:7",
        "BW0.0/0:0", "F0.1/0:8",
    ]  # fmt: skip
    assert all(".1/" in word and word.startswith(("B", "W", "CB")) for word in last)


@pytest.mark.parametrize("pairs", ["no", "yes"])
def test_a_forward_ends_after_the_backward_that_it_takes_turns_with(pairs: str) -> None:
    compiled = compile_plan(Plan.parse(f"tp=2,mb=4,overlap=oases,pairs={pairs},stages=2"), stack(2))
    assert compiled.held_activations(0) == 2  # one of each half


def test_reductions_wait_for_all_steps_and_halves_and_are_needed_without_replicas_too() -> None:
    shape = stack(2, sums=True)
    program = lowered("overlap=oases,mb=2,stages=2", shape)
    assert [str(it) for it in program if it.op is Op.REDUCE] == ["R0.1/1"]
    after = program[program.index(Instruction(Op.REDUCE, 0, 1, 1)) + 1 :]
    assert not any(it.op in (Op.W, Op.BW) and it.block == 1 for it in after)


def test_parameters_are_gathered_once_per_visit_of_a_block_although_halves_interleave() -> None:
    program = lowered("dp=2,zero=3,overlap=oases,stages=3")
    gathers = [str(it) for it in program if it.op is Op.GATHER]
    assert gathers == ["G0.0/0", "G0.0/1", "G0.0/2", "G0.0/1", "G0.0/0"]


def test_an_evaluation_has_whole_micro_batches_and_computes_nothing_again() -> None:
    plan = Plan.parse("tp=2,pp=2,overlap=oases,stages=1-1")
    program = lower_forward(plan, stack(2), 1)[0]
    assert to_text(program) == "I.0 F0.0/0:0 F0.0/0:2 CF0.0/0:3 F0.0/0:4 F0.0/0:6 CF0.0/0:7 F0.0/0:8 SF0.0>1"


@given(tensor_cases())
def test_every_mode_on_every_schedule_and_mesh_passes_the_check(case: Case) -> None:
    compile_plan(*case)
    compile_forward(*case, 2)


@given(tensor_cases())
def test_the_gradient_of_an_input_is_sent_before_the_weight_gradients_of_its_segment(case: Case) -> None:
    plan, shape = case
    program = lower(plan, shape)[0]
    place = {it: position for position, it in enumerate(program)}
    for it, position in place.items():
        if it.op in (Op.W, Op.BW):
            assert it.block is not None
            block = BlockOps.of(plan, shape, it.block)
            own = [i for i in block.moved_backward if block.first_reader(i) == (it.op_index or 0)]
            sent = [Instruction(Op.CB, it.stage, it.micro_batch, it.block, half=it.half, op_index=i) for i in own]
            assert all(place[redistribution] < position for redistribution in sent)
            assert it.op is Op.W or not own


@given(tensor_cases())
def test_what_is_computed_again_is_all_of_a_block_or_nothing(case: Case) -> None:
    plan, shape = case
    program = lower(plan, shape)[0]
    forwards = {(it.stage, it.micro_batch, it.half, it.block, it.op_index) for it in program if it.op is Op.F}
    again = {(it.stage, it.micro_batch, it.half, it.block, it.op_index) for it in program if it.op is Op.A}
    blocks = [b for b in range(shape.num_blocks) if plan.recompute_of(b, shape.layers) in ("unit", "block")]
    assert again == {place for place in forwards if place[3] in blocks}
    assert sum(it.op in COMPUTE for it in program) >= 2 * len(forwards)


def test_a_block_of_one_step_names_none() -> None:
    shape = ModelShape(2, (), (True,) * 2, (True,) * 2, ((segment("", "h1"),), layer(1)))
    program = lowered("overlap=default_checkpoint,stages=2", shape)
    assert [str(it) for it in program if it.block == 0] == ["F0.0/0", "A0.0/0", "BW0.0/0"]
    compile_plan(Plan.parse("tp=2,overlap=default_checkpoint,stages=2"), shape)


def test_a_gather_that_only_another_redistribution_reads_is_not_done_again() -> None:
    cells = ((0, 1),)
    gather = redistribution("x", "g", cells, "all_gather", "reduce_scatter")
    steps = (segment("", "x"), gather, redistribution("g", "s", cells, "all_reduce"), segment("s", "h1"))
    assert BlockOps(steps, "", regathers=True).sent_again == ()
    shape = ModelShape(1, (), (True,), (True,), (steps,))
    assert "CA" not in to_text(lowered("sequence=yes,save=input,stages=1", shape))

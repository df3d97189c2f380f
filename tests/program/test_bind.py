"""Binding: in every table values live from what writes them to what touches them last, and nothing else is left."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings

from phalanx.plan.plan import Plan
from phalanx.program.bind import IN_FLIGHT
from phalanx.program.compile import compile_forward, compile_plan
from phalanx.program.instructions import RECEIVES, REDISTRIBUTIONS, Instruction, Op
from phalanx.program.rules import Key, Names
from phalanx.program.shape import Backward, BlockOp, ModelShape
from phalanx.program.values import RESIDENT, Row, Table
from tests import children
from tests.program.random_plans import cases, simple_shape
from tests.program.sliced_plans import encoder_decoder, sliced_cases
from tests.program.tensor_shapes import chained_cases, redistribution, segment, stack, tensor_cases

Case = tuple[Plan, ModelShape]
every_case = cases() | chained_cases() | tensor_cases() | sliced_cases()
quick = settings(max_examples=15)


def tables_of(case: Case) -> Iterator[Table]:
    yield from compile_plan(*case).tables
    yield from compile_forward(*case, 2).tables


def touched(row: Row) -> set[int]:
    return {*row.reads, *row.writes, *row.adds}


def row_of(table: Table, text: str) -> Row:
    return next(row for row in table.rows if str(row.instruction) == text)


@quick
@given(every_case)
def test_every_value_is_freed_once_by_the_last_that_touches_it_or_waits_for_what_was_sent_of_it(case: Case) -> None:
    for table in tables_of(case):
        evaluates = all(row.instruction.op is not Op.NORM for row in table.rows)
        freed: dict[int, int] = {}
        last: dict[int, int] = {}
        made_of: dict[int, set[int]] = {}  # what a collective brings → what it reads
        for position, row in enumerate(table.rows):
            last |= dict.fromkeys((*touched(row), *row.waits), position)
            made_of |= {i: set(row.reads) for i in row.writes if row.instruction.op in REDISTRIBUTIONS | {Op.REDUCE}}
            assert not freed.keys() & set(row.frees)
            freed |= dict.fromkeys(row.frees, position)
        for i, value in enumerate(table.values):
            if value.kind in RESIDENT or (evaluates and value.kind == "loss"):
                assert i not in freed
            elif freed[i] != last[i]:
                sent = [j for j in table.rows[freed[i]].waits if i in made_of.get(j, ())]
                assert freed[i] > last[i] and sent, f"{value} is freed too late"


@quick
@given(every_case)
def test_values_are_written_first_then_read_then_freed(case: Case) -> None:
    for table in tables_of(case):
        there, gone = {i for i, value in enumerate(table.values) if value.kind in RESIDENT}, set[int]()
        for row in table.rows:
            assert set(row.waits) <= there | set(row.writes)
            assert not there & set(row.writes) and not gone & (touched(row) | set(row.waits))
            there |= set(row.writes)
            assert set(row.reads) | set(row.adds) | set(row.frees) <= there
            gone |= set(row.frees)
            assert all(
                total in {*row.writes, *row.adds} and set(parts) <= set(row.reads) for total, parts in row.collects
            )


@quick
@given(every_case)
def test_what_is_on_its_way_is_waited_for_by_the_first_that_touches_it(case: Case) -> None:
    for table in tables_of(case):
        pending: set[int] = set()
        for row in table.rows:
            before = {i for i in row.waits if table.values[i].kind in RESIDENT}  # the step before may have left it so
            assert set(row.waits) - before <= pending | set(row.writes), "nobody waits for what is there"
            pending -= set(row.waits)
            assert not pending & touched(row)
            pending |= _brought(row, case[0])
        assert {table.values[i].kind for i in pending} <= {"parameters", "activation", "gradient", "reduced"}


def _brought(row: Row, plan: Plan) -> set[int]:
    """What is on its way when an instruction has been issued."""
    op, collected = row.instruction.op, {total for total, _ in row.collects}
    if op in (Op.SUM, Op.TIE):
        return {row.adds[-1]}
    if op in RECEIVES | REDISTRIBUTIONS | {Op.GATHER, Op.REDUCE} or (op is Op.COUNT and plan.dp > 1):
        return set(row.writes) - collected - set(row.waits)
    return set(row.adds) if op is Op.SHARE else set()


@quick
@given(every_case)
def test_reductions_of_zero_2_and_3_are_collected_so_that_few_whole_gradients_are_kept(case: Case) -> None:
    plan, shape = case
    for table in compile_plan(plan, shape).tables:
        on_their_way = 0
        for row in table.rows:
            on_their_way -= sum(
                table.values[i].kind == "reduced" and table.values[i].micro_batch is not None for i in row.waits
            )
            on_their_way += row.instruction.op is Op.REDUCE
            assert plan.zero < 2 or on_their_way <= IN_FLIGHT


@quick
@given(every_case)
def test_stages_of_one_rank_hand_over_by_the_value_itself(case: Case) -> None:
    plan, shape = case
    for index, table in enumerate(compile_plan(plan, shape).tables):
        stages = plan.stages_of(index)
        inner = {stage for stage in stages if stage + 1 in stages}
        for row in table.rows:
            it = row.instruction
            assert it.stage not in inner or it.op not in (Op.SEND_F, Op.RECV_B)
            assert it.stage is None or it.stage - 1 not in inner or it.op not in (Op.SEND_B, Op.RECV_F)
        written = {i for row in table.rows if row.instruction.op not in RECEIVES for i in row.writes}
        for row in table.rows:
            it = row.instruction
            if it.op is Op.F and it.stage is not None and it.stage - 1 in inner:
                assert all(i in written for i in row.reads if table.values[i].kind == "activation")


def test_what_slices_hand_on_of_a_whole_micro_batch_crosses_once() -> None:
    # The second block runs on slices, and hands on what the first made of the whole micro-batch.
    steps = (
        (segment("", "h1"),),
        (segment("h1", "w"), redistribution("h1", "h2", ((0,), (1,)))),
        (segment("h2", "h3"),),
    )
    shape = replace(
        simple_shape(3), ops=steps, granularities=("micro-batch", "slice", "slice"), per_micro_batch=frozenset({"h1"})
    )
    last = compile_plan(Plan.parse("pp=2,tp=2,slices=2,stages=2-1"), shape).tables[1]
    assert row_of(last, "RF1.0.0<0").writes and not row_of(last, "RF1.0.1<0").writes
    assert not row_of(last, "SB1.0.1>0").reads and row_of(last, "SB1.0.0>0").reads


def test_a_rank_that_is_left_and_visited_again_has_another_value_of_the_same_name() -> None:
    cells = ((0, 1),)
    # h1 is read by the blocks 1 and 2; with interleaved stages block 1 is on another rank.
    steps = (
        (segment("", "h1"),),
        (segment("h1", "h2"),),
        (segment("h1 h2", "h3"), redistribution("h3", "h4", cells)),
        (segment("h4", "h5"),),
    )
    shape = ModelShape(4, (), (True,) * 4, (True,) * 4, steps)
    first, last = compile_plan(Plan.parse("pp=2,tp=2,mb=2,schedule=interleaved,v=2,stages=1-1-1-1"), shape).tables
    names = [(table.values[i].what, table.values[i].stage) for table in (first, last) for i in row_of_writes(table)]
    assert ("h1", 0) in names and ("h1", 2) in names and ("h1", 1) in names
    assert [first.values[i].stage for i in row_of(first, "F2.0/2:0").reads if first.values[i].what == "h1"] == [2]


def row_of_writes(table: Table) -> list[int]:
    return [i for row in table.rows for i in row.writes if table.values[i].kind == "activation"]


@quick
@given(tensor_cases() | sliced_cases())
def test_gradients_are_added_up_from_exactly_the_readers_of_their_activation(case: Case) -> None:
    plan, shape = case
    names = Names(plan, shape)
    for index, table in enumerate(compile_plan(plan, shape).tables):
        expected, found = Counter[Key](), Counter[Key]()
        for row in table.rows:
            it = row.instruction
            made = {table.values[i][:6] for i in (*row.writes, *row.adds)}
            found.update(key for key in made if key[0] == "gradient")
            found.subtract(
                {table.values[total][:6] for total, _ in row.collects if table.values[total].kind == "gradient"}
            )
            taken = _gradients(plan, names, index, it, _step_of(shape, it).writes if it.op in (Op.CB, Op.LB) else ())
            if all(expected[key] or names.is_d_loss(key[1]) for key in taken):  # nothing comes of what nobody reads
                expected.update(_gradients(plan, names, index, it, _given(plan, shape, it)))
        assert found == expected


def _given(plan: Plan, shape: ModelShape, it: Instruction) -> Sequence[str]:
    """The activations to whose gradients an instruction contributes, by the graph: what its step reads."""
    if it.op is Op.RECV_B:
        assert it.stage is not None
        crossing = shape.crossing(plan.stage_blocks(it.stage)[-1] + 1)
        return [activation for activation in crossing if not (it.slice and activation in shape.per_micro_batch)]
    return _step_of(shape, it).reads if it.op in (Op.B, Op.BW, Op.CB, Op.LB) else ()


def _step_of(shape: ModelShape, it: Instruction) -> BlockOp:
    assert it.block is not None
    return shape.ops_of(it.block)[it.op_index or 0]


def _gradients(plan: Plan, names: Names, index: int, it: Instruction, activations: Sequence[str]) -> set[Key]:
    first = it.stage
    while first is not None and first - 1 in plan.stages_of(index):
        first -= 1
    own = {names.gradient.get(activation, activation) for activation in activations}
    return {
        ("gradient", name, it.micro_batch, None if name in names.whole_gradients else it.slice, it.half, first)
        for name in own
    }


def test_a_residual_sum_adds_up_in_place_and_waits_for_what_travels() -> None:
    table = compile_plan(Plan.parse("tp=2,stages=2"), stack(2)).tables[0]
    # h1 is read by the norm and by the residual addition of block 1.
    total = next(i for i in row_of(table, "BW0.0/1:4").writes if table.values[i].what == "h1")
    assert total in row_of(table, "BW0.0/1:0").adds and total in row_of(table, "BW0.0/0:8").reads
    travelling = row_of(table, "CB0.0/1:1").writes
    assert row_of(table, "BW0.0/1:0").waits == travelling and travelling[0] in row_of(table, "BW0.0/1:0").frees


def test_parts_that_travel_are_collected_where_the_sum_is_taken() -> None:
    cells = ((0, 1),)
    steps = (segment("", "x"), redistribution("x", "e", cells, backward="all_reduce"),
             redistribution("x", "f", cells, backward="all_reduce"), segment("e f", "h1"))  # fmt: skip
    table = compile_plan(Plan.parse("tp=2,stages=1"), ModelShape(1, (), (True,), (True,), (steps,))).tables[0]
    first, second = row_of(table, "CB0.0/0:2").writes[0], row_of(table, "CB0.0/0:1").writes[0]
    row = row_of(table, "BW0.0/0:0")
    assert set(row.waits) == {first, second} and len(row.collects) == 1
    total, parts = row.collects[0]
    assert {total, *parts} == {first, second} and total in row.adds


def test_what_belongs_to_the_micro_batch_is_freed_with_its_last_slice_and_gets_a_part_of_each() -> None:
    compiled = compile_plan(Plan.parse("tp=2,slices=3,stages=2"), encoder_decoder(1, 1))
    table = compiled.tables[0]
    memory = [i for i, value in enumerate(table.values) if value.what == "h1" and value.kind == "activation"]
    assert len(memory) == 1 and table.values[memory[0]].slice is None
    assert memory[0] in row_of(table, "BW0.0.0/1:0").frees
    # The redistribution between p0 and h1 does nothing in the backward: the gradient is one and the same.
    gradient = [i for i, value in enumerate(table.values) if value.what == "p0" and value.kind == "gradient"]
    givers = [row.instruction for row in table.rows if {*row.writes, *row.adds} & set(gradient)]
    assert [(it.slice, it.op_index) for it in givers] == [(j, step) for j in (2, 1, 0) for step in (3, 0)]


def test_recomputation_keeps_nothing_of_a_forward_but_what_it_reads() -> None:
    plain = compile_plan(Plan.parse("stages=3"), simple_shape(3)).tables[0]
    again = compile_plan(Plan.parse("recompute=yes,stages=3"), simple_shape(3)).tables[0]
    assert again.keeps_only_inputs and not plain.keeps_only_inputs
    assert plain.peak("saved_bw") == 3 and again.peak("saved_bw") == 1


def test_a_table_can_be_read_by_people() -> None:
    table = compile_plan(Plan.parse("stages=1"), simple_shape(1)).tables[0]
    assert table.lines() == [
        "COUNT    > items()",
        "I.0      > inputs().0",
        "F0.0/0   < inputs().0 parameters(0)  > loss().0 saved_bw(0:0).0  x inputs().0",
        "BW0.0/0  < items() parameters(0) saved_bw(0:0).0  > d_parameters(0/0)  x saved_bw(0:0).0",
        "NORM     < loss().0 items() d_parameters(0/0)  > norm()  x items() loss().0",
        "STEP     < norm() d_parameters(0/0) state(0)  + state(0) parameters(0)  x d_parameters(0/0) norm()",
    ]


@pytest.mark.parametrize("text, expected", [
    ("dp=2,zero=1,stages=1", True), ("dp=2,zero=3,stages=1", False), ("dp=2,stages=1", False),
])  # fmt: skip
def test_parameters_that_are_shared_at_the_end_are_waited_for_by_the_next_step(text: str, expected: bool) -> None:
    table = compile_plan(Plan.parse(text), simple_shape(1)).tables[0]
    assert any(row.instruction.op is Op.SHARE for row in table.rows) == expected
    first = next(row for row in table.rows if any(table.values[i].kind == "parameters" for i in row.reads))
    assert {table.values[i].kind for i in first.waits} == {"parameters"}


def test_a_rank_compiles_from_plain_data_without_torch() -> None:
    plan, shape = Plan.parse("pp=2,tp=2,dp=2,zero=2,mb=2,overlap=oases,stages=1-1"), stack(2, sums=True)
    code = (
        "import pickle, sys\n"
        "plan, shape = pickle.load(sys.stdin.buffer)\n"
        "from phalanx.program.compile import compile_plan\n"
        "compiled = compile_plan(plan, shape)\n"
        "assert 'torch' not in sys.modules\n"
        "sys.stdout.buffer.write(pickle.dumps((compiled.programs, compiled.tables)))\n"
    )
    environment = children.environment()
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((plan, shape)),
        capture_output=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    compiled = compile_plan(plan, shape)
    assert pickle.loads(done.stdout) == (compiled.programs, compiled.tables)


def test_what_is_gathered_for_a_backward_that_does_nothing_is_gone_before_it_is_gathered_again() -> None:
    """The first block of a model is frozen: no gradient goes there."""
    nothing = Backward((), (), (), (), (), trains=False)
    first = replace(segment("", "a"), traced=nothing)
    second = replace(segment("a", "loss"), traced=Backward(("loss",), (), ("a",), (), ()))
    shape = ModelShape(2, (), (True, True), (False, True), ops=((first,), (second,)))
    plan = Plan(dp=2, zero=3, mb=3, schedule="gpipe", stages=(2,))
    table = compile_plan(plan, shape).tables[0]
    here: set[str] = set()
    for row in table.rows:
        written = {table.values[i].what for i in row.writes if table.values[i].kind == "gathered"}
        assert not written & here, f"{row.instruction} gathers again what is there"
        here = (here | written) - {table.values[i].what for i in row.frees if table.values[i].kind == "gathered"}
    assert not here

"""Schedules: every piece of work once, in an order that can run, with the memory and bubble their names promise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.plan.plan import Plan
from phalanx.program.grid import place
from phalanx.program.instructions import Instruction, Op, Program, to_text
from phalanx.program.lower import forwards_of, schedule_of
from phalanx.program.schedules import SCHEDULES

ranks, counts = st.integers(1, 8), st.integers(1, 24)
names = st.sampled_from(sorted(SCHEDULES))


def virtual(name: str) -> int:
    return {"interleaved": 2, "zb-v": 2, "block-major": 3}.get(name, 1)


def most_open(program: Program, closing: Sequence[Op]) -> int:
    """The most forwards at once whose `closing` is still to come."""
    number, most = 0, 0
    for instruction in program:
        number += (instruction.op is Op.F) - (instruction.op in closing)
        most = max(most, number)
    return most


def span(name: str, pp: int, v: int, num_micro_batches: int) -> int:
    """The time of a step in units of F = B = W = 1, all stages being equal; everything must be able to run."""
    rows = place(SCHEDULES[name](pp, v, num_micro_batches))
    assert all(cell.runs for row in rows for cell in row)
    return max(row[-1].end for row in rows)


@given(names, ranks, counts)
def test_every_stage_does_every_micro_batch_once_and_in_order(name: str, pp: int, num_micro_batches: int) -> None:
    v = virtual(name)
    programs = SCHEDULES[name](pp, v, num_micro_batches)
    assert len(programs) == pp
    seen: dict[tuple[int | None, int | None], list[Op]] = {}
    for program in programs:
        for instruction in program:
            seen.setdefault((instruction.stage, instruction.micro_batch), []).append(instruction.op)
    assert seen.keys() == {(stage, i) for stage in range(pp * v) for i in range(num_micro_batches)}
    parts = [Op.F, Op.B, Op.W] if name.startswith("zb") else [Op.F, Op.BW]
    assert all(ops == parts for ops in seen.values())


@given(names, st.integers(2, 8), counts)
def test_ranks_run_the_stages_that_the_plan_gives_them(name: str, pp: int, num_micro_batches: int) -> None:
    whole = Plan(pp=pp, mb=num_micro_batches, schedule=name, v=virtual(name))
    for pp_index, program in enumerate(schedule_of(whole)):
        assert {instruction.stage for instruction in program} == set(whole.stages_of(pp_index))


@given(ranks, counts)
def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_there_are_stages_ahead(pp: int, mb: int) -> None:
    assert [most_open(program, [Op.BW]) for program in SCHEDULES["gpipe"](pp, 1, mb)] == [mb] * pp
    expected = [min(pp - pp_index, mb) for pp_index in range(pp)]
    assert [most_open(program, [Op.BW]) for program in SCHEDULES["1f1b"](pp, 1, mb)] == expected
    twice = [min(2 * (pp - pp_index) - 1, mb) for pp_index in range(pp)]
    assert [most_open(program, [Op.BW]) for program in SCHEDULES["eager-1f1b"](pp, 1, mb)] == twice
    assert [most_open(program, [Op.B]) for program in SCHEDULES["zb-h1"](pp, 1, mb)] == expected


@given(ranks, counts)
def test_zero_bubble_needs_no_more_memory_than_1f1b_on_its_first_rank(pp: int, mb: int) -> None:
    assert all(most_open(program, [Op.W]) <= pp for program in SCHEDULES["zb-h1"](pp, 1, mb))
    # Its stages are half as large, so 2 pp of them are pp stages of 1f1b.
    assert all(most_open(program, [Op.W]) <= 2 * pp for program in SCHEDULES["zb-v"](pp, 2, mb))


@given(ranks, counts)
def test_gpipe_and_1f1b_take_one_full_pass_per_further_rank(pp: int, mb: int) -> None:
    assert span("gpipe", pp, 1, mb) == span("1f1b", pp, 1, mb) == 3 * mb + 3 * (pp - 1)
    assert span("eager-1f1b", pp, 1, mb) == 3 * mb + 3 * (pp - 1)


@given(ranks, st.integers(2, 4), counts)
def test_interleaving_divides_the_bubble_by_the_virtual_stages_for_any_number(pp: int, v: int, mb: int) -> None:
    assert span("interleaved", pp, v, max(mb, pp)) == 3 * v * max(mb, pp) + 3 * (pp - 1)
    assert span("interleaved", pp, v, mb) >= 3 * v * mb  # fewer micro-batches than ranks: it can run


@given(ranks, st.integers(1, 4), counts)
def test_block_major_has_the_bubble_of_interleaving_where_micro_batches_go_round(pp: int, v: int, mb: int) -> None:
    assert span("block-major", pp, v, max(mb, pp)) == 3 * v * max(mb, pp) + 3 * (pp - 1)
    assert span("block-major", pp, v, mb) >= 3 * v * mb


@given(ranks, st.integers(1, 4), counts)
def test_block_major_comes_to_each_stage_twice_and_holds_every_micro_batch_of_all(pp: int, v: int, mb: int) -> None:
    for program in SCHEDULES["block-major"](pp, v, mb):
        visits = [stage for stage, _ in groupby((it.op, it.stage) for it in program)]
        assert len(visits) == len(set(visits)) == 2 * v
        assert most_open(program, [Op.BW]) == v * mb


@given(ranks, counts)
def test_zb_h1_leaves_a_third_of_the_bubble_of_1f1b(pp: int, mb: int) -> None:
    mb = max(mb, pp)
    assert span("zb-h1", pp, 1, mb) == 3 * mb + (pp - 1)


@given(st.integers(2, 8), counts)
def test_zb_v_has_less_bubble_than_interleaving_the_same_stages(pp: int, mb: int) -> None:
    mb = max(mb, pp)
    assert span("zb-v", pp, 2, mb) < span("interleaved", pp, 2, mb)


@given(names, st.integers(2, 8), counts)
def test_an_evaluation_runs_every_forward_once_and_nothing_else(name: str, pp: int, mb: int) -> None:
    whole = Plan(pp=pp, schedule=name, v=virtual(name))
    rows = place(forwards_of(whole, mb))
    assert all(cell.runs for row in rows for cell in row)
    done = [cell.instruction for row in rows for cell in row]
    expected = {Instruction(Op.F, stage, i) for stage in range(whole.num_stages) for i in range(mb)}
    assert set(done) == expected and len(done) == len(expected)


@pytest.mark.parametrize("name, pp, mb, texts", [
    ("gpipe", 1, 2, ["F0.0 F0.1 BW0.1 BW0.0"]),
    ("1f1b", 1, 2, ["F0.0 BW0.0 F0.1 BW0.1"]),
    ("zb-h1", 1, 2, ["F0.0 B0.0 W0.0 F0.1 B0.1 W0.1"]),
    ("1f1b", 2, 3, ["F0.0 F0.1 BW0.0 F0.2 BW0.1 BW0.2", "F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2"]),
    ("eager-1f1b", 2, 3, ["F0.0 F0.1 F0.2 BW0.0 BW0.1 BW0.2", "F1.0 BW1.0 F1.1 BW1.1 F1.2 BW1.2"]),
    ("zb-h1", 2, 3, ["F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2", "F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2"]),
    ("interleaved", 2, 2, [
        "F0.0 F0.1 F2.0 F2.1 BW2.0 BW2.1 BW0.0 BW0.1", "F1.0 F1.1 F3.0 BW3.0 F3.1 BW3.1 BW1.0 BW1.1",
    ]),
    ("block-major", 1, 2, ["F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 BW2.1 BW2.0 BW1.1 BW1.0 BW0.1 BW0.0"]),
    ("zb-v", 2, 1, ["F0.0 F3.0 B3.0 W3.0 B0.0 W0.0", "F1.0 F2.0 B2.0 B1.0 W2.0 W1.0"]),
])  # fmt: skip
def test_stored_programs_replay_identically(name: str, pp: int, mb: int, texts: list[str]) -> None:
    assert [to_text(program) for program in SCHEDULES[name](pp, virtual(name), mb)] == texts

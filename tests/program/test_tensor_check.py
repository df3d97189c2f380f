"""The check of programs with steps and halves: every wrong one is refused with words and the marked place."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.check import check, check_forward
from phalanx.program.instructions import COMPUTE, EXCHANGES, Op, from_text, to_text
from phalanx.program.lower import lower, lower_forward
from phalanx.program.shape import ModelShape
from tests.program.tensor_shapes import stack, tensor_cases
from tests.program.test_check import Mutation, drop, replace, swap

Case = tuple[Plan, ModelShape]


def refused(plan_text: str, mutations: dict[int, Mutation]) -> str:
    """What the check says of the plan's programs after these mutations of some ranks."""
    plan = Plan.parse(f"tp=2,{plan_text}")
    shape = stack(sum(plan.stages), sequence=plan.sequence, sums=True)
    programs = list(lower(plan, shape))
    for rank, mutation in mutations.items():
        mutated = from_text(mutation(to_text(programs[rank])))
        assert mutated != programs[rank], "the mutation changed nothing"
        programs[rank] = mutated
    with pytest.raises(PlanError) as error:
        check(plan, shape, programs)
    return str(error.value)


def both(mutation: Mutation) -> dict[int, Mutation]:
    return {0: mutation, 1: mutation}


WHOLE, HALVES = "stages=2", "overlap=halves,stages=2"
AGAIN, UNITS = "overlap=default_checkpoint,stages=1", "overlap=oases,stages=1"
INPUTS = "sequence=yes,save=input,stages=1"


@pytest.mark.parametrize("plan, mutations, words", [
    (WHOLE, both(drop("CF0.0/0:3")), "rank 0 runs F0.0/0:4 before CF0.0/0:3"),
    (WHOLE, both(swap("F0.0/0:2", "CF0.0/0:3")), "rank 0 runs CF0.0/0:3 before F0.0/0:2"),
    (WHOLE, both(drop("CB0.0/1:5")), "rank 0 runs BW0.0/1:4 before CB0.0/1:5"),
    (WHOLE, both(swap("B0.0/1:6", "CB0.0/1:5")), "rank 0 runs CB0.0/1:5 before B0.0/1:6"),
    (WHOLE, both(drop("CB0.0/0:1")), "rank 0 runs BW0.0/0:0 before CB0.0/0:1"),
    (WHOLE, both(drop("W0.0/1:6")), "rank 0 has R0.0/1 before micro-batch 0 has added all its gradients to bucket 1"),
    (WHOLE, both(drop("R0.0/1")), "rank 0 has NORM before the reduction of bucket 1"),
    (WHOLE, both(replace("NORM", "R0.0/0 NORM")), "rank 0 has R0.0/0 once more than this plan needs"),
    (WHOLE, both(replace("F0.0/0:2", "F0.0/0:2 F0.0/0:2")), "rank 0 runs F0.0/0:2 twice"),
    (WHOLE, both(replace("F0.0/0:2", "F0.0/0:1")), "rank 0 has F0.0/0:1, for which block 0 has no step"),
    (WHOLE, both(replace("F0.0/0:2", "F0.0/0")), "rank 0 has F0.0/0, for which block 0 has no step under this plan"),
    (WHOLE, both(replace("CF0.0/0:3", "CF0.0/0:1")), "rank 0 has CF0.0/0:1, for which block 0 has no step"),
    (WHOLE, both(replace("F0.0/0:2", "F0.0a/0:2")), "has F0.0a/0:2, but micro-batches are whole under this plan"),
    (WHOLE, both(replace("B0.0/1:6", "A0.0/1:6 B0.0/1:6")), "rank 0 has A0.0/1:6, for which block 1 has no step"),
    (WHOLE, both(swap("F0.0/0:8", "F0.0/1:0")), "rank 0 runs F0.0/1:0 before F0.0/0:8"),
    (WHOLE, both(swap("BW0.0/1:0", "BW0.0/0:8")), "rank 0 runs BW0.0/0:8 before B0.0/1:0"),
    (HALVES, both(replace("F0.0a/0:2", "F0.0/0:2")), "but micro-batches are cut into the halves a and b"),
    (HALVES, both(drop("F0.0b/1:8")), "rank 0 runs BW0.0b/1:8 before F0.0b/1:8"),
    (HALVES, both(drop("BW0.0b/0:0")), "rank 0 has NORM before micro-batch 0 has added all its gradients to bucket 0"),
    (HALVES, {1: swap("CF0.0a/0:3", "CF0.0b/0:3")}, "rank 1 runs CF0.0b/0:3 before F0.0b/0:2"),
    (AGAIN, both(drop("A0.0/0:2")), "rank 0 runs CA0.0/0:3 before A0.0/0:2"),
    (AGAIN, both(drop("CA0.0/0:3")), "rank 0 runs A0.0/0:4 before CA0.0/0:3"),
    (UNITS, both(drop("A0.0a/0:6")), "rank 0 runs B0.0a/0:6 before A0.0a/0:6"),
    (UNITS, both(swap("A0.0a/0:4", "A0.0a/0:6")), "rank 0 runs A0.0a/0:6 before A0.0a/0:4"),
    (UNITS, both(swap("F0.0a/0:4", "A0.0a/0:4")), "rank 0 runs A0.0a/0:4 before F0.0a/0:4"),
    (UNITS, both(replace("A0.0a/0:6", "CA0.0a/0:3 A0.0a/0:6")), "rank 0 has CA0.0a/0:3, for which block 0 has no step"),
    (INPUTS, both(drop("CA0.0/0:5")), "rank 0 runs B0.0/0:6 before CA0.0/0:5"),
    (INPUTS, {0: drop("CA0.0/0:5")}, "rank 0 runs B0.0/0:6 before CA0.0/0:5"),
    ("pp=2,overlap=halves,stages=1-1", {2: drop("RF1.0b<0")}, "rank 2 runs F1.0b/1:0 before RF1.0b<0 is posted"),
    ("pp=2,overlap=halves,stages=1-1", {0: drop("SF0.0b>2")}, "rank 2 waits for RF1.0b<0, which rank 0 never sends"),
    ("pp=2,overlap=halves,stages=1-1", {0: swap("SF0.0a>2", "F0.0a/0:8")}, "rank 0 has SF0.0a>2 before F0.0a/0:8"),
    ("pp=2,overlap=halves,stages=1-1", {2: swap("RF1.0a<0", "RF1.0b<0")}, "the order must be the same at both ends"),
    ("pp=2,sequence=yes,stages=1-1", {2: swap("SB1.0>0", "BW1.0/1:0")}, "rank 2 has SB1.0>0 before B1.0/1:0"),
    ("dp=2,zero=3,stages=1", {0: drop("X0.0/0")}, "rank 0 never frees bucket 0"),
])  # fmt: skip
def test_a_wrong_program_is_refused_in_words(plan: str, mutations: dict[int, Mutation], words: str) -> None:
    message = refused(plan, mutations)
    assert words in message
    assert message.count("<-- here") == 1 and "→ correct the schedule" in message


def test_all_ranks_of_a_group_exchange_in_the_same_order() -> None:
    # The second half's first exchange is ready before the first half's: only the order differs between the ranks.
    turned = swap("F0.0a/0:0", "F0.0b/0:0"), swap("F0.0a/0:2", "F0.0b/0:2"), swap("CF0.0a/0:3", "CF0.0b/0:3")
    message = refused(HALVES, {1: lambda text: turned[0](turned[1](turned[2](text)))})
    assert "rank 1 issues CF0.0b/0:3 on the group of ranks 0, 1, where rank 0 issues CF0.0a/0:3" in message


def test_an_exchange_that_waits_for_a_message_that_waits_for_it_is_a_deadlock() -> None:
    plan, shape = Plan.parse("pp=2,tp=2,mb=2,stages=1-1"), stack(2)
    programs = list(lower(plan, shape))
    for rank in (0, 1):
        # The first stage's second forward only after the first backward, which the second stage wants the other way.
        words = to_text(programs[rank]).split()
        second = [word for word in words if word[:2] in ("F0", "CF", "SF") and "0.1" in word]
        rest = [word for word in words if word not in second]
        end = rest.index("BW0.0/0:0") + 1
        programs[rank] = from_text(" ".join([*rest[:end], *second, *rest[end:]]))
        other = to_text(programs[2 + rank]).split()
        first_backward = [word for word in other if "1.0" in word and word[0] in "BWC" and not word.startswith("CF")]
        kept = [word for word in other if word not in first_backward and word != f"SB1.0>{rank}"]
        place = kept.index("F1.1/1:8") + 1
        moved = [*kept[:place], *first_backward, f"SB1.0>{rank}", *kept[place:]]
        programs[2 + rank] = from_text(" ".join(moved))
    with pytest.raises(PlanError, match=r"deadlock: rank 0 waits for RB0\.0<2 to run BW0\.0/0:8"):
        check(plan, shape, programs)


def test_an_evaluation_has_no_halves_and_no_backward() -> None:
    plan, shape = Plan.parse("tp=2,overlap=oases,stages=1"), stack(1)
    programs = lower_forward(plan, shape, 1)
    with pytest.raises(PlanError, match=r"has A0\.0/0:0 in an evaluation, which is forward only"):
        check_forward(plan, shape, [(*program, *from_text("A0.0/0:0")) for program in programs], 1)
    with pytest.raises(PlanError, match="micro-batches are whole"):
        check_forward(plan, shape, lower(plan, shape), 1)


@settings(max_examples=50, deadline=None)
@given(tensor_cases(), st.data())
def test_no_instruction_can_be_left_out(case: Case, data: st.DataObject) -> None:
    plan, shape = case
    programs = list(lower(plan, shape))
    rank = data.draw(st.integers(0, plan.world - 1))
    place = data.draw(st.integers(0, len(programs[rank]) - 1))
    programs[rank] = programs[rank][:place] + programs[rank][place + 1 :]
    with pytest.raises(PlanError, match="<-- here"):
        check(plan, shape, programs)


@settings(max_examples=50, deadline=None)
@given(tensor_cases(), st.data())
def test_the_backward_of_a_segment_cannot_move_before_anything_it_needs(case: Case, data: st.DataObject) -> None:
    """Within a half, B, BW, CB and what is done again have one order, but for pieces that do not touch each other."""
    plan, shape = case
    programs = list(lower(plan, shape))
    program = list(programs[0])
    moved = data.draw(st.sampled_from([i for i, it in enumerate(program) if it.op in (Op.B, Op.BW)]))
    it = program[moved]
    own = [i for i in range(moved) if program[i].op in COMPUTE - {Op.W} | EXCHANGES and program[i].half == it.half]
    own = [i for i in own if program[i].micro_batch == it.micro_batch and program[i].op in (Op.F, Op.B, Op.BW)]
    assume(own)
    program.insert(own[-1], program.pop(moved))
    programs[0] = tuple(program)
    with pytest.raises(PlanError, match="<-- here"):
        check(plan, shape, programs)


@pytest.mark.parametrize("overlap, factor", [("none", 1), ("oases", 2)])
def test_peaks_count_halves(overlap: str, factor: int) -> None:
    plan, shape = Plan.parse(f"pp=2,tp=2,mb=4,overlap={overlap},stages=1-1"), stack(2)
    first, _, last, _ = check(plan, shape, lower(plan, shape))
    assert (first.activations, last.activations) == (2 * factor, 1 * factor)
    assert (first.buffers, last.buffers) == (2 * factor, 1 * factor)

"""The check refuses every wrong program with words and the marked place, and says what right ones hold at most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.check import check, check_forward
from phalanx.program.instructions import Program, from_text, to_text
from phalanx.program.lower import lower, lower_forward
from phalanx.program.shape import ModelShape
from tests.program.random_plans import cases, simple_shape

Case = tuple[Plan, ModelShape]
Mutation = Callable[[str], str]


def drop(word: str) -> Mutation:
    return lambda text: f" {text} ".replace(f" {word} ", " ", 1)


def swap(one: str, other: str) -> Mutation:
    def exchange(text: str) -> str:
        words = text.split()
        i, j = words.index(one), words.index(other)
        words[i], words[j] = words[j], words[i]
        return " ".join(words)

    return exchange


def replace(old: str, new: str) -> Mutation:
    return lambda text: f" {text} ".replace(f" {old} ", f" {new} ", 1)


def refused(plan_text: str, mutations: dict[int, Mutation], *shared: tuple[int, ...]) -> str:
    """What the check says of the plan's programs after these mutations of some ranks."""
    plan = Plan.parse(plan_text)
    shape = simple_shape(sum(plan.stages), *shared)
    programs = list(lower(plan, shape))
    for rank, mutation in mutations.items():
        mutated = from_text(mutation(to_text(programs[rank])))
        assert mutated != programs[rank], "the mutation changed nothing"
        programs[rank] = mutated
    with pytest.raises(PlanError) as error:
        check(plan, shape, programs)
    return str(error.value)


PIPELINE = "pp=2,mb=4,stages=2-2"
SPLIT = "pp=2,mb=4,schedule=zb-h1,stages=2-2"
REPLICAS = "pp=2,dp=2,mb=2,stages=1-1"
ZERO_3 = "dp=2,zero=3,mb=2,stages=3"
BOTH = "pp=2,dp=2,zero=3,mb=2,stages=1-1"


@pytest.mark.parametrize("plan, mutations, words", [
    (PIPELINE, {0: drop("SF0.3>1")}, "rank 1 waits for RF1.3<0, which rank 0 never sends"),
    (PIPELINE, {1: drop("SB1.0>0")}, "rank 0 waits for RB0.0<1, which rank 1 never sends"),
    (PIPELINE, {1: drop("RF1.2<0")}, "rank 1 runs F1.2/2 before RF1.2<0 is posted"),
    (PIPELINE, {1: replace("RF1.2<0", "RF1.2<0 RF1.2<0")}, "rank 1 has RF1.2<0 twice"),
    (PIPELINE, {0: swap("SF0.0>1", "F0.0/1")}, "rank 0 has SF0.0>1 before F0.0/1"),
    (PIPELINE, {0: replace("SF0.0>1", "SF0.0>0")}, "rank 0 has SF0.0>0, but stage 1 is on rank 1"),
    (PIPELINE, {1: replace("F1.0/3", "F1.0/3 SF1.0>0")}, "stage 1 has no neighbour on another rank there"),
    (PIPELINE, {0: swap("F0.1/0", "F0.1/1")}, "rank 0 runs F0.1/1 before F0.1/0"),
    (PIPELINE, {1: swap("BW1.1/2", "BW1.1/3")}, "rank 1 runs BW1.1/2 before B1.1/3"),
    (PIPELINE, {1: swap("F1.1/3", "BW1.1/3")}, "rank 1 runs BW1.1/3 before F1.1/3"),
    (PIPELINE, {0: drop("BW0.3/0")}, "rank 0 has NORM before micro-batch 3 has added all its gradients to bucket 0"),
    (PIPELINE, {0: replace("F0.0/1", "F0.0/1 F0.0/1")}, "rank 0 runs F0.0/1 twice"),
    (PIPELINE, {0: replace("F0.0/1", "F0.0/2")}, "stage 0 is made of the blocks 0 to 1"),
    (PIPELINE, {0: replace("F0.0/1", "F1.0/2")}, "stage 1 is not on this rank (it holds stage 0)"),
    (PIPELINE, {0: replace("F0.0/1", "F0.4/1")}, "there are 4 micro-batches, counted from 0"),
    (PIPELINE, {0: drop("NORM")}, "rank 0 has STEP before NORM"),
    (PIPELINE, {0: drop("STEP")}, "rank 0 never runs STEP"),
    (PIPELINE, {0: replace("STEP", "STEP STEP")}, "rank 0 has STEP once more than this plan needs"),
    (PIPELINE, {1: replace("NORM", "T/0 NORM")}, "rank 1 has T/0 once more than this plan needs"),
    (PIPELINE, {1: replace("NORM", "G1.0/2 NORM")}, "rank 1 has G1.0/2, but zero=0 leaves every parameter in place"),
    (PIPELINE, {1: replace("NORM", "X1.0/2 NORM")}, "rank 1 has X1.0/2, but bucket 2 is not gathered"),
    (SPLIT, {1: drop("W1.3/2")}, "rank 1 has NORM before micro-batch 3 has added all its gradients to bucket 2"),
    (SPLIT, {1: swap("B1.1/2", "W1.1/2")}, "rank 1 runs W1.1/2 before B1.1/2"),
    (REPLICAS, {0: swap("R0.1/0", "BW0.1/0")}, "rank 0 has R0.1/0 before micro-batch 1 has added all its gradients"),
    (REPLICAS, {2: drop("COUNT")}, "rank 2 runs BW1.0/1 before COUNT"),
    (REPLICAS, {2: drop("R1.1/1")}, "rank 2 has NORM before the reduction of bucket 1"),
    (REPLICAS, {3: replace("R1.1/1", "R1.1/1 R1.1/1")}, "rank 3 has R1.1/1 once more than this plan needs"),
    (REPLICAS, {3: replace("R1.1/1", "R1.0/1")}, "rank 3 issues R1.0/1 on the group of ranks 2, 3, where"),
    ("dp=2,zero=1,stages=2", {1: drop("P/1")}, "rank 1 never runs P/1"),
    ("dp=2,zero=1,stages=2", {1: swap("P/1", "STEP")}, "rank 1 has P/1 before STEP"),
    ("dp=2,zero=1,stages=2", {1: swap("P/0", "P/1")}, "rank 1 issues P/1 on the group of ranks 0, 1"),
    (ZERO_3, {0: drop("G0.0/1")}, "rank 0 runs F0.0/1 while bucket 1 is not gathered"),
    (ZERO_3, {0: drop("X0.0/0")}, "has the parameters of 3 blocks gathered at G0.0/2, of which 2 are allowed"),
    (ZERO_3, {0: replace("G0.0/1", "G0.0/0 G0.0/1")}, "rank 0 gathers bucket 0 again with G0.0/0"),
    (ZERO_3, {0: replace("G0.0/1", "G0.0/1 G0.0/2")}, "has the parameters of 3 blocks gathered at G0.0/2, of which 2"),
    (ZERO_3, {0: replace("G0.0/1", "G0.0/1 G0.0/5")}, "rank 0 has G0.0/5, but holds nothing of bucket 5"),
    (ZERO_3, {1: replace("NORM", "G0.1/0 NORM")}, "rank 1 never frees bucket 0"),
    (ZERO_3, {1: replace("NORM", "G0.1/0 X0.1/0 NORM")}, "rank 1 issues G0.1/0 on the group of ranks 0, 1"),
    (BOTH, {1: replace("NORM", "G0.1/0 X0.1/0 NORM")}, "rank 0 never issues G0.1/0 on the group of ranks 0, 1"),
    (BOTH, {2: replace("NORM", "G1.1/1 X1.1/1 NORM")}, "rank 3 never issues G1.1/1 on the group of ranks 2, 3"),
    (ZERO_3 + ",gather=step", {0: replace("NORM", "G0.1/0 NORM")}, "rank 0 gathers bucket 0 again with G0.1/0"),
])  # fmt: skip
def test_a_wrong_program_is_refused_in_words(plan: str, mutations: dict[int, Mutation], words: str) -> None:
    message = refused(plan, mutations)
    assert words in message
    assert message.count("<-- here") == 1 and "→ correct the schedule" in message


def test_messages_must_stand_in_the_same_order_at_both_ends() -> None:
    # Both receives are posted before either is used, so only their order is wrong.
    message = refused(PIPELINE, {1: lambda text: replace("RF1.0<0", "RF1.1<0 RF1.0<0")(drop("RF1.1<0")(text))})
    assert "rank 1 posts RF1.1<0 where rank 0 sends SF0.0>1: the order must be the same at both ends" in message


def test_a_shared_bucket_is_summed_by_all_its_holders_in_one_order_after_its_reduction() -> None:
    plan, ties = "pp=2,dp=2,stages=2-2", ((0, 3), (1, 2))
    words = "rank 2 issues T/5 on the group of ranks 0, 2, where rank 0 issues T/4"
    assert words in refused(plan, {2: swap("T/4", "T/5")}, *ties)
    assert "rank 0 has NORM before T/4" in refused(plan, {0: drop("T/4")}, *ties)
    assert "rank 0 has T/4 before the reduction of bucket 4" in refused(plan, {0: swap("T/4", "R0.0/4")}, *ties)


def test_ranks_that_wait_for_each_other_are_shown() -> None:
    # Rank 0 runs each micro-batch to its end before the next; rank 1 wants all forwards first.
    first = "F0.0/0 SF0.0>1 RB0.0<1 BW0.0/0 F0.1/0 SF0.1>1 RB0.1<1 BW0.1/0 NORM STEP"
    last = "RF1.0<0 F1.0/1 RF1.1<0 F1.1/1 BW1.0/1 SB1.0>0 BW1.1/1 SB1.1>0 NORM STEP"
    with pytest.raises(PlanError) as error:
        check(Plan.parse("pp=2,mb=2,stages=1-1"), simple_shape(2), [from_text(first), from_text(last)])
    lines = str(error.value).splitlines()
    words = "deadlock: rank 0 waits for RB0.0<1 to run BW0.0/0; rank 1 waits for RF1.1<0 to run F1.1/1"
    assert lines[0] == f"program: {words}"
    assert lines[1].startswith("rank 0  F0.0    [BW0.0?]") and lines[1].endswith("<-- here")


def test_collectives_in_a_circle_are_a_deadlock_although_each_group_agrees() -> None:
    message = refused("pp=3,stages=1-1-1", {2: swap("T/3", "T/5")}, (0, 2), (0, 1), (1, 2))
    words = "rank 0 waits in T/3 for the ranks 0, 2; rank 1 waits in T/4 for the ranks 0, 1; rank 2 waits in T/5"
    assert words in message


def test_a_long_list_of_waiting_ranks_is_cut() -> None:
    plan = Plan.parse("pp=6,mb=2,stages=1-1-1-1-1-1")
    shape = simple_shape(6)
    programs = list(lower(plan, shape))
    text = drop("F0.1/0")(drop("SF0.1>1")(to_text(programs[0])))
    programs[0] = from_text(replace("BW0.0/0", "BW0.0/0 F0.1/0 SF0.1>1")(text))
    text = drop("F1.1/1")(drop("SF1.1>2")(to_text(programs[1])))
    programs[1] = from_text(
        replace("F1.0/1", "F1.0/1 F1.1/1 SF1.1>2")(drop("SF1.0>2")(text)).replace("SF1.1", "SF1.0>2 SF1.1")
    )
    with pytest.raises(PlanError, match=r"deadlock: .*; and 2 more"):
        check(plan, shape, programs)


def test_the_error_shows_the_grid_and_the_lowered_program_near_the_place() -> None:
    message = refused("pp=2,mb=3,stages=2-1", {0: drop("SF0.1>1")})
    assert message.splitlines() == [
        "program: rank 1 waits for RF1.1<0, which rank 0 never sends",
        "rank 0  F0.0    F0.1    ·       ·       BW0.0           F0.2    BW0.1           ·       BW0.2",
        "rank 1  ·       F1.0    BW1.0           [F1.1]  BW1.1           F1.2    BW1.2 <-- here",
        "rank 1, instruction 2 of 14: RF1.0<0 F1.0/2 [RF1.1<0] BW1.0/2 SB1.0>0 F1.1/2",
        "  → correct the schedule or the pass that put it there (phalanx/program/)",
    ]


def test_a_program_for_each_rank_is_needed() -> None:
    with pytest.raises(PlanError, match="1 programs for the 2 ranks of the plan"):
        check(Plan.parse("dp=2,stages=1"), simple_shape(1), lower(Plan.parse("stages=1"), simple_shape(1)))


@pytest.mark.parametrize(
    "word, words", [("BW0.0/0", "has BW0.0/0 in an evaluation"), ("STEP", "has STEP in an evaluat")]
)
def test_an_evaluation_holds_nothing_but_forwards(word: str, words: str) -> None:
    plan, shape = Plan(stages=(1,)), simple_shape(1)
    programs = [(*lower_forward(plan, shape, 2)[0], *from_text(word))]
    with pytest.raises(PlanError, match=words):
        check_forward(plan, shape, programs, 2)


def test_an_evaluation_runs_every_micro_batch() -> None:
    plan, shape = Plan(stages=(1,)), simple_shape(1)
    with pytest.raises(PlanError, match=r"rank 0 never runs F0\.2/0"):
        check_forward(plan, shape, lower_forward(plan, shape, 2), 3)


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_no_instruction_can_be_left_out(case: Case, data: st.DataObject) -> None:
    plan, shape = case
    programs = list(lower(plan, shape))
    rank = data.draw(st.integers(0, plan.world - 1))
    place = data.draw(st.integers(0, len(programs[rank]) - 1))
    programs[rank] = programs[rank][:place] + programs[rank][place + 1 :]
    with pytest.raises(PlanError, match="<-- here"):
        check(plan, shape, programs)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_peaks_are_those_the_schedule_promises(case: Case) -> None:
    plan, shape = case
    programs: tuple[Program, ...] = lower(plan, shape)
    for rank, peaks in enumerate(check(plan, shape, programs)):
        pp_index = rank // plan.dp
        ahead = min(plan.pp - pp_index, plan.mb)
        if plan.schedule in ("1f1b", "zb-h1"):
            assert peaks.activations == ahead
        if plan.schedule == "eager-1f1b":
            assert peaks.activations == min(2 * (plan.pp - pp_index) - 1, plan.mb)
        if plan.schedule == "gpipe":
            assert peaks.activations == plan.mb
        if plan.schedule == "zb-h1":
            assert peaks.weights_pending == min(pp_index + 1, plan.mb)
        if plan.schedule == "zb-v":
            assert max(peaks.activations, peaks.weights_pending) <= 2 * plan.pp
        if not plan.schedule.startswith("zb"):
            assert peaks.weights_pending == 0
        if plan.gathers != "step":
            assert peaks.gathered <= (2 + len(shape.shared) if plan.gathers else 0)

"""The check refuses every wrong program with words and the marked place, and says what right ones hold at most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.plan import Plan
from phalanx.program.check import check
from phalanx.program.compile import compile_forward, compile_plan
from phalanx.program.instructions import Op, Program, from_text, to_text
from phalanx.program.lower import lower, lower_forward
from phalanx.program.shape import BlockOp, ModelShape
from tests.program.random_plans import cases, chain, simple_shape
from tests.program.sliced_plans import grains, sliced_cases
from tests.program.tensor_shapes import chained_cases, redistribution, segment, stack, tensor_cases

Case = tuple[Plan, ModelShape]
Mutation = Callable[[str], str]

every_case = cases() | chained_cases() | tensor_cases() | sliced_cases()


def drop(word: str) -> Mutation:
    return replace(word, "")


def replace(old: str, new: str) -> Mutation:
    return lambda text: f" {text} ".replace(f" {old} ", f" {new} ", 1)


def swap(one: str, other: str) -> Mutation:
    def redistribution(text: str) -> str:
        words = text.split()
        i, j = words.index(one), words.index(other)
        words[i], words[j] = words[j], words[i]
        return " ".join(words)

    return redistribution


def move(word: str, behind: str) -> Mutation:
    """The word behind another one, of which the last is meant."""

    def moved(text: str) -> str:
        words = text.split()
        words.remove(word)
        words.insert(len(words) - words[::-1].index(behind), word)
        return " ".join(words)

    return moved


def mutated(plan: Plan, shape: ModelShape, mutations: dict[int, Mutation]) -> list[Program]:
    """The plan's programs after these mutations, by place in the pipeline."""
    programs = list(lower(plan, shape))
    for index, mutation in mutations.items():
        changed = from_text(mutation(to_text(programs[index])))
        assert changed != programs[index], "the mutation changed nothing"
        programs[index] = changed
    return programs


def refusal(plan: Plan, shape: ModelShape, programs: Sequence[Program]) -> str:
    with pytest.raises(PlanError) as error:
        check(plan, shape, programs, plan.mb, training=True)
    return str(error.value)


def refused(plan_text: str, mutations: dict[int, Mutation], *shared: tuple[int, ...]) -> str:
    """What the check says of the mutated programs of blocks that are one segment each."""
    plan = Plan.parse(plan_text)
    shape = simple_shape(sum(plan.stages), *shared)
    return refusal(plan, shape, mutated(plan, shape, mutations))


def assert_one_place(message: str) -> None:
    assert message.count("<-- here") == 1 and "→ correct the schedule" in message


PIPELINE = "pp=2,mb=4,stages=2-2"
SPLIT = "pp=2,mb=4,schedule=zb-h1,stages=2-2"
REPLICAS = "pp=2,dp=2,mb=2,stages=1-1"
ZERO_3 = "dp=2,zero=3,mb=2,stages=3"


@pytest.mark.parametrize("plan, mutations, words", [
    (PIPELINE, {0: drop("SF0.3>1")}, "rank 0 never runs SF0.3>1"),
    (PIPELINE, {1: drop("RF1.2<0")}, "rank 1 never runs RF1.2<0"),
    (PIPELINE, {1: replace("RF1.2<0", "RF1.2<0 RF1.2<0")}, "rank 1 runs RF1.2<0 twice"),
    (PIPELINE, {1: swap("RF1.0<0", "F1.0/2")}, "rank 1 uses activation(h2).0 before it is written at F1.0/2"),
    (PIPELINE, {0: swap("SF0.0>1", "F0.0/1")}, "rank 0 uses activation(h2).0 before it is written at SF0.0>1"),
    (PIPELINE, {0: replace("SF0.0>1", "SF0.0>0")}, "has SF0.0>0, but nothing passes there between stage 0 and rank 0"),
    (PIPELINE, {1: replace("F1.0/3", "F1.0/3 SF1.0>0")}, "nothing passes there between stage 1 and rank 0"),
    (PIPELINE, {0: swap("F0.1/0", "F0.1/1")}, "rank 0 uses activation(h1).1 before it is written at F0.1/1"),
    (PIPELINE, {1: swap("F1.1/3", "BW1.1/3")}, "rank 1 uses saved_bw(3:0).1 before it is written at BW1.1/3"),
    (PIPELINE, {0: drop("BW0.3/0")}, "rank 0 never runs B0.3/0"),
    (PIPELINE, {0: move("BW0.3/0", behind="NORM")}, "micro-batch 3 has added all its gradients to bucket 0 at NORM"),
    (PIPELINE, {0: replace("F0.0/1", "F0.0/1 F0.0/1")}, "rank 0 runs F0.0/1 twice"),
    (PIPELINE, {0: replace("F0.0/1", "F0.0/2")}, "stage 0 is made of the blocks 0 to 1"),
    (PIPELINE, {0: replace("F0.0/1", "F0.0")}, "rank 0 has F0.0, but stage 0 is made of the blocks 0 to 1"),
    (PIPELINE, {0: replace("F0.0/1", "F1.0/2")}, "stage 1 is not on this rank (it holds stage 0)"),
    (PIPELINE, {0: replace("F0.0/1", "F0.4/1")}, "there are 4 micro-batches, counted from 0"),
    (PIPELINE, {0: drop("I.1")}, "rank 0 never runs I.1"),
    (PIPELINE, {0: replace("I.1", "I.1 I.1")}, "rank 0 runs I.1 twice"),
    (PIPELINE, {0: replace("I.1", "I.1a")}, "rank 0 has I.1a once more than this plan needs"),
    (PIPELINE, {0: replace("I.1", "I.9")}, "rank 0 has I.9, but there are 4 micro-batches, counted from 0"),
    (PIPELINE, {0: swap("I.1", "F0.1/0")}, "rank 0 uses inputs().1 before it is written at F0.1/0"),
    (PIPELINE, {0: drop("NORM")}, "rank 0 never runs NORM"),
    (PIPELINE, {0: swap("NORM", "STEP")}, "rank 0 has STEP before NORM"),
    (PIPELINE, {0: drop("STEP")}, "rank 0 never runs STEP"),
    (PIPELINE, {0: replace("STEP", "STEP STEP")}, "rank 0 runs STEP twice"),
    (PIPELINE, {1: replace("NORM", "T/0 NORM")}, "rank 1 has T/0 once more than this plan needs"),
    (PIPELINE, {1: replace("NORM", "G1.0/2 NORM")}, "rank 1 has G1.0/2, but zero=0 leaves every parameter in place"),
    (PIPELINE, {1: replace("BW1.0/3", "A1.0/3 BW1.0/3")}, "has A1.0/3, for which block 3 has no op under this"),
    ("stages=2,recompute=yes", {0: drop("A0.0/1")}, "rank 0 never runs A0.0/1"),
    ("stages=2,recompute=yes", {0: swap("A0.0/1", "BW0.0/1")}, "uses saved_bw(1:0).0 before it is written at BW0.0/1"),
    (SPLIT, {1: drop("W1.3/2")}, "rank 1 never runs W1.3/2"),
    ("pp=2,mb=2,schedule=interleaved,stages=1-1-1-1", {0: replace("F2.0/2", "F1.0/1")}, "(it holds stages 0, 2)"),
    (REPLICAS, {0: swap("R0.1/0", "BW0.1/0")}, "micro-batch 1 has added all its gradients to bucket 0 at R0.1/0"),
    (REPLICAS, {1: move("COUNT", behind="BW1.0/1")}, "rank 1 uses items() before it is written at BW1.0/1"),
    (REPLICAS, {1: drop("COUNT")}, "rank 1 never runs COUNT"),
    (REPLICAS, {1: drop("R1.1/1")}, "rank 1 never runs R/1"),
    (REPLICAS, {1: replace("R1.1/1", "R1.1/1 R1.1/1")}, "rank 1 runs R/1 twice"),
    ("dp=2,zero=1,stages=2", {0: drop("P/1")}, "rank 0 never runs P/1"),
    ("dp=2,zero=2,mb=2,stages=2", {0: drop("R0.0/1")}, "rank 0 never runs R.0/1"),
    ("dp=4,zero=1,zero_degree=2,stages=2", {0: drop("S/1")}, "rank 0 never runs S/1"),
    (ZERO_3, {0: drop("G0.0/1")}, "rank 0 uses gathered(1) before it is written at F0.0/1"),
    (ZERO_3, {0: replace("G0.0/1", "G0.0/1 G0.0/2")}, "of 3 blocks gathered, of which 2 are allowed, at G0.0/2"),
])  # fmt: skip
def test_a_wrong_program_is_refused_in_words(plan: str, mutations: dict[int, Mutation], words: str) -> None:
    message = refused(plan, mutations)
    assert words in message
    assert_one_place(message)


WHOLE, HALVES = "stages=2", "overlap=halves,stages=2"
AGAIN, UNITS = "overlap=default_checkpoint,stages=1", "overlap=oases,stages=1"
INPUTS = "sequence=yes,save=input,stages=1"
TWO_STAGES = "pp=2,overlap=halves,stages=1-1"


@pytest.mark.parametrize("plan, mutations, words", [
    (WHOLE, {0: drop("CF0.0/0:3")}, "rank 0 never runs CF0.0/0:3"),
    (WHOLE, {0: swap("F0.0/0:2", "CF0.0/0:3")}, "rank 0 uses activation(p0).0 before it is written at CF0.0/0:3"),
    (WHOLE, {0: swap("CF0.0/0:3", "F0.0/0:4")}, "rank 0 uses activation(a0).0 before it is written at F0.0/0:4"),
    (WHOLE, {0: swap("W0.0/1:6", "R0.0/1")}, "before micro-batch 0 has added all its gradients to bucket 1 at R0.0/1"),
    (WHOLE, {0: drop("R0.0/1")}, "rank 0 never runs R/1"),
    (WHOLE, {0: replace("NORM", "R0.0/0 NORM")}, "rank 0 has R0.0/0 once more than this plan needs"),
    (WHOLE, {0: replace("F0.0/0:2", "F0.0/0:2 F0.0/0:2")}, "rank 0 runs F0.0/0:2 twice"),
    (WHOLE, {0: replace("F0.0/0:2", "F0.0/0:1")}, "rank 0 has F0.0/0:1, for which block 0 has no op"),
    (WHOLE, {0: replace("F0.0/0:2", "F0.0/0")}, "rank 0 has F0.0/0, for which block 0 has no op under this plan"),
    (WHOLE, {0: replace("CF0.0/0:3", "CF0.0/0:1")}, "rank 0 has CF0.0/0:1, for which block 0 has no op"),
    (WHOLE, {0: replace("CF0.0/0:3", "LF0.0/0:3")}, "rank 0 has LF0.0/0:3, for which block 0 has no op"),
    (WHOLE, {0: replace("F0.0/0:2", "F0.0a/0:2")}, "has F0.0a/0:2, but micro-batches are whole under this plan"),
    (WHOLE, {0: swap("F0.0/0:8", "F0.0/1:0")}, "rank 0 uses activation(h1).0 before it is written at F0.0/1:0"),
    (WHOLE, {0: swap("BW0.0/1:0", "BW0.0/0:8")}, "gradient(h1).0 before all of its 2 parts are there at BW0.0/0:8"),
    (HALVES, {0: replace("F0.0a/0:2", "F0.0/0:2")}, "but micro-batches are cut into the halves a and b"),
    (HALVES, {0: drop("I.0b")}, "rank 0 never runs I.0b"),
    (HALVES, {0: swap("F0.0b/1:8", "BW0.0b/1:8")}, "rank 0 uses saved_bw(1:8).0b before it is written at BW0.0b/1:8"),
    (HALVES, {0: move("BW0.0b/0:0", behind="NORM")}, "micro-batch 0 has added all its gradients to bucket 0 at NORM"),
    (UNITS, {0: swap("A0.0a/0:6", "B0.0a/0:6")}, "rank 0 uses saved_bw(0:6).0a before it is written at B0.0a/0:6"),
    (UNITS, {0: replace("A0.0a/0:6", "CA0.0a/0:3 A0.0a/0:6")}, "rank 0 has CA0.0a/0:3, for which block 0 has no op"),
    (INPUTS, {0: drop("CA0.0/0:5")}, "rank 0 never runs CA0.0/0:5"),
    (TWO_STAGES, {1: drop("RF1.0b<0")}, "rank 1 never runs RF1.0b<0"),
    (TWO_STAGES, {0: swap("SF0.0a>1", "F0.0a/0:8")}, "uses activation(h1).0a before it is written at SF0.0a>1"),
    (TWO_STAGES, {1: swap("RF1.0a<0", "RF1.0b<0")}, "the order must be the same at both ends"),
    ("pp=2,sequence=yes,stages=1-1", {1: swap("SB1.0>0", "BW1.0/1:0")}, "all of its 2 parts are there at SB1.0>0"),
])  # fmt: skip
def test_a_wrong_program_of_steps_and_halves_is_refused_in_words(
    plan: str, mutations: dict[int, Mutation], words: str
) -> None:
    parsed = Plan.parse(f"tp=2,{plan}")
    shape = stack(sum(parsed.stages), sequence=parsed.sequence, sums=True)
    message = refusal(parsed, shape, mutated(parsed, shape, mutations))
    assert words in message
    assert_one_place(message)


@pytest.mark.parametrize("plan, shape, index, one, other, activation", [
    (PIPELINE, simple_shape(4), 1, "BW1.0/2", "SB1.0>0", "h2"),
    (PIPELINE, simple_shape(4), 1, "BW1.0/3", "BW1.0/2", "h3"),
    ("tp=2,stages=2", stack(2), 0, "B0.0/1:6", "CB0.0/1:5", "f1"),
    ("tp=2,stages=2", stack(2), 0, "CB0.0/1:5", "BW0.0/1:4", "m1"),
])  # fmt: skip
def test_a_gradient_cannot_be_taken_before_it_is_given(
    plan: str, shape: ModelShape, index: int, one: str, other: str, activation: str
) -> None:
    parsed = Plan.parse(plan)
    message = refusal(parsed, shape, mutated(parsed, shape, {index: swap(one, other)}))
    words = message.splitlines()[0]
    assert f"gradient({activation}).0 " in words and words.endswith(f"at {other}")
    assert_one_place(message)


def test_weight_gradients_cannot_come_before_what_the_backward_leaves_for_them() -> None:
    plan, shape = Plan.parse("schedule=zb-h1,stages=2"), chain(2, "0", saved_w="1")
    message = refusal(plan, shape, mutated(plan, shape, {0: swap("B0.0/0", "W0.0/0")}))
    assert "rank 0 uses saved_w(0:0).0 before it is written at W0.0/0" in message


def attending(num_blocks: int) -> ModelShape:
    """Blocks that keep keys and values of earlier slices."""
    steps = tuple((BlockOp("segment", (f"h{n}",) if n else (), (f"h{n + 1}",), 1, pasts=1),) for n in range(num_blocks))
    return dataclasses.replace(simple_shape(num_blocks), ops=steps)


@pytest.mark.parametrize("plan, num_whole, index, mutation, words", [
    ("slices=2,stages=1", 0, 0, replace("F0.0.1/0", "F0.0.2/0"), "but micro-batch 0 has the slices 0 to 1"),
    ("slices=2,stages=1", 0, 0, replace("F0.0.1/0", "F0.0/0"), "but micro-batch 0 has the slices 0 to 1"),
    ("slices=2,stages=1", 0, 0, swap("F0.0.1/0", "BW0.0.1/0"), "saved_bw(0:0).0.1 before it is written at BW0.0.1/0"),
    ("slices=2,stages=1", 0, 0, move("BW0.0.0/0", behind="NORM"), "before micro-batch 0 has added all its gradients"),
    ("stages=1", 0, 0, replace("F0.0/0", "F0.0.0/0"), "but micro-batch 0 is not cut into slices under this plan"),
    ("slices=2,stages=2", 1, 0, replace("F0.0.1/1", "F0.0.1/0 F0.0.1/1"), "block 0 runs once per micro-batch, with"),
    ("slices=2,stages=2", 1, 0, swap("BW0.0.0/1", "BW0.0.0/0"), "gradient(h1).0 before all of its 2 parts are there"),
    ("pp=2,slices=2,stages=1-1", 0, 1, drop("RF1.0.1<0"), "rank 1 never runs RF1.0.1<0"),
    ("pp=2,slices=2,stages=1-1", 0, 1, swap("RF1.0.0<0", "RF1.0.1<0"), "the order must be the same at both ends"),
    ("pp=2,slices=2,stages=1-1", 1, 0, replace("SF0.0.0>1", "SF0.0.0>1 SF0.0.1>1"), "nothing passes there between"),
])  # fmt: skip
def test_a_wrong_program_with_slices_is_refused_in_words(
    plan: str, num_whole: int, index: int, mutation: Mutation, words: str
) -> None:
    parsed = Plan.parse(plan)
    plain = simple_shape(sum(parsed.stages))
    activations = frozenset(f"h{n + 1}" for n in range(num_whole))
    shape = dataclasses.replace(plain, granularities=grains(num_whole, plain.num_blocks), per_micro_batch=activations)
    message = refusal(parsed, shape, mutated(parsed, shape, {index: mutation}))
    assert words in message
    assert_one_place(message)


@pytest.mark.parametrize("plan, shape, mutation", [
    ("slices=2,stages=1", attending(1), swap("F0.0.0/0", "F0.0.1/0")),
    ("slices=2,stages=1", attending(1), swap("BW0.0.0/0", "BW0.0.1/0")),
    ("dp=2,stages=1", simple_shape(1), move("R0.0/0", behind="NORM")),
    ("dp=2,stages=1", simple_shape(1), move("R0.0/0", behind="STEP")),
    ("dp=4,zero=1,zero_degree=2,stages=1", simple_shape(1), swap("R0.0/0", "S/0")),
    ("dp=4,zero=1,zero_degree=2,stages=1", simple_shape(1), move("S/0", behind="NORM")),
    ("dp=2,zero=1,stages=1", simple_shape(1), swap("STEP", "P/0")),
    (ZERO_3, simple_shape(3), replace("G0.0/1", "G0.0/1 G0.0/5")),
], ids=["past", "d_past", "R after NORM", "R after STEP", "S before R", "S after NORM", "P before STEP", "G of none"],
)  # fmt: skip
def test_the_order_of_slices_and_of_the_update_is_proved(plan: str, shape: ModelShape, mutation: Mutation) -> None:
    parsed = Plan.parse(plan)
    assert_one_place(refusal(parsed, shape, mutated(parsed, shape, {0: mutation})))


def test_messages_must_stand_in_the_same_order_at_both_ends() -> None:
    # Both receives are posted before either is used, so only their order is wrong.
    message = refused(PIPELINE, {1: lambda text: replace("RF1.0<0", "RF1.1<0 RF1.0<0")(drop("RF1.1<0")(text))})
    assert "rank 1 posts RF1.1<0 where rank 0 sends SF0.0>1: the order must be the same at both ends" in message


def test_a_shared_bucket_is_summed_by_all_its_holders_in_one_order() -> None:
    plan, ties = "pp=2,dp=2,stages=2-2", ((0, 3), (1, 2))
    words = "rank 1 sums T/5 T/4 where rank 0 sums T/4 T/5: the order must be the same"
    assert words in refused(plan, {1: swap("T/4", "T/5")}, *ties)
    assert "rank 0 never runs T/4" in refused(plan, {0: drop("T/4")}, *ties)


def test_collectives_in_a_circle_are_a_deadlock_although_each_group_agrees() -> None:
    message = refused("pp=3,stages=1-1-1", {2: swap("T/3", "T/5")}, (0, 2), (0, 1), (1, 2))
    words = "rank 0 waits in T/3 for the ranks 0, 2; rank 1 waits in T/4 for the ranks 0, 1; rank 2 waits in T/5"
    assert words in message


def test_ranks_that_wait_for_each_other_are_shown() -> None:
    # Rank 0 runs each micro-batch to its end before the next; rank 1 wants all forwards first.
    first = "COUNT I.0 F0.0/0 SF0.0>1 RB0.0<1 BW0.0/0 I.1 F0.1/0 SF0.1>1 RB0.1<1 BW0.1/0 NORM STEP"
    last = "COUNT I.0 RF1.0<0 F1.0/1 I.1 RF1.1<0 F1.1/1 BW1.0/1 SB1.0>0 BW1.1/1 SB1.1>0 NORM STEP"
    lines = refusal(
        Plan.parse("pp=2,mb=2,stages=1-1"), simple_shape(2), [from_text(first), from_text(last)]
    ).splitlines()
    words = "deadlock: rank 0 waits for RB0.0<1 to run BW0.0/0; rank 1 waits for RF1.1<0 to run F1.1/1"
    assert words in lines[0]
    assert lines[1].startswith("rank 0  F0.0    [BW0.0?]") and lines[1].endswith("<-- here")


def test_a_long_list_of_waiting_ranks_is_cut() -> None:
    plan = Plan.parse("pp=6,mb=2,stages=1-1-1-1-1-1")
    late = move("I.1", behind="BW0.0/0"), move("F0.1/0", behind="I.1"), move("SF0.1>1", behind="F0.1/0")
    early = move("F1.1/1", behind="F1.0/1"), move("SF1.1>2", behind="F1.1/1"), move("I.1", behind="I.0")
    # Rank 1 wants its second forward first, which rank 0 only sends after the backward of its first.
    turned = move("SF1.0>2", behind="F1.1/1"), move("RF1.1<0", behind="RF1.0<0")

    def apply(*mutations: Mutation) -> Mutation:
        def applied(text: str) -> str:
            for mutation in mutations:
                text = mutation(text)
            return text

        return applied

    programs = mutated(plan, simple_shape(6), {0: apply(*late), 1: apply(*early, *turned)})
    message = refusal(plan, simple_shape(6), programs)
    assert "deadlock: " in message and "; and 2 more" in message


def test_an_redistribution_that_waits_for_a_message_that_waits_for_it_is_a_deadlock() -> None:
    plan, shape = Plan.parse("pp=2,tp=2,mb=2,stages=1-1"), stack(2)
    # The first stage's second forward only after the first backward, which the second stage wants the other way.
    words = to_text(lower(plan, shape)[0]).split()
    second = [word for word in words if word[:2] in ("I.", "F0", "CF", "SF") and ".1" in word]
    rest = [word for word in words if word not in second]
    end = rest.index("BW0.0/0:0") + 1
    first_rank = " ".join([*rest[:end], *second, *rest[end:]])
    words = to_text(lower(plan, shape)[1]).split()
    backward = [word for word in words if "1.0" in word and word[:2] in ("BW", "B1", "W1", "CB", "SB")]
    kept = [word for word in words if word not in backward]
    place = kept.index("F1.1/1:8") + 1
    second_rank = " ".join([*kept[:place], *backward, *kept[place:]])
    message = refusal(plan, shape, [from_text(first_rank), from_text(second_rank)])
    assert "deadlock: rank 0 waits for RB0.0<1 to run BW0.0/0:8" in message


def test_the_error_shows_the_grid_and_the_lowered_program_near_the_place() -> None:
    message = refused("pp=2,mb=3,stages=2-1", {1: swap("RF1.1<0", "RF1.2<0")})
    assert message.splitlines() == [
        "program: rank 1 uses activation(h2).1 before it is written at F1.1/2",
        "rank 0  F0.0    F0.1    ·       ·       BW0.0           F0.2    BW0.1           ·       BW0.2",
        "rank 1  ·       F1.0    BW1.0           [F1.1]  BW1.1           F1.2    BW1.2 <-- here",
        "rank 1, instruction 8 of 18: BW1.0/2 SB1.0>0 I.1 [F1.1/2] RF1.1<0 BW1.1/2 SB1.1>0",
        "  → correct the schedule or the pass that put it there (phalanx/program/)",
    ]


def test_what_is_missing_is_shown_at_the_end() -> None:
    message = refused("pp=2,mb=3,stages=2-1", {0: drop("SF0.1>1")})
    assert message.splitlines()[1].endswith("BW0.2 <-- here")
    assert message.splitlines()[3].endswith("BW0.2/0 NORM STEP [end]")


def test_a_program_for_each_place_in_the_pipeline_is_needed() -> None:
    with pytest.raises(PlanError, match="1 programs for the 2 ranks of the pipeline"):
        check(Plan.parse("pp=2,stages=1-1"), simple_shape(2), [()], 1, training=True)


@pytest.mark.parametrize("word", ["BW0.0/0", "STEP", "COUNT", "R0.0/0"])
def test_an_evaluation_holds_nothing_but_forwards(word: str) -> None:
    plan, shape = Plan(stages=(1,)), simple_shape(1)
    programs = [(*lower_forward(plan, shape, 2)[0], *from_text(word))]
    with pytest.raises(PlanError, match=f"has {word} in an evaluation, which is forward only"):
        check(plan, shape, programs, 2, training=False)


def test_an_evaluation_runs_every_micro_batch_whole() -> None:
    plan, shape = Plan(stages=(1,)), simple_shape(1)
    with pytest.raises(PlanError, match=r"rank 0 never runs I\.2"):
        check(plan, shape, lower_forward(plan, shape, 2), 3, training=False)
    halves, layers = Plan.parse("tp=2,overlap=oases,stages=1"), stack(1)
    whole = compile_forward(halves, layers, 1)
    with pytest.raises(PlanError, match=r"has A0\.0/0:0 in an evaluation, which is forward only"):
        check(whole.plan, layers, [(*whole.programs[0], *from_text("A0.0/0:0"))], 1, training=False)
    with pytest.raises(PlanError, match=r"has F0\.0a/0:0, but micro-batches are whole"):
        check(whole.plan, layers, [from_text("I.0 F0.0a/0:0")], 1, training=False)


@given(every_case, st.data())
def test_no_instruction_can_be_left_out_or_done_twice(case: Case, data: st.DataObject) -> None:
    plan, shape = case
    programs = list(lower(plan, shape))
    index = data.draw(st.integers(0, plan.pp - 1))
    program = programs[index]
    # How often parameters are gathered is free, as long as they are there and not too many.
    position = data.draw(st.sampled_from([i for i, it in enumerate(program) if it.op is not Op.GATHER]))
    for changed in (program[:position] + program[position + 1 :], program[: position + 1] + program[position:]):
        programs[index] = changed
        assert "<-- here" in refusal(plan, shape, programs)


@given(every_case, st.data())
def test_no_computation_can_move_before_what_writes_its_values(case: Case, data: st.DataObject) -> None:
    """What is written once and read later is not there the other way around."""
    plan, shape = case
    compiled = compile_plan(plan, shape)
    index = data.draw(st.integers(0, plan.pp - 1))
    table, program = compiled.tables[index], list(compiled.programs[index])
    written = {i: position for position, row in enumerate(table.rows) for i in row.writes}
    readers = [
        (position, written[i])
        for position, row in enumerate(table.rows)
        for i in row.reads
        if i in written and written[i] < position and row.instruction.op in (Op.F, Op.A, Op.B, Op.BW, Op.W)
        and table.values[i].kind in ("inputs", "activation", "gradient", "saved_bw") and not table.values[i].version
    ]  # fmt: skip
    assume(readers)
    reader, writer = data.draw(st.sampled_from(readers))
    program.insert(writer, program.pop(reader))
    programs = [*compiled.programs[:index], tuple(program), *compiled.programs[index + 1 :]]
    assert "<-- here" in refusal(plan, shape, programs)


def test_a_sum_has_as_many_parts_as_the_activation_has_readers() -> None:
    cells = ((0, 1),)
    steps = (
        segment("", "x"),
        redistribution("x", "e", cells, backward="all_reduce"),
        segment("e", "y"),
        segment("e x y", "h1"),
    )
    shape = ModelShape(1, (), (True,), (True,), (steps,))
    plan = Plan.parse("tp=2,stages=1")
    early = mutated(plan, shape, {0: swap("CB0.0/0:1", "B0.0/0:2")})
    assert "takes gradient(e).0 before all of its 2 parts are there at CB0.0/0:1" in refusal(plan, shape, early)
    early = mutated(plan, shape, {0: swap("BW0.0/0:0", "CB0.0/0:1")})
    assert "takes gradient(x).0 before all of its 2 parts are there at BW0.0/0:0" in refusal(plan, shape, early)


def test_more_forwards_at_once_than_1f1b_promises_are_refused() -> None:
    plan, shape = Plan.parse("pp=2,mb=3,slices=2,stages=1-1"), simple_shape(2)
    eager = dataclasses.replace(plan, schedule="gpipe")
    compiled = compile_plan(eager, shape)
    assert compiled.held_activations(0) == 6
    message = refusal(plan, shape, compiled.programs)
    assert (
        "rank 0 has 6 forwards at once that wait for their backward, where schedule=1f1b promises 3 at most" in message
    )


@given(cases())
def test_as_many_activations_and_gathered_blocks_are_held_as_promised(case: Case) -> None:
    plan, shape = case
    compiled = compile_plan(plan, shape)
    for rank in compiled.mesh.world:
        pp_index, held = compiled.pp_index(rank), compiled.held_activations(rank)
        if plan.schedule in ("1f1b", "zb-h1"):
            assert held == min(plan.pp - pp_index, plan.mb)
        if plan.schedule == "eager-1f1b":
            assert held == min(2 * (plan.pp - pp_index) - 1, plan.mb)
        if plan.schedule in ("gpipe", "block-major"):
            assert held == plan.mb * plan.v
        if plan.schedule == "zb-v":
            assert held <= 2 * plan.pp
        if plan.gathers != "step":
            assert compiled.peak_gathered(rank) <= (2 + len(shape.shared) if plan.gathers else 0)


@pytest.mark.parametrize("overlap, factor", [("none", 1), ("oases", 2)])
def test_halves_count_as_activations_of_their_own(overlap: str, factor: int) -> None:
    compiled = compile_plan(Plan.parse(f"pp=2,tp=2,mb=4,overlap={overlap},stages=1-1"), stack(2))
    assert [compiled.held_activations(rank) for rank in range(4)] == [2 * factor, 2 * factor, factor, factor]

"""What a plan says about tensor parallelism: degrees as text, what follows from the fields, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan.fields import Degrees, read_degrees, take_degrees, write_degrees
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS, divisors, listed

layers = st.lists(st.integers(1, 64), min_size=1, max_size=3).map(tuple)
degrees = st.lists(layers | st.sampled_from([(2, 1), (4,)]), min_size=1, max_size=12).map(tuple)


@given(degrees)
def test_degrees_read_back_from_their_text_and_from_lists(value: Degrees) -> None:
    assert read_degrees("degrees", write_degrees(value)) == value
    assert take_degrees([list(units) for units in value]) == value


@given(layers, st.integers(1, 9999))
def test_equal_layers_are_written_once(units: tuple[int, ...], count: int) -> None:
    assert len(write_degrees((units,) * count)) <= len(write_degrees((units,))) + 5


def test_degrees_are_written_by_units_layers_and_counts() -> None:
    plan = Plan.parse("tp=4,degrees=4:4*2+2:1*6+1")
    assert plan.degrees == ((4, 4),) * 2 + ((2, 1),) * 6 + ((1,),)
    assert plan.text == "tp=4,degrees=4:4*2+2:1*6+1"
    assert Plan.parse("tp=4,degrees=2:1*1").text == "tp=4,degrees=2:1"


def test_the_degrees_of_a_layer_are_its_own_or_those_of_all() -> None:
    assert Plan(tp=4).degrees_of(7, 2, 12) == (4, 4)
    alone = Plan.parse("tp=4,degrees=2:1")
    assert [alone.degrees_of(layer, 2, 3) for layer in range(3)] == [(2, 1)] * 3
    each = Plan.parse("tp=4,degrees=4+2:1+1:2:4")
    assert [each.degrees_of(layer, units, 3) for layer, units in enumerate((2, 2, 3))] == [(4, 4), (2, 1), (1, 2, 4)]
    assert Plan.parse("tp=4,degrees=2").degrees_of(0, 0, 1) == ()


@pytest.mark.parametrize(
    ("text", "layer", "num_units", "num_layers", "message", "hint"),
    [
        (
            "degrees=4*2+2", 0, 2, 5,
            "plan: degrees=4*2+2 is for 3 layers, and the model has 5: layer 3 has none",
            "give 5 layers, or one that stands for all",
        ),
        (
            "degrees=4*2+2", 1, 2, 2,
            "plan: degrees=4*2+2 is for 3 layers, and the model has 2: there is no layer 2",
            "give 2 layers, or one that stands for all",
        ),
        (
            "degrees=4+2:1", 1, 3, 2,
            "plan: degrees=2:1 is for 2 units, and layer 1 of the model has 3",
            "give layer 1 3 degrees, or one that stands for all its units",
        ),
    ],
)  # fmt: skip
def test_degrees_that_the_model_does_not_have_are_refused_with_the_layer_and_what_it_has(
    text: str, layer: int, num_units: int, num_layers: int, message: str, hint: str
) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.parse(f"tp=4,{text}").degrees_of(layer, num_units, num_layers)
    assert (refused.value.message, refused.value.hint) == (message, hint)


def test_an_overlap_mode_says_how_many_halves_there_are_and_what_is_computed_again() -> None:
    plans = {name: Plan(tp=2, overlap=name) for name in OVERLAPS}
    assert {name: (plan.halves, *plan.policies) for name, plan in plans.items()} == {
        "none": (1, "none"),
        "default_checkpoint": (1, "block"),
        "optim_comm_checkpoint": (1, "unit"),
        "overlap_checkpoint": (2, "block"),
        "oases": (2, "unit"),
        "halves": (2, "none"),
    }


@pytest.mark.parametrize("overlap", [name for name in OVERLAPS if OVERLAPS[name].recompute])
def test_what_an_overlap_mode_computes_again_may_be_said_but_not_contradicted(overlap: str) -> None:
    halves, implied = OVERLAPS[overlap]
    plain = Plan(tp=2, overlap=overlap)
    assert Plan.parse(f"tp=2,overlap={overlap},recompute={implied}") == plain
    assert Plan.from_json(plain.to_json().replace('"recompute": []', '"recompute": false')) == plain
    for policy in {"none", "light", "unit", "block", f"{implied}*2"} - {implied}:
        with pytest.raises(PlanError) as refused:
            Plan.parse(f"tp=2,overlap={overlap},recompute={policy}")
        assert f"overlap={overlap} computes every {implied} again" in refused.value.message
        assert f"recompute={policy} says otherwise" in refused.value.message
        assert f"use overlap={'halves' if halves > 1 else 'none'}," in refused.value.hint
        assert Plan.parse(f"tp=2,overlap={'halves' if halves > 1 else 'none'},recompute={policy}").halves == halves


def test_one_word_is_for_every_block_and_several_for_the_layers_of_a_model() -> None:
    layers = (1, 2, 3)  # between an embedding and a head
    expected = {
        "": ["none"] * 5,
        "recompute=yes": ["block"] * 5,
        "recompute=light": ["light"] * 5,
        "recompute=block*1+light*2": ["none", "block", "light", "light", "none"],
        "tp=2,recompute=unit+none+unit": ["none", "unit", "none", "unit", "none"],
        "tp=2,overlap=oases": ["unit"] * 5,
    }
    for text, policies in expected.items():
        assert [Plan.parse(text).recompute_of(block, layers) for block in range(5)] == policies


@pytest.mark.parametrize(("count", "lacks"), [(2, "layer 2 has none"), (4, "there is no layer 3")])
def test_policies_for_other_layers_than_the_model_has_are_refused(count: int, lacks: str) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.parse(f"recompute=block*{count}").recompute_of(0, (1, 2, 3))
    assert refused.value.message == f"plan: recompute=block*{count} is for {count} layers, and the model has 3: {lacks}"
    assert refused.value.hint == "give 3 layers, or one that stands for all"


def test_what_is_saved_of_a_gather_is_its_result_unless_said_otherwise() -> None:
    plans = [Plan(tp=2), Plan(tp=2, sequence=True), Plan(tp=2, sequence=True, save="input")]
    assert [plan.saves for plan in plans] == ["", "result", "input"]


def test_a_micro_batch_must_be_divisible_by_the_groups_of_every_degree_and_by_halves() -> None:
    texts = ["", "tp=4", "tp=4,degrees=4:2", "tp=4,degrees=4+1,overlap=halves", "tp=6,degrees=3:2"]
    # Three groups of degree 2 and two of degree 3 only fit a multiple of 6.
    assert [Plan.parse(text).multiple for text in texts] == [1, 1, 2, 8, 6]


FORM = "write a layer's units joined by ':', layers by '+', equal ones counted with '*': degrees=4:4*2+2:1*6"

WRONG = {
    "tp=2,degrees=": ("plan: degrees='' is not the degrees of a layer", FORM),
    "tp=2,degrees=x": ("plan: degrees='x' is not the degrees of a layer", FORM),
    "tp=2,degrees=2+1:x": ("plan: degrees='2+1:x': '1:x' is not the degrees of a layer", FORM),
    "tp=2,degrees=2++1": ("plan: degrees='2++1': '' is not the degrees of a layer", FORM),
    "tp=2,degrees=2*0": ("plan: degrees='2*0' is not the degrees of a layer", FORM),
    "tp=2,degrees=2*99999": ("plan: degrees='2*99999' is not the degrees of a layer", FORM),
    "tp=2,degrees=²": ("plan: degrees='²' is not the degrees of a layer", FORM),
    "tp=4,degrees=3:1": (
        "plan: degrees=3:1 has degree 3 for all layers, which does not divide tp=4", "use 1, 2 or 4",
    ),
    "tp=4,degrees=4+2:8": (
        "plan: degrees=4+2:8 has degree 8 for layer 1, which does not divide tp=4", "use 1, 2 or 4",
    ),
    "tp=2,degrees=0": ("plan: degrees=0 has degree 0 for all layers, which does not divide tp=2", "use 1 or 2"),
    "degrees=1": (
        "plan: degrees=1 does nothing with tp=1: every unit lies whole on its rank",
        "use tp=2 or more, or leave degrees out",
    ),
    "sequence=yes": (
        "plan: sequence=yes does nothing with tp=1: there is no other rank to split the tokens with",
        "use tp=2 or more, or leave sequence out",
    ),
    "save=input": (
        "plan: save=input does nothing with tp=1: nothing is gathered on the way into a unit",
        "use tp=2 or more, or leave save out",
    ),
    "overlap=oases": (
        "plan: overlap=oases does nothing with tp=1: there is no communication inside a block to hide",
        "use tp=2 or more, or leave overlap out; recompute=unit computes units again",
    ),
    "overlap=halves": (
        "plan: overlap=halves does nothing with tp=1: there is no communication inside a block to hide",
        "use tp=2 or more, or leave overlap out",
    ),
    "pairs=yes": (
        "plan: pairs=yes does nothing with tp=1: there is no communication inside a block to hide",
        "use tp=2 or more, or leave pairs out",
    ),
    "tp=2,pp=2,pairs=yes": (
        "plan: pairs=yes lengthens a pipeline of pp=2: "
        "the next stage would wait for a forward that waits for the backward beside it",
        "use pp=1, or pairs=no",
    ),
    "tp=2,schedule=gpipe,pairs=yes": (
        "plan: pairs=yes does not go with schedule=gpipe, which has no such neighbours",
        "use schedule=1f1b, or pairs=no",
    ),
    "tp=2,slices=2,pairs=yes": (
        "plan: pairs=yes does not go with slices, of which only the first of each micro-batch has a partner",
        "leave slices out, or use pairs=no",
    ),
    "tp=2,dp=2,zero=3,pairs=yes": (
        "plan: pairs=yes needs the parameters of more blocks at once than zero=3 with gather=micro-batch has",
        "use gather=step, a smaller zero, or pairs=no",
    ),
    "replicate=yes": (
        "plan: replicate=yes does nothing with tp=1: every unit lies whole on its rank",
        "use tp=2 or more, or leave replicate out",
    ),
    "tp=2,save=result": (
        "plan: save=result does nothing with sequence=no: nothing is gathered on the way into a unit",
        "use sequence=yes, or leave save out",
    ),
    "tp=2,sequence=yes,save=input,overlap=overlap_checkpoint": (
        "plan: save=input does nothing with overlap=overlap_checkpoint: "
        "of a block that is computed again nothing is saved but what it was given",
        "use overlap=oases, or leave save out",
    ),
    "tp=2,sequence=yes,save=input,recompute=yes": (
        "plan: save=input does nothing with recompute=block: "
        "of a block that is computed again nothing is saved but what it was given",
        "use recompute=unit, or leave save out",
    ),
    "tp=2,sequence=yes,save=results": ("plan: unknown save 'results'", "did you mean 'result'?"),
    "tp=2,overlap=oasis": ("plan: unknown overlap 'oasis'", "did you mean 'oases'?"),
    "tp=2,overlap=": ("plan: 'overlap=' says nothing", "write for example overlap=oases"),
    "tp=2,sequence=true": ("plan: sequence='true' is neither yes nor no", "use sequence=yes or sequence=no"),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_text_is_refused_with_the_reason_and_what_may_stand_there(text: str) -> None:
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    assert (refused.value.message, refused.value.hint) == WRONG[text]


def test_what_does_nothing_may_be_said_to_be_off() -> None:
    assert Plan.parse("sequence=no,overlap=none,pairs=no,replicate=no") == Plan()
    assert Plan.parse("tp=2,recompute=no,sequence=no") == Plan(tp=2)


@pytest.mark.parametrize("value", [2, [2], [[]], [[2.0]], [["2"]], [[True]], "2:1"])
def test_degrees_of_a_wrong_type_are_refused_with_an_example(value: Any) -> None:
    with pytest.raises(PlanError, match="has the wrong type") as refused:
        Plan(tp=2, degrees=value)
    assert refused.value.hint == "write for example [[4, 4], [2, 1]]"


@given(st.integers(1, 3000))
def test_the_divisors_of_a_number_are_all_that_divide_it(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_a_few_numbers_are_listed_in_words() -> None:
    assert [listed([1]), listed([1, 2]), listed([1, 2, 4])] == ["1", "1 or 2", "1, 2 or 4"]

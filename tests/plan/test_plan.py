"""The plan as text and as JSON, what follows from its fields, and what is said about a wrong one."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.plan import fields
from phalanx.plan.fields import POLICIES
from phalanx.plan.plan import AXES, SCHEDULES, Plan
from phalanx.plan.rules import OVERLAPS, PIPELINES_ONLY, SAVES, divisors

policies = st.lists(st.sampled_from(POLICIES), max_size=6).map(tuple)


@st.composite
def tensor_fields(draw: st.DrawFn) -> dict[str, Any]:
    """What goes together, with any other fields."""
    tp, sequence, overlap = draw(st.integers(2, 12)), draw(st.booleans()), draw(st.sampled_from(list(OVERLAPS)))
    implied = OVERLAPS[overlap].recompute
    recompute = (implied,) if implied else draw(policies)
    may_save = sequence and recompute != ("block",)
    units = st.lists(st.sampled_from(divisors(tp)), min_size=1, max_size=3).map(tuple)
    return {
        "tp": tp,
        "degrees": draw(st.lists(units, max_size=6).map(tuple)),
        "sequence": sequence,
        "save": draw(st.sampled_from(["", *SAVES])) if may_save else "",
        "overlap": overlap,
        "recompute": recompute,
        "replicate": draw(st.booleans()),
        "sums": draw(st.sampled_from(["", "exact"])),
    }


shares = st.integers(1, 100).map(lambda hundredths: hundredths / 100)
states = st.just(()) | st.tuples(st.tuples(st.sampled_from(["optimizer", "optimizer-step"]), shares))
states |= st.integers(1, 99).map(lambda n: (("optimizer", n / 100), ("optimizer-step", (100 - n) / 100)))
layers = {word: st.none() | st.tuples(st.just(word), st.integers(1, 99)) for word in ("activations", "parameters")}
offloads = st.tuples(st.tuples(*layers.values()), states).map(
    lambda words: (*(word for word in words[0] if word is not None), *words[1])
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any valid plan."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(2 if schedule in PIPELINES_ONLY else 1, 6))
    v = (
        draw(st.integers(2, 4))
        if schedule == "interleaved"
        else draw(st.sampled_from([0, Plan(schedule=schedule, pp=2).v]))
    )
    dp = draw(st.integers(1, 8))
    zero = draw(st.integers(0, 3)) if dp > 1 else 0
    num_stages = pp * (v or Plan(schedule=schedule, pp=pp).v)
    counts = st.lists(st.integers(1, 99), min_size=num_stages, max_size=num_stages).map(tuple)
    slicing = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)
    slices = draw(st.lists(slicing, max_size=3).map(tuple)) if schedule in ("1f1b", "gpipe") else ()
    moments = ["", "step", *(["micro-batch"] if zero >= 2 else [])]
    within: dict[str, Any] = draw(tensor_fields() | st.fixed_dictionaries({"recompute": policies}))
    gather = draw(st.sampled_from(moments)) if zero == 3 else ""
    may_pair = "tp" in within and pp == 1 and schedule == "1f1b" and not slices and (zero < 3 or gather == "step")
    pairs = may_pair and draw(st.booleans())
    offload = draw(offloads)
    if zero in (1, 2) or gather == "step" or pairs:
        offload = tuple(own for own in offload if own[0] != "parameters")
    return Plan(
        pp=pp, dp=dp, mb=draw(st.integers(1, 10**6)), schedule=schedule, v=v, stages=draw(st.just(()) | counts),
        zero=zero, slices=slices, **within,
        zero_degree=draw(st.sampled_from([0, *(d for d in range(2, dp + 1) if dp % d == 0)])) if zero else 0,
        gather=gather, pairs=pairs,
        reduce=draw(st.sampled_from(moments)) if dp > 1 else "", offload=offload,
    )  # fmt: skip


@given(plans())
def test_text_and_json_read_back(plan: Plan) -> None:
    assert Plan.parse(plan.text) == plan
    assert Plan.parse(plan.full_text) == plan
    assert Plan.from_json(plan.to_json()) == plan


@given(plans(), plans())
def test_texts_are_equal_exactly_when_plans_are(one: Plan, other: Plan) -> None:
    assert (one.text == other.text) == (one == other)
    assert (one.full_text == other.full_text) == (one == other)


@given(plans())
def test_every_word_of_the_text_is_needed(plan: Plan) -> None:
    words = plan.text.split(",") if plan.text else []
    for word in words:
        rest = ",".join(other for other in words if other != word)
        with contextlib.suppress(PlanError):  # what is left is not even a plan: the word was needed
            assert Plan.parse(rest) != plan


@given(plans())
def test_the_full_text_gives_the_mesh_the_micro_batches_and_the_schedule(plan: Plan) -> None:
    read = fields.read(plan.full_text)
    assert (read["pp"], read["dp"], read["mb"], read["schedule"]) == (plan.pp, plan.dp, plan.mb, plan.schedule)


def test_the_text_says_only_what_differs_from_the_defaults() -> None:
    assert Plan().text == ""
    assert Plan().full_text == "pp=1,dp=1,mb=1,schedule=1f1b"
    assert Plan(mb=4, schedule="gpipe", recompute=("block",)).text == "mb=4,schedule=gpipe,recompute=block"
    plan = Plan(pp=2, dp=4, schedule="zb-v", stages=(3, 4, 4, 3), zero=3, zero_degree=2, gather="step", reduce="step")
    shown = "pp=2,dp=4,schedule=zb-v,stages=3-4-4-3,zero=3,zero_degree=2,gather=step,reduce=step"
    assert plan.text == shown


def test_spaces_order_and_axes_of_one_do_not_matter() -> None:
    axes = ",".join(f"{axis}=1" for axis in AXES)
    assert Plan.parse(f" schedule=gpipe, mb=2 ,{axes},") == Plan(mb=2, schedule="gpipe")


def test_a_text_tells_what_was_given_from_what_was_not() -> None:
    assert fields.read("") == {}
    assert fields.read("mb=1,tp=1,stages=3-4") == {"mb": 1, "tp": 1, "stages": (3, 4)}


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Plan().mb = 2  # pyright: ignore[reportAttributeAccessIssue]


@given(plans())
def test_a_plan_can_be_used_as_a_key(plan: Plan) -> None:
    # A list of stages, as JSON has it, must have become a tuple.
    again = Plan.from_json(plan.to_json())
    assert {plan: "found"}[again] == "found"


# What follows from the fields.


@given(plans())
def test_every_stage_lies_on_exactly_one_rank_of_the_pipeline(plan: Plan) -> None:
    held = [plan.stages_of(pp_index) for pp_index in range(plan.pp)]
    assert sorted(stage for stages in held for stage in stages) == list(range(plan.num_stages))
    assert all(len(stages) == plan.v and list(stages) == sorted(stages) for stages in held)
    assert all(plan.pp_index(stage) == index for index, stages in enumerate(held) for stage in stages)


def test_virtual_stages_go_round_and_round_or_form_a_v() -> None:
    loop = Plan(pp=3, schedule="interleaved", v=2)
    assert [loop.pp_index(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    vee = Plan(pp=3, schedule="zb-v")
    assert [vee.pp_index(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_virtual_stages_default_to_what_the_schedule_needs() -> None:
    assert {name: Plan(pp=2, schedule=name).v for name in SCHEDULES} == {
        "1f1b": 1, "eager-1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "block-major": 1,
    }  # fmt: skip


@given(plans().filter(lambda plan: plan.stages))
def test_the_blocks_of_the_stages_are_consecutive_and_complete(plan: Plan) -> None:
    blocks = [block for stage in range(plan.num_stages) for block in plan.stage_blocks(stage)]
    assert blocks == list(range(sum(plan.stages)))
    assert tuple(len(plan.stage_blocks(stage)) for stage in range(plan.num_stages)) == plan.stages


def test_stages_must_be_decided_before_blocks_are_asked_for() -> None:
    with pytest.raises(AssertionError, match="not decided"):
        Plan().stage_blocks(0)


def test_the_world_is_as_many_ranks_as_pipelines_times_their_length() -> None:
    assert (Plan().world, Plan(pp=3, dp=4).world, Plan(pp=3, dp=4, tp=2).world) == (1, 12, 24)


def test_zero_shards_over_all_replicas_unless_a_degree_is_given() -> None:
    shards = [Plan(dp=4).shards, Plan(dp=4, zero=1).shards, Plan(dp=4, zero=1, zero_degree=2).shards]
    assert shards == [1, 4, 2]


def test_when_parameters_are_gathered_and_gradients_reduced_depends_on_zero() -> None:
    assert [Plan(dp=2, zero=zero).gathers for zero in range(4)] == ["", "", "", "micro-batch"]
    assert [Plan(dp=2, zero=zero).reduces for zero in range(4)] == ["step", "step", "micro-batch", "micro-batch"]
    chosen = Plan(dp=2, zero=3, gather="step", reduce="step")
    assert (chosen.gathers, chosen.reduces) == ("step", "step")


# What is said about a wrong plan.

ALL = (
    "allowed: degrees, dp, gather, mb, offload, overlap, pairs, pp, recompute, reduce, replicate, save, schedule, "
    "sequence, slices, stages, sums, tp, v, zero, zero_degree"
)

WRONG = {
    "mb": ("'mb' is not name=value", "mb=4,schedule=gpipe"),
    "sums=tree": ("unknown sums 'tree'", "use sums=exact, or leave it out"),
    "mb=0": ("mb=0 is not a number of micro-batches", "mb=1 or more"),
    "pp=0": ("pp=0 is not a number of pipeline ranks", "pp=1 or more"),
    "dp=0": ("dp=0 is not a number of replicas", "dp=1 or more"),
    "mb=-1": ("mb='-1' is not a whole number", "mb=1 or more"),
    "mb=2.5": ("mb='2.5' is not a whole number", "mb=1 or more"),
    "mb=²": ("mb='²' is not a whole number", "mb=1 or more"),
    "mb=": ("mb='' is not a whole number", "mb=1 or more"),
    "mb=" + "9" * 5000: ("is not a whole number", "mb=1 or more"),
    "zero=x": ("zero='x' is not a whole number", "zero=0, 1, 2 or 3"),
    "mb=2,mb=4": ("'mb' is given twice", "each field once"),
    "tp=1,tp=1": ("'tp' is given twice", "each field once"),
    "schedule=1f1": ("unknown schedule '1f1'", "did you mean '1f1b'"),
    "schedule=x": ("unknown schedule 'x'", "allowed: 1f1b, block-major, eager-1f1b, gpipe, interleaved, zb-h1, zb-v"),
    "schedule=": ("'schedule=' says nothing", "schedule=1f1b"),
    "recompute=true": ("recompute='true' does not say what is computed again", "use none, light, unit or block"),
    "recompute=block*2+lite": ("recompute='block*2+lite': 'lite' does not say what", "recompute=block*8+light*24"),
    "recompute=unit*0": ("recompute='unit*0' does not say what", "one for each layer"),
    "recompute=": ("recompute='' does not say what", "use none, light, unit or block"),
    "recomptue=yes": ("unknown field 'recomptue'", "did you mean 'recompute'"),
    "xyz=4": ("unknown field 'xyz'", ALL),
    "tp=0": ("tp=0 is not a number of tensor-parallel ranks", "tp=1 or more"),
    "tp=x": ("tp='x' is not a whole number", "tp=1 or more"),
    "schedule=eager-1f1b": ("schedule=eager-1f1b does nothing with pp=1: there are no messages to hide", "use pp=2 or"),
    "pp=2,v=2": ("schedule=1f1b has v=1 (virtual stages per rank), not v=2", "use v=1, or schedule=interleaved"),
    "pp=2,v=3,schedule=zb-v": ("schedule=zb-v has v=2 (virtual stages per rank), not v=3", "use v=2"),
    "pp=2,v=1,schedule=interleaved": ("at least 2 virtual stages per rank, not v=1", "v=2 or more, or schedule=1f1b"),
    "pp=1,schedule=interleaved": ("schedule=interleaved does nothing with pp=1", "pp=2 or more, or schedule=1f1b"),
    "pp=2,stages=3": ("pp=2 needs 2 block counts, and stages=3 has 1", "or leave stages out"),
    "pp=2,schedule=zb-v,stages=3-4": ("pp=2 with v=2 needs 4 block counts, and stages=3-4 has 2", "pp × v"),
    "pp=2,stages=3-0": ("stages=3-0 leaves stage 1 without blocks", "1 block or more"),
    "pp=2,stages=3--4": ("stages='3--4' is not a list of block counts", "joined by '-', for example stages=3-4-4-3"),
    "stages=": ("stages='' is not a list of block counts", "one count per stage"),
    "dp=2,zero=4": ("zero=4 is not a ZeRO stage", "use zero=0 (off), 1 (optimizer state)"),
    "zero=1": ("zero=1 does nothing with dp=1", "dp=2 or more, or leave zero out"),
    "dp=2,zero_degree=2": ("zero_degree=2 does nothing with zero=0", "zero=1, 2 or 3, or leave zero_degree out"),
    "dp=4,zero=1,zero_degree=3": ("zero_degree=3 cannot shard", "use zero_degree=2 or 4: a divisor of dp above 1"),
    "dp=4,zero=1,zero_degree=1": ("zero_degree=1 cannot shard", "use zero_degree=2 or 4"),
    "dp=2,zero=3,gather=steps": ("unknown gather 'steps'", "did you mean 'step'"),
    "dp=2,zero=2,gather=step": ("gather=step does nothing with zero=2", "zero=3, or leave gather out"),
    "dp=2,reduce=x": ("unknown reduce 'x'", "allowed: micro-batch, step"),
    "reduce=step": ("reduce=step does nothing with dp=1", "dp=2 or more, or leave reduce out"),
    "offload=": (
        "offload='' is nothing that can lie on the host",
        "activations, optimizer, optimizer-step, parameters",
    ),
    "offload=optimiser": ("'optimiser' is nothing that can lie on the host", "did you mean 'optimizer'"),
    "offload=activations+x:1": ("offload='activations+x:1': 'x' is nothing that can lie", "allowed: activations"),
    "offload=activations:0": ("activations:0 is not a number of layers per stage", "activations:1 or more, or"),
    "offload=activations:": ("activations: is not a number of layers per stage", "activations for all layers"),
    "offload=activations:1.5": ("activations:1.5 is not a number of layers", "activations:1 or more"),
    "offload=optimizer:0": ("optimizer:0 is not a share of the elements", "above 0 and up to 1 such as optimizer:0.6"),
    "offload=optimizer-step:2": ("optimizer-step:2 is not a share", "or optimizer-step for all of them"),
    "offload=activations+activations:2": ("has 'activations' twice", "write each word once"),
    "offload=optimizer+optimizer-step": ("keeps the optimizer's state on the host twice", "updates on the device, or"),
    "offload=optimizer:0.6+optimizer-step:0.6": ("state on the host twice", "such as optimizer:0.4+optimizer-step:0.6"),
    "offload=parameters:x": ("parameters:x is not a number of layers per rank", "or parameters for all blocks"),
    "offload=parameters+optimizer:0.5": (
        "offload=parameters+optimizer:0.5: optimizer:0.5 does nothing: with all parameters on the host",
        "use optimizer",
    ),
    "dp=2,zero=2,offload=parameters": (
        "offload=parameters does not go with zero=2: every host would keep",
        "use zero=3",
    ),
    "dp=2,zero=3,gather=step,offload=parameters:1": (
        "offload=parameters:1 does not go with gather=step, which keeps",
        "use gather=micro-batch, or leave parameters out",
    ),
    "tp=2,mb=2,pairs=yes,offload=parameters": (
        "does not go with pairs=yes, which needs the parameters of",
        "use pairs=no",
    ),
    "dp=2,zero=1,reduce=micro-batch": ("reduce=micro-batch saves nothing with zero=1", "zero=2 or 3, or reduce=step"),
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:40])
def test_a_wrong_text_is_refused_with_the_word_and_what_may_stand_there(text: str) -> None:
    message, hint = WRONG[text]
    with pytest.raises(PlanError) as refused:
        Plan.parse(text)
    assert message in refused.value.message
    assert hint in refused.value.hint


WRONG_JSON = {
    "{mb": ("not JSON", '"mb": 1'),
    "[4]": ("not a JSON object", '"mb": 1'),
    '{"mbs": 4}': ("unknown field 'mbs'", "did you mean 'mb'"),
    '{"mb": "4"}': ("mb='4' has the wrong type", "for example 1"),
    '{"mb": true}': ("mb=True has the wrong type", "for example 1"),
    '{"recompute": 1}': ("recompute=1 has the wrong type", "for example 'light'"),
    '{"recompute": ["block", 2]}': ("recompute=['block', 2] has the wrong type", "for example 'light'"),
    '{"recompute": "lite"}': ("recompute='lite' does not say what", "use none, light, unit or block"),
    '{"offload": 1}': ("offload=1 has the wrong type", "for example 'activations:12+optimizer:0.6'"),
    '{"offload": [["activations"]]}': ("has the wrong type", "for example 'activations:12+optimizer:0.6'"),
    '{"offload": [["weights", 1]]}': ("has the wrong type", "for example 'activations:12+optimizer:0.6'"),
    '{"offload": [["optimizer", 2]]}': ("optimizer:2 is not a share", "up to 1 such as optimizer:0.6"),
    '{"schedule": 1}': ("schedule=1 has the wrong type", "for example '1f1b'"),
    '{"stages": "3-4"}': ("stages='3-4' has the wrong type", "for example [3, 4, 4, 3]"),
    '{"stages": [3.0]}': ("stages=[3.0] has the wrong type", "for example [3, 4, 4, 3]"),
    '{"tp": "2"}': ("tp='2' has the wrong type", "for example 1"),
    '{"mb": 0}': ("mb=0 is not a number of micro-batches", "mb=1 or more"),
    '{"v": -1}': ("has v=1 (virtual stages per rank), not v=-1", "use v=1"),
    '{"schedule": "gpip"}': ("unknown schedule 'gpip'", "did you mean 'gpipe'"),
}


@pytest.mark.parametrize("text", WRONG_JSON)
def test_wrong_json_is_refused_with_the_field_and_what_may_stand_there(text: str) -> None:
    message, hint = WRONG_JSON[text]
    with pytest.raises(PlanError) as refused:
        Plan.from_json(text)
    assert message in refused.value.message
    assert hint in refused.value.hint


def test_a_wrong_type_from_python_is_refused_in_the_same_words() -> None:
    wrong: Any = "4"
    with pytest.raises(PlanError, match="plan: mb='4' has the wrong type\n  → write for example 1"):
        Plan(mb=wrong)


@given(st.integers(1, 99), st.integers(0, 40), st.integers(1, 60))
def test_what_host_and_device_update_at_once_is_divided_evenly(hundredths: int, bucket: int, parts: int) -> None:
    plan = Plan(offload=(("optimizer", hundredths / 100), ("optimizer-step", 1 - hundredths / 100)))
    here = sum(plan.updates_on_device(bucket, part) for part in range(parts))
    assert abs(here - parts * hundredths / 100) <= 1
    alone = Plan(offload=(("optimizer-step", 1.0),))
    assert not any(alone.updates_on_device(bucket, part) for part in range(parts))

"""Shape and costs from facts: every parameter is in one bucket, and costs follow from the assumed device."""

from __future__ import annotations

import pytest

from phalanx.model.facts.facts import SHIPPED, ModelFacts, from_json, load
from phalanx.plan.complete import balance
from phalanx.plan.plan import Plan
from phalanx.program.check import check
from phalanx.program.costs import Link
from phalanx.program.from_facts import Device, block_seconds, costs_of_facts, shape_of_facts
from phalanx.program.instructions import Op
from phalanx.program.lower import lower
from phalanx.program.simulate import simulate

DIMS = {"batch": 2, "tokens": 128}
PLAN = Plan(pp=2, stages=(7, 7))


@pytest.fixture(scope="module")
def gpt2() -> ModelFacts:
    facts = load("gpt2")
    assert facts is not None
    return facts


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_the_buckets_of_every_shipped_model_hold_each_parameter_once(path):
    facts = from_json(path.read_text(encoding="utf-8"))
    shape = shape_of_facts(facts)
    plan = Plan(stages=(len(facts.blocks),))
    dims = {dim: 1 if dim == "batch" else 16 for dim in facts.dims}
    costs = costs_of_facts(facts, plan, dims, Device())
    assert len(costs.buckets) == shape.num_buckets
    assert sum(bucket.weight_bytes for bucket in costs.buckets) == facts.parameter_bytes
    assert [bucket.weight_bytes > 0 for bucket in costs.buckets] == list(shape.held)
    assert sum(costs.saved_bytes) == facts.saved_bytes(dims)


def test_tied_parameters_are_a_bucket_of_their_own(gpt2: ModelFacts):
    shape = shape_of_facts(gpt2)
    assert (shape.num_blocks, shape.shared) == (14, ((0, 13),))
    assert shape.buckets(0) == (0, 14) and shape.buckets(13) == (13, 14)


def test_a_bucket_that_holds_nothing_but_tied_parameters_is_empty():
    facts = load("google-t5/t5-small")
    assert facts is not None
    shape = shape_of_facts(facts)
    assert shape.shared == ((0, 7, 14),) and not shape.held[0]


def test_a_block_takes_its_arithmetic_or_its_writing_to_memory_whichever_is_longer(gpt2: ModelFacts):
    flops = gpt2.flops(DIMS, training=False)
    assert sum(block_seconds(gpt2, DIMS, Device(1e9, 1e20))) == pytest.approx(flops / 1e9)
    saved = block_seconds(gpt2, DIMS, Device(1e20, 1e9))
    assert saved[0] == pytest.approx((776 * 2 * 128 + 8 * 128) / 1e9)


def test_the_backward_is_two_forwards_and_recomputation_adds_a_third(gpt2: ModelFacts):
    plain = costs_of_facts(gpt2, PLAN, DIMS, Device())
    again = costs_of_facts(gpt2, Plan(pp=2, stages=(7, 7), recompute=True), DIMS, Device())
    for block in range(14):
        assert plain.seconds(Op.BW, block) == pytest.approx(2 * plain.seconds(Op.F, block))
        assert again.seconds(Op.BW, block) == pytest.approx(3 * again.seconds(Op.F, block))


def test_recomputation_keeps_a_blocks_inputs_and_brings_the_rest_back(gpt2: ModelFacts):
    plain = costs_of_facts(gpt2, PLAN, DIMS, Device())
    again = costs_of_facts(gpt2, Plan(pp=2, stages=(7, 7), recompute=True), DIMS, Device())
    assert again.saved_bytes == (0, *plain.cut_bytes[:-1])
    assert [kept + rebuilt for kept, rebuilt in zip(again.saved_bytes, again.rebuilt_bytes)] == list(plain.saved_bytes)
    assert plain.rebuilt_bytes == (0,) * 14


def test_the_cut_is_what_crosses_and_goes_over_the_devices_link(gpt2: ModelFacts):
    link = Link(0.5, 1000.0)
    costs = costs_of_facts(gpt2, PLAN, DIMS, Device(link=link))
    assert costs.cut_bytes == (*[2 * 2 * 128 * 768] * 13, 0)
    assert costs.message(0, 1) == costs.group((0, 1)) == link


def test_adamw_in_bfloat16_holds_master_weights_and_two_moments_and_moves_all_of_it(gpt2: ModelFacts):
    bucket = costs_of_facts(gpt2, PLAN, DIMS, Device(memory_bytes_per_s=1.0)).buckets[1]
    parameters = 2363904 + 4723968
    assert (bucket.weight_bytes, bucket.gradient_bytes, bucket.optimizer_bytes) == (
        2 * parameters, 4 * parameters, 12 * parameters,
    )  # fmt: skip
    assert bucket.step_seconds == (2 * 14 + 4) * parameters


@pytest.mark.parametrize(
    "name, num_whole", [("gpt2", 0), ("google-t5/t5-small", 7), ("google/vit-base-patch16-224-in21k", 0)]
)
def test_an_encoder_runs_once_per_micro_batch_where_the_model_has_one(name: str, num_whole: int):
    facts = load(name)
    assert facts is not None and shape_of_facts(facts).num_whole_blocks == num_whole


def test_what_an_encoder_hands_on_belongs_to_the_micro_batch():
    facts = load("google-t5/t5-small")
    assert facts is not None
    dims = {"batch": 2, "source": 32, "tokens": 16}
    costs = costs_of_facts(facts, Plan(stages=(15,)), dims, Device())
    encoder_output = 2 * 32 * 512 * 2
    assert costs.whole_cut_bytes[6] == costs.cut_bytes[6] == encoder_output
    assert costs.whole_cut_bytes[8] == encoder_output < costs.cut_bytes[8]


def test_later_slices_of_a_model_take_longer_and_all_of_them_what_the_micro_batch_does(gpt2: ModelFacts):
    plan = Plan.parse("pp=2,slices=4,stages=7-7")
    cost = costs_of_facts(gpt2, plan, DIMS, Device()).slice_cost
    assert cost is not None and costs_of_facts(gpt2, PLAN, DIMS, Device()).slice_cost is None
    layer = [cost(1, 0, j) for j in range(4)]
    assert layer == sorted(layer) and layer[0] < layer[-1] and sum(layer) == pytest.approx(1)
    head = [cost(13, 0, j) for j in range(4)]
    assert head == pytest.approx([1 / 4] * 4)


@pytest.mark.parametrize("name", ["gpt2", "google-t5/t5-small"])
def test_a_step_of_slices_can_be_predicted_from_facts(name: str):
    facts = load(name)
    assert facts is not None
    dims = {"batch": 1, "tokens": 512, "source": 64}
    stages = balance([1.0] * len(facts.blocks), 4)
    makespans = {}
    for slices in ("", ",slices=8"):
        plan = Plan.parse(f"pp=4{slices},stages={'-'.join(map(str, stages))}")
        shape = shape_of_facts(facts)
        programs = lower(plan, shape)
        check(plan, shape, programs)
        makespans[slices] = simulate(plan, shape, programs, costs_of_facts(facts, plan, dims, Device())).makespan
    assert makespans[",slices=8"] < makespans[""]

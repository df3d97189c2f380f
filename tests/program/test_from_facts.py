"""Shape and costs from facts: every parameter is in one bucket, and costs follow from the assumed device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.model.facts.facts import SHIPPED, ModelFacts, from_json, load
from phalanx.plan.complete import balance
from phalanx.plan.plan import Plan
from phalanx.program.compile import compile_plan
from phalanx.program.costs import BucketCosts, Link
from phalanx.program.from_facts import Device, block_seconds, costs_of_facts, shape_of_facts
from phalanx.program.instructions import Op
from phalanx.program.memory import Sizes, live_bytes
from phalanx.program.simulate import simulate
from phalanx.program.timeline import Timeline

LOSS_BYTES = 4
DIMS = {"batch": 2, "tokens": 128}
PLAN = Plan(pp=2, stages=(7, 7))
CUT = 2 * 2 * 128 * 768  # bytes of gpt2's hidden state


@pytest.fixture(scope="module")
def gpt2() -> ModelFacts:
    facts = load("gpt2")
    assert facts is not None
    return facts


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_the_buckets_of_every_shipped_model_hold_each_parameter_once(path: Path) -> None:
    facts = from_json(path.read_text(encoding="utf-8"))
    shape = shape_of_facts(facts)
    plan = Plan(stages=(len(facts.blocks),))
    dims = {dim: 1 if dim == "batch" else 16 for dim in facts.dims}
    costs = costs_of_facts(facts, plan, dims, Device())
    assert len(costs.buckets) == shape.num_buckets
    assert sum(bucket.weight_bytes for bucket in costs.buckets) == facts.parameter_bytes
    assert [bucket.weight_bytes > 0 for bucket in costs.buckets] == list(shape.held)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_after_the_forward_of_every_shipped_model_lives_what_its_facts_say(path: Path) -> None:
    facts = from_json(path.read_text(encoding="utf-8"))
    plan, shape = Plan(stages=(len(facts.blocks),)), shape_of_facts(facts)
    dims = {dim: 2 if dim == "batch" else 16 for dim in facts.dims}
    compiled = compile_plan(plan, shape)
    live = live_bytes(compiled.tables[0], Sizes.of(compiled, costs_of_facts(facts, plan, dims, Device())))
    last = max(position for position, it in enumerate(compiled.programs[0]) if it.op is Op.F)
    assert live[last] == facts.saved_bytes(dims) + LOSS_BYTES
    assert live[-1] == 0


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


def test_the_backward_is_two_forwards_and_what_is_done_again_one(gpt2: ModelFacts) -> None:
    costs = costs_of_facts(gpt2, PLAN, DIMS, Device())
    for block in range(14):
        assert costs.seconds(Op.BW, block) == pytest.approx(2 * costs.seconds(Op.F, block))
        assert costs.seconds(Op.A, block) == costs.seconds(Op.F, block)


def test_recomputation_takes_longer_and_keeps_little_but_what_crosses(gpt2: ModelFacts) -> None:
    shape, found = shape_of_facts(gpt2), dict[bool, Timeline]()
    for recompute in (False, True):
        plan = Plan(stages=(14,), recompute=("block",) if recompute else ())
        costs = replace(costs_of_facts(gpt2, plan, DIMS, Device()), buckets=(BucketCosts(),) * shape.num_buckets)
        found[recompute] = simulate(compile_plan(plan, shape), costs)
    assert found[True].busy(0) > found[False].busy(0)
    again, plain = (found[recompute].memory[0]["activations"] for recompute in (True, False))
    largest = max(gpt2.saved_bytes(DIMS, [block]) for block in gpt2.blocks)
    assert again <= 13 * CUT + largest + LOSS_BYTES < plain


def test_the_cut_is_what_crosses_and_goes_over_the_devices_link(gpt2: ModelFacts) -> None:
    link = Link(0.5, 1000.0)
    costs = costs_of_facts(gpt2, PLAN, DIMS, Device(link=link))
    timeline = simulate(compile_plan(PLAN, shape_of_facts(gpt2)), costs)
    sent = [event.seconds for event in timeline.events if event.instruction.op in (Op.SEND_F, Op.SEND_B)]
    assert sent == pytest.approx([0.5 + CUT / 1000] * 2)
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


@pytest.mark.parametrize("stages", [
    "7-8",  # behind the encoder
])  # fmt: skip
def test_what_an_encoder_hands_on_is_sent_once_per_micro_batch(stages: str) -> None:
    facts = load("google-t5/t5-small")
    assert facts is not None
    plan = Plan.parse(f"pp=2,slices=2,stages={stages}")
    costs = costs_of_facts(facts, plan, {"batch": 2, "source": 32, "tokens": 16}, Device(link=Link(0, 1.0)))
    timeline = simulate(compile_plan(plan, shape_of_facts(facts)), costs)
    sent = [event.seconds for event in timeline.events if event.instruction.op is Op.SEND_F]
    encoder_output, decoder_input = 2 * 32 * 512 * 2, 2 * 8 * 512 * 2
    expected = [encoder_output] if stages == "7-8" else [encoder_output + decoder_input, decoder_input]
    assert sent == pytest.approx(expected)


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
    makespans: dict[str, float] = {}
    for slices in ("", ",slices=8"):
        plan = Plan.parse(f"pp=4{slices},stages={'-'.join(map(str, stages))}")
        shape = shape_of_facts(facts)
        costs = costs_of_facts(facts, plan, dims, Device())
        makespans[slices] = simulate(compile_plan(plan, shape), costs).makespan
    assert makespans[",slices=8"] < makespans[""]

"""Shape and costs from shipped facts: every parameter is in one bucket, and costs follow from the assumed device."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.errors import PlanError
from phalanx.expressions import evaluate
from phalanx.model.facts.facts import SHIPPED, ModelFacts, from_json, load
from phalanx.plan.complete import balance
from phalanx.plan.plan import Plan
from phalanx.predict.costs import BucketCosts, Link
from phalanx.predict.from_facts import Device, block_seconds, costs_of_facts, shipped
from phalanx.predict.memory import Sizes
from phalanx.predict.predict import predict
from phalanx.predict.shares import Shares
from phalanx.predict.simulate import simulate
from phalanx.predict.split_facts import TP, Split, SplitFacts, read_all, write_all
from phalanx.predict.timeline import Timeline
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import Op
from tests.program.lives import live_bytes

LOSS_BYTES = 4
DIMS = {"batch": 2, "tokens": 128}
PLAN = Plan(pp=2, stages=(7, 7))
CUT = 2 * 2 * 128 * 768  # bytes of gpt2's hidden state
FILES = sorted(SHIPPED.glob("*.json"))


def facts_of(name: str) -> ModelFacts:
    facts = load(name)
    assert facts is not None
    return facts


def described(facts: ModelFacts, plan: str = "") -> SplitFacts:
    found = shipped(facts, Plan.parse(plan))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def gpt2() -> SplitFacts:
    return described(facts_of("gpt2"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_buckets_of_every_shipped_model_hold_each_parameter_once(path: Path) -> None:
    facts = from_json(path.read_text(encoding="utf-8"))
    found = described(facts)
    dims = {dim: 1 if dim == "batch" else 16 for dim in facts.dims}
    costs = costs_of_facts(found, found.eager, dims, Device())
    assert len(costs.buckets) == found.eager.num_buckets
    assert sum(bucket.weight_bytes for bucket in costs.buckets) == facts.parameter_bytes
    assert [bucket.weight_bytes > 0 for bucket in costs.buckets] == list(found.eager.held)
    assert found.parameters == tuple(block.parameters for block in facts.blocks)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_after_the_forward_of_every_shipped_model_lives_what_its_facts_say(path: Path) -> None:
    facts = from_json(path.read_text(encoding="utf-8"))
    plan, found = Plan(stages=(len(facts.blocks),)), described(facts)
    dims = {dim: 2 if dim == "batch" else 16 for dim in facts.dims}
    live: dict[bool, int] = {}
    for compiled in (False, True):
        shape = replace(found.shape(compiled), inputs="0")
        bound = compile_plan(plan, shape)
        lives = live_bytes(bound.tables[0], Sizes.of(bound, costs_of_facts(found, shape, dims, Device())))
        live[compiled] = lives[max(place for place, it in enumerate(bound.programs[0]) if it.op is Op.F)]
        assert lives[-1] == 0
    activations = {tensor.name for block in facts.blocks for tensor in block.crossing}
    inputs = [block.shared for block in facts.blocks]
    others = {tensor.name: tensor.bytes for own in inputs for tensor in own if tensor.name not in activations}
    kept = sum(evaluate(size, dims) for size in others.values())
    keys = facts.saved_bytes(dims) - kept + LOSS_BYTES - live[False]  # of dropout: they belong to the inputs
    assert 0 <= keys <= 8 * dims["batch"] * len(facts.blocks)
    assert live[True] <= live[False] + 4 * len(facts.blocks)  # of OPT's layers a compiler keeps a number more


def test_tied_parameters_are_a_bucket_of_their_own(gpt2: SplitFacts):
    shape = gpt2.eager
    assert (shape.num_blocks, shape.shared) == (14, ((0, 13),))
    assert shape.buckets(0) == (0, 14) and shape.buckets(13) == (13, 14)


def test_a_bucket_that_holds_nothing_but_tied_parameters_is_empty():
    shape = described(facts_of("google-t5/t5-small")).eager
    assert shape.shared == ((0, 7, 14),) and not shape.held[0]


def test_a_block_takes_its_arithmetic_or_its_writing_to_memory_whichever_is_longer(gpt2: SplitFacts):
    flops = facts_of("gpt2").flops(DIMS, training=False)
    assert sum(block_seconds(gpt2.eager, DIMS, Device(1e9, 1e20))) == pytest.approx(flops / 1e9)
    saved = block_seconds(gpt2.eager, DIMS, Device(1e20, 1e9))
    assert saved[0] == pytest.approx(768 * 2 * 128 / 1e9)


def test_the_backward_is_two_forwards_and_what_is_done_again_one(gpt2: SplitFacts) -> None:
    costs = costs_of_facts(gpt2, gpt2.eager, DIMS, Device())
    for block in range(14):
        assert costs.seconds(Op.BW, block) == pytest.approx(2 * costs.seconds(Op.F, block))
        assert costs.seconds(Op.A, block) == costs.seconds(Op.F, block)


def test_recomputation_takes_longer_and_keeps_little_but_what_crosses(gpt2: SplitFacts) -> None:
    shape, found = gpt2.eager, dict[bool, Timeline]()
    for recompute in (False, True):
        plan = Plan(stages=(14,), recompute=("block",) if recompute else ())
        costs = costs_of_facts(gpt2, shape, DIMS, Device())
        found[recompute] = simulate(
            compile_plan(plan, shape), replace(costs, buckets=(BucketCosts(),) * shape.num_buckets)
        )
    assert found[True].busy(0) > found[False].busy(0)
    again, plain = (found[recompute].memory[0]["activations"] for recompute in (True, False))
    facts = facts_of("gpt2")
    largest = max(facts.saved_bytes(DIMS, [block]) for block in facts.blocks)
    assert again <= 13 * CUT + largest + LOSS_BYTES < plain


def test_the_cut_is_what_crosses_and_goes_over_the_devices_link(gpt2: SplitFacts) -> None:
    link = Link(0.5, 1000.0)
    costs = costs_of_facts(gpt2, gpt2.eager, DIMS, Device(link=link))
    timeline = simulate(compile_plan(PLAN, gpt2.eager), costs)
    sent = [event.seconds for event in timeline.events if event.instruction.op in (Op.SEND_F, Op.SEND_B)]
    assert sent == pytest.approx([0.5 + CUT / 1000] * 2)
    assert costs.message(0, 1, CUT) == link.send(CUT)
    assert costs.collective("all_reduce", (0, 1), CUT) == link.reduce(CUT, 2)


def test_adamw_in_bfloat16_holds_master_weights_and_two_moments_and_moves_all_of_it(gpt2: SplitFacts):
    bucket = costs_of_facts(gpt2, gpt2.eager, DIMS, Device(memory_bytes_per_s=1.0)).buckets[1]
    parameters = 2363904 + 4723968
    assert (bucket.weight_bytes, bucket.gradient_bytes, bucket.master_bytes, bucket.moment_bytes) == (
        2 * parameters, 4 * parameters, 4 * parameters, 8 * parameters,
    )  # fmt: skip
    assert bucket.step_seconds == (2 * 14 + 4) * parameters


@pytest.mark.parametrize("name, num_whole", [("gpt2", 0), ("google-t5/t5-small", 7)])
def test_an_encoder_runs_once_per_micro_batch_where_the_model_has_one(name: str, num_whole: int):
    assert described(facts_of(name), "slices=2").eager.num_whole_blocks == num_whole


def test_what_an_encoder_hands_on_is_sent_once_per_micro_batch() -> None:
    found, plan = described(facts_of("google-t5/t5-small"), "slices=2"), Plan.parse("pp=2,slices=2,stages=7-8")
    costs = costs_of_facts(found, found.eager, {"batch": 2, "source": 32, "tokens": 16}, Device(link=Link(0, 1.0)))
    timeline = simulate(compile_plan(plan, found.eager), costs)
    sent = [event.seconds for event in timeline.events if event.instruction.op is Op.SEND_F]
    assert sent == pytest.approx([2 * 32 * 512 * 2])


def test_later_slices_of_a_model_take_longer_and_all_of_them_what_the_micro_batch_does(gpt2: SplitFacts):
    plan = Plan.parse("pp=2,slices=4,stages=7-7")
    found = described(facts_of("gpt2"), "slices=4")
    own = Shares(plan, found.eager, costs_of_facts(found, found.eager, DIMS, Device()))
    program = [it for it in compile_plan(plan, found.eager).programs[0] if it.op is Op.F and it.block == 1]
    layer = [own.seconds(it) for it in program]
    assert layer == sorted(layer) and layer[0] < layer[-1] and sum(layer) == pytest.approx(1)
    head = [it for it in compile_plan(plan, found.eager).programs[1] if it.op is Op.F and it.block == 13]
    assert [own.seconds(it) for it in head] == pytest.approx([1 / 4] * 4)


@pytest.mark.parametrize("name", ["gpt2", "google-t5/t5-small"])
def test_a_step_of_slices_can_be_predicted_from_facts(name: str):
    facts = facts_of(name)
    dims = {"batch": 1, "tokens": 512, "source": 64}
    stages = balance([1.0] * len(facts.blocks), 4)
    makespans: dict[str, float] = {}
    for slices in ("", ",slices=8"):
        plan = Plan.parse(f"pp=4{slices},stages={'-'.join(map(str, stages))}")
        found = described(facts, plan.text)
        costs = costs_of_facts(found, found.eager, dims, Device())
        makespans[slices] = simulate(compile_plan(plan, found.eager), costs).makespan
    assert makespans[",slices=8"] < makespans[""]


def test_a_plan_of_which_no_facts_are_shipped_names_the_way_to_get_them() -> None:
    with pytest.raises(PlanError) as refused:
        predict(facts_of("gpt2"), "tp=3", None, 8, {"batch": 8, "tokens": 64}, Device())
    assert refused.value.message == "plan: no facts of gpt2 are shipped that say what tp=3 makes of it"
    assert "phalanx.engine.describe" in refused.value.hint


def test_a_large_model_split_over_many_ranks_is_predicted_without_torch() -> None:
    code = (
        "import sys\n"
        "from phalanx.model.facts.facts import load\n"
        "from phalanx.predict.from_facts import Device\n"
        "from phalanx.predict.predict import predict\n"
        "facts = load('llama-3.3-70b')\n"
        "dims = {'batch': 32, 'tokens': 4096}\n"
        "for plan in ('pp=8,tp=8,mb=8', 'pp=2,tp=8,mb=1,sequence=yes'):\n"
        "    found = predict(facts, plan, None, 32, dims, Device())\n"
        "    assert found.timeline.makespan > 0 and found.timeline.memory[0]['working'] > 0\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_small_models_of_many_kinds_are_split_without_torch() -> None:
    code = (
        "import sys\n"
        "from phalanx.model.facts.facts import load\n"
        "from phalanx.predict.from_facts import Device\n"
        "from phalanx.predict.predict import predict\n"
        "for name in ('bert-base-cased', 'electra-base-generator', 'vit-base-patch16-224-in21k', 'qwen2.5-0.5b', \n"
        "             'qwen3-0.6b'):\n"
        "    facts = load(name)\n"
        "    for plan in ('tp=2,mb=2', 'pp=2,tp=4,mb=2', 'tp=2,sequence=yes,mb=2'):\n"
        "        found = predict(facts, plan, None, 8, dict.fromkeys(facts.dims, 64) | {'batch': 8}, Device())\n"
        "        assert found.timeline.makespan > 0\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


@pytest.mark.parametrize("path", sorted((SHIPPED / "splits").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_facts_of_splits_read_back_as_they_were_written(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    splits = [Split(), Split(sliced=True), *(Split(tp, sequence=sequence) for tp in TP for sequence in (False, True))]
    found = [facts for split in splits if (facts := read_all(text).get(split)) is not None]
    assert found[0].split == Split() and all(facts.shape(True).num_blocks == len(facts.parameters) for facts in found)
    whole = from_json((SHIPPED / path.name).read_text(encoding="utf-8"))
    layers = [number for number, block in enumerate(whole.blocks) if any(unit.name for unit in block.units)]
    assert all(list(facts.shape(compiled).layers) == layers for facts in found for compiled in (False, True))
    again = read_all(write_all(found, json.loads(text)["blocks"]))
    assert [again.get(facts.split) for facts in found] == found


def test_segments_that_are_compiled_keep_less_and_split_ones_their_part() -> None:
    facts = facts_of("llama-3.3-70b")

    def kept(plan: str, compiled: bool) -> int:
        shape = described(facts, plan).shape(compiled)
        steps = [step for step in shape.ops_of(1) if step.kind == "segment"]
        texts = [size for step in steps for size in (step.bw.saved_b, step.bw.saved_bw) if size]
        texts += [
            shape.sizes[activation] for activation in {activation for step in steps for activation in step.bw.reads}
        ]
        return sum(evaluate(size, {"batch": 1, "tokens": 64}) for size in texts)

    for plan in ("", "tp=8", "tp=8,sequence=yes"):
        assert kept(plan, True) < kept(plan, False)
    assert kept("", True) > kept("tp=8", True) > kept("tp=8,sequence=yes", True) > kept("", True) / 8

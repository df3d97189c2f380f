"""Facts: what is shipped, what is computed from them, and that they are read without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.expressions import evaluate
from phalanx.model.facts.facts import (
    SHIPPED,
    BlockFacts,
    ModelFacts,
    SharedFacts,
    TensorFacts,
    TiedFacts,
    UnitFacts,
    from_json,
    load,
    runs,
    shipped_path,
    to_json,
)
from phalanx.model.zoo import zoo_table

LLAMA_70B = "meta-llama/Llama-3.3-70B-Instruct"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCABULARY, LAYERS = 8192, 64, 8, 128, 28672, 128256, 80
PROJECTIONS = 2 * HIDDEN * HEADS * HEAD_DIM + 2 * HIDDEN * KV_HEADS * HEAD_DIM  # q and o, k and v
GATED_FFN = 3 * HIDDEN * FFN  # gate, up, down


def _shipped(name: str) -> ModelFacts:
    facts = load(name)
    assert facts is not None
    return facts


def test_facts_are_read_without_torch_or_transformers() -> None:
    code = (
        "import sys; from phalanx.model.facts.facts import load; facts = load('llama-3.3-70b');"
        "assert facts and facts.flops({'batch': 1, 'tokens': 2048}) > 10**14;"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_zoo_model_has_facts_and_no_other() -> None:
    assert {path.name for path in SHIPPED.glob("*.json")} == {shipped_path(name).name for name in zoo_table.names()}


@pytest.mark.parametrize("name", zoo_table.names())
def test_shipped_facts_are_complete_and_consistent(name: str) -> None:
    facts = _shipped(name)
    entry = zoo_table.lookup(name)
    assert entry is not None
    assert (facts.name, facts.task, facts.dtype) == (name, entry.task, "bfloat16")
    assert to_json(facts) == shipped_path(name).read_text(encoding="utf-8")
    counted_again = sum(tied.parameters * (len(tied.blocks) - 1) for tied in facts.tied)
    assert sum(block.parameters for block in facts.blocks) - counted_again == facts.num_parameters
    assert facts.blocks[-1].crossing == () and all(block.crossing for block in facts.blocks[:-1])
    dims = {dim: 3 for dim in facts.dims}
    assert facts.flops(dims) > 0
    for block in facts.blocks:
        assert sum(evaluate(shared.bytes, dims) for shared in block.shared) <= evaluate(block.saved_bytes, dims)


@pytest.mark.parametrize("name", zoo_table.names())
def test_facts_of_other_precisions_say_the_same_of_what_does_not_depend_on_it(name: str) -> None:
    """Of all models in float16, and in float32 of those that have a file."""
    first, wider = _shipped(name), ("float32",) if shipped_path(name, "float32").is_file() else ()
    for dtype in ("float16", *wider):
        facts = load(name, dtype)
        assert facts is not None and (facts.dtype, facts.num_parameters) == (dtype, first.num_parameters)
        assert [block.units for block in facts.blocks] == [block.units for block in first.blocks]
        dims = dict.fromkeys(facts.dims, 8)
        assert dtype == "float16" or facts.saved_bytes(dims) > first.saved_bytes(dims)
        crossing = {tensor.dtype for block in facts.blocks for tensor in block.crossing}
        assert "bfloat16" not in crossing and dtype in crossing


def test_facts_of_a_precision_that_is_not_shipped_are_not_made_up() -> None:
    assert load("gpt2", "float64") is None


def test_all_shipped_facts_together_are_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*.json*")) < 2**20


def test_a_model_that_is_not_in_the_zoo_has_no_facts() -> None:
    assert load("somebody/gpt2") is None


def test_an_alias_gives_the_facts_of_the_model() -> None:
    assert load("opt-13.7b") == load("facebook/opt-13b") != None  # noqa: E711


def test_the_parameters_of_llama_70b_are_those_counted_by_hand() -> None:
    facts = _shipped(LLAMA_70B)
    layer = PROJECTIONS + GATED_FFN + 2 * HIDDEN  # and two norms
    assert [block.parameters for block in facts.blocks[1:-1]] == [layer] * LAYERS
    assert facts.blocks[0].parameters == VOCABULARY * HIDDEN
    assert facts.blocks[-1].parameters == VOCABULARY * HIDDEN + HIDDEN
    assert facts.num_parameters == LAYERS * layer + 2 * VOCABULARY * HIDDEN + HIDDEN == 70_553_706_496
    assert facts.parameter_bytes == 2 * 70_553_706_496


@given(st.integers(1, 64), st.integers(2, 131072))
def test_the_flops_of_llama_70b_are_those_computed_by_hand(batch: int, tokens: int) -> None:
    facts = _shipped(LLAMA_70B)
    dims = {"batch": batch, "tokens": tokens}
    # Each pair of a query and a key it sees costs two products over the head; a causal query sees half of the keys.
    attention = batch * HEADS * tokens * tokens * (2 * HEAD_DIM + 2 * HEAD_DIM) // 2
    layer = 2 * batch * tokens * (PROJECTIONS + GATED_FFN) + attention
    self_attention, feed_forward = facts.blocks[1].units
    assert (self_attention.name, feed_forward.name) == ("self_attn", "feed-forward")
    assert evaluate(self_attention.flops, dims) == 2 * batch * tokens * PROJECTIONS + attention
    assert evaluate(feed_forward.flops, dims) == 2 * batch * tokens * GATED_FFN
    assert evaluate(facts.blocks[1].flops, dims) == layer
    forward = LAYERS * layer + 2 * batch * tokens * HIDDEN * VOCABULARY
    assert facts.flops(dims, training=False) == forward
    assert facts.flops(dims) == 3 * forward


def test_only_the_hidden_state_crosses_the_cuts_of_a_decoder() -> None:
    facts = _shipped(LLAMA_70B)
    for block in facts.blocks[:-1]:
        assert block.crossing == (TensorFacts(f"{block.name}:0", ("batch", "tokens", HIDDEN), "bfloat16"),)
    crossing = facts.blocks[7].crossing[0]
    assert crossing.sizes({"batch": 2, "tokens": 64}) == (2, 64, HIDDEN)
    assert crossing.bytes({"batch": 2, "tokens": 64}) == 2 * 2 * 64 * HIDDEN


def test_the_encoders_output_crosses_every_cut_of_the_decoder_and_is_kept_once() -> None:
    facts = _shipped("openai/whisper-small")
    decoder = [block for block in facts.blocks if block.name.startswith("model.decoder.layers.")]
    carried = {tensor.name for block in decoder[:-1] for tensor in block.crossing} - {f"{b.name}:0" for b in decoder}
    assert len(decoder) == 12 and len(carried) == 1
    kept = [shared for block in decoder for shared in block.shared if shared.name in carried]
    assert len(kept) == 12 and len(set(kept)) == 1
    dims = {"batch": 1, "tokens": 8}
    apart = sum(facts.saved_bytes(dims, [block]) for block in decoder)
    assert apart - facts.saved_bytes(dims, decoder) >= 11 * evaluate(kept[0].bytes, dims) > 0


def test_tied_parameters_are_named_with_the_blocks_that_use_them() -> None:
    (tied,) = _shipped("gpt2").tied
    assert tied == TiedFacts("transformer.wte.weight", 50257 * 768, ("embedding", "head"))


def test_tokens_per_sample_counts_source_and_target_and_is_one_for_images() -> None:
    assert _shipped("google-t5/t5-small").tokens_per_sample({"batch": 9, "source": 8, "tokens": 6}) == 14
    assert _shipped("google/vit-base-patch16-224-in21k").tokens_per_sample({"batch": 9}) == 1


def _layer(index: int, units: tuple[UnitFacts, ...] = (), template: str = "layers.0") -> BlockFacts:
    activations = (
        TensorFacts(f"layers.{index}:0", ("batch", 4), "float32"),
        TensorFacts("mask", (2, "tokens"), "bool"),
    )
    shared = (SharedFacts("mask", "2*tokens"), SharedFacts(f"layers.{index - 1}:0", "16*batch"))
    return BlockFacts(f"layers.{index}", template, units, activations, "100*batch*tokens + 16*batch + 2*tokens", shared)


def test_what_blocks_share_is_counted_once_for_blocks_held_together() -> None:
    facts = ModelFacts("m", "custom", "float32", ("batch", "tokens"), None, 0, (_layer(1), _layer(2)), (), ())
    dims = {"batch": 3, "tokens": 5}
    assert facts.saved_bytes(dims, facts.blocks[:1]) == 1500 + 48 + 10
    assert facts.saved_bytes(dims) == 2 * (1500 + 48) + 10


def test_consecutive_blocks_of_equal_cost_form_a_run() -> None:
    other = _layer(3, template="layers.3")
    blocks = [_layer(1), _layer(2), other, _layer(4)]
    assert runs(blocks) == [blocks[:2], [other], blocks[3:]]


UNITS = st.builds(UnitFacts, st.sampled_from(["", "attn", "feed-forward"]), st.integers(0), st.just("8*batch*tokens"))


@given(
    st.lists(st.lists(UNITS, unique_by=lambda unit: unit.name).map(tuple), max_size=5),
    st.sampled_from(["float32", "bfloat16"]),
    st.none() | st.integers(1),
    st.lists(st.text(max_size=8)).map(tuple),
)
def test_facts_survive_json(
    units: list[tuple[UnitFacts, ...]], dtype: str, max_tokens: int | None, notes: tuple[str, ...]
) -> None:
    blocks = tuple(_layer(index, own) for index, own in enumerate(units))
    tied = (TiedFacts("w", 12, ("layers.0", "layers.1")),)
    facts = ModelFacts("owner/m", "causal-lm", dtype, ("batch", "tokens"), max_tokens, 12, blocks, tied, notes)
    assert from_json(to_json(facts)) == facts


def test_blocks_that_differ_in_name_only_are_written_once() -> None:
    def size(layers: int) -> int:
        blocks = tuple(_layer(index) for index in range(1, layers + 1))
        return len(to_json(ModelFacts("m", "custom", "float32", ("batch", "tokens"), None, 0, blocks, (), ())))

    assert size(90) - size(10) == 80 * len('  "layers.10": 0,\n')

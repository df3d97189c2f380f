"""How a captured model is made to run on slices: what is cut, what stays whole, and what is refused."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.engine.reductions import StepRun
from phalanx.errors import PlanError
from phalanx.model.ops.slice_attention import Past, Slice
from phalanx.model.slicing import Sliced, slice_model
from phalanx.program.instructions import Op
from tests import captured
from tests.captured import DOUBLE, GEMMA3, GPT2, LLAMA, T5, WHISPER

long = pytest.mark.long
SAMPLES, TOKENS = 3, 9


def sliced(name: str, **options: bool) -> Sliced:
    return slice_model(captured.named(name, **options).captured, DOUBLE)


def grains(name: str) -> dict[str, str]:
    found = sliced(name)
    return {block.name: grain for block, grain in zip(found.captured.blocks.blocks, found.granularities, strict=True)}


@pytest.mark.parametrize("name", [GPT2, LLAMA])
def test_every_block_of_a_decoder_runs_on_slices(name: str) -> None:
    assert set(grains(name).values()) == {"slice"} and sliced(name).per_micro_batch == frozenset()


@pytest.mark.parametrize(("name", "encoder", "decoder"), [
    (WHISPER, "model.encoder.layers.", "model.decoder.layers."),
    pytest.param(T5, "encoder.block.", "decoder.block.", marks=pytest.mark.long),
])  # fmt: skip
def test_an_encoder_runs_once_per_micro_batch_and_what_it_hands_on_is_whole(
    name: str, encoder: str, decoder: str
) -> None:
    found = grains(name)
    assert {grain for block, grain in found.items() if block.startswith(encoder)} == {"micro-batch"}
    assert {grain for block, grain in found.items() if block.startswith(decoder)} == {"slice"}
    assert (found["embedding"], found["head"]) == ("micro-batch", "slice")
    blocks = captured.named(name).blocks.blocks
    assert sliced(name).per_micro_batch == {
        w for block in blocks if found[block.name] != "slice" for w in block.outputs
    }


@pytest.mark.parametrize(
    "name", [pytest.param(GPT2, marks=long), pytest.param(GEMMA3, marks=long), WHISPER, pytest.param(T5, marks=long)]
)
def test_layers_still_share_their_templates_and_each_has_a_past_of_its_own(name: str) -> None:
    before, after = captured.named(name).blocks, sliced(name).captured.blocks
    assert len(after.templates) == len(before.templates)
    pasts = [port.name for block in after.blocks for port in block.ports if port.kind == "past"]
    attending = [block.name for block in after.blocks if "attention_slice" in after.templates[block.template].text]
    assert len(pasts) == len(set(pasts)) == 4 and [past.partition("@")[0] for past in pasts] == attending


def test_a_model_without_dropout_need_not_know_where_a_slice_begins() -> None:
    ports = {port.kind for block in sliced(LLAMA).captured.blocks.blocks for port in block.ports}
    assert "past" in ports and "start" not in ports


def test_biases_of_keys_as_well_as_queries_are_computed_whole() -> None:
    blocks = sliced(T5).captured.blocks.blocks
    sizes = {size for block in blocks if block.name.startswith("decoder.block") for size in block.names("size")}
    assert any("whole_tokens" in size for size in sizes)


def test_padding_reaches_an_attention_whole() -> None:
    layer = sliced(GPT2, padding=True).captured.blocks.blocks[1]
    assert set(layer.names("whole_value")) | set(layer.names("whole_input"))


REFUSED = {
    "bert-base-cased": "plan: slices need causal attention, and in bert.encoder.layer.0 tokens see later ones\n"
    "  → leave slices out: this model cannot be run slice by slice",
    "google/electra-base-generator": "plan: slices need causal attention, and in electra.encoder.layer.0 tokens see "
    "later ones\n  → leave slices out: this model cannot be run slice by slice",
    "google/vit-base-patch16-224-in21k": "plan: slices cut tokens, and this model's inputs have none (batch)\n"
    "  → leave slices out",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_tokens_see_later_ones_or_that_has_none_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(PlanError) as info:
        sliced(name)
    assert str(info.value) == REFUSED[name]


inner_edges = st.sets(st.integers(1, TOKENS - 1))


@pytest.mark.parametrize("name", [GPT2, pytest.param(LLAMA, marks=long), WHISPER])
@settings(max_examples=15)
@given(inner=inner_edges)
def test_cut_inputs_and_values_put_together_again_are_what_they_were(name: str, inner: set[int]) -> None:
    case, model = captured.named(name, padding=True), sliced(name, padding=True)
    edges = [0, *sorted(inner), TOKENS]
    [whole] = case.micro_batches(case.session(), [SAMPLES])
    view = whole._view(0)
    for spec in model.captured.inputs:
        tensor = view.inputs[spec.name]
        parts = model.cut_input(spec.name, tensor, edges)
        for part, own in zip(model.cut_input(spec.name, tensor, edges[1:]), parts[1:], strict=True):
            assert torch.equal(part, own)
        if "tokens" in spec.dims:
            assert torch.equal(torch.cat(parts, dim=spec.dims.index("tokens")), tensor)
        else:
            assert all(part is tensor for part in parts)
    for value_name, value in view.values.items():
        parts = model.cut_value(value_name, value, SAMPLES, edges, {})
        inner_parts = model.cut_value(value_name, value, SAMPLES, edges[1:-1], {}) if len(edges) > 3 else ()
        for part, own in zip(inner_parts, parts[1:-1], strict=True):
            assert torch.equal(part, own)
        shape = model.shapes[value_name]
        tokens, both = model.dims.sizes["tokens"], model.dims.sizes["tokens"] * model.dims.sizes["batch"]
        if both in shape:  # samples × tokens in one dim: token by token they are apart again
            dim = shape.index(both)
            apart = torch.cat([part.unflatten(dim, (SAMPLES, -1)) for part in parts], dim=dim + 1)
            assert torch.equal(apart.flatten(dim, dim + 1), value)
        elif tokens in shape:
            assert torch.equal(torch.cat(parts, dim=shape.index(tokens)), value)
        else:
            assert all(torch.equal(part, value) for part in parts)


def _train(case: captured.Case, plan: str) -> StepRun:
    """A step on the only rank, up to where the gradients are ready."""
    session = case.session(plan)
    step = session.step.begin(case.batch, 0, 0.0)
    session.step.engine.run(session.step.program, step, until=Op.STEP)
    captured.require_released(step)
    return step


@pytest.mark.parametrize("name", [pytest.param(GPT2, marks=long), WHISPER])
def test_slices_have_the_loss_and_gradients_of_the_plain_model(name: str) -> None:
    case = captured.named(name, padding=True, dropout=0.1)
    step = _train(case, "mb=2,slices=4-1-3/1-2")
    captured.require_equal((step.loss, step.gradients), case.plain())


def test_a_step_leaves_nothing_of_its_slices_behind() -> None:
    gc.collect()
    alive = len(Slice._alive)
    step = _train(captured.named(GPT2), "mb=2,slices=3")
    pasts = [thing for thing in gc.get_objects() if type(thing) is Past]
    assert all(past._kv is None and past._gradients is None for past in pasts)
    del step, pasts
    gc.collect()
    assert len(Slice._alive) == alive


def test_more_slices_than_tokens_are_refused_with_both_numbers() -> None:
    with pytest.raises(PlanError, match="slices=10 cuts 9 tokens into 10 slices") as info:
        _train(captured.named(GPT2), "slices=10")
    assert info.value.hint == "use 9 slices or fewer, or longer sequences"

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx.errors import ModelError
from phalanx.model.weights import init_recipe, key_map
from phalanx.model.weights.key_map import Converted, match
from phalanx.model.weights.weights import ModuleWeights, SafetensorsWeights, SeededWeights, Weights, tied_names
from phalanx.state.layout import Box, take_boxes
from phalanx.state.local import Local
from tests import tiny_models


def assert_reads_like(weights: Weights, model: nn.Module) -> None:
    """Every parameter, whole and in boxes, has the values of `model`."""
    assert list(weights.names()) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert weights.shape(name) == tuple(parameter.shape)
        assert torch.equal(weights.read(name), parameter), name
        box = Box(tuple(size // 3 for size in parameter.shape), tuple(size - size // 3 for size in parameter.shape))
        part = weights.read(name, box)
        assert torch.equal(part, parameter[box.slices()]), name
        assert part.is_contiguous() and part.untyped_storage().nbytes() == box.numel * part.element_size()
        boxes = columns(tuple(parameter.shape)).boxes()
        assert torch.equal(weights.read_flat(name, boxes), take_boxes(parameter.detach(), boxes)), name


def columns(shape: tuple[int, ...]) -> Local:
    """The first and the last of three sections, as far as there are any."""
    third = shape[-1] // 3 if shape else 0
    return Local(shape, len(shape) - 1, ((0, third), (shape[-1] - third, shape[-1]))) if third else Local(shape)


def test_tied_parameters_go_by_their_first_name() -> None:
    assert tied_names(tiny_models.build_meta("gpt2")) == {"lm_head.weight": "transformer.wte.weight"}
    assert tied_names(tiny_models.build_meta("t5")) == dict.fromkeys(
        ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"], "shared.weight"
    )
    assert tied_names(tiny_models.build_meta("llama")) == {}


def test_a_module_in_memory_gives_its_values_and_not_its_memory() -> None:
    model = tiny_models.build("gpt2")
    weights = ModuleWeights(model)
    assert_reads_like(weights, model)
    weights.read("transformer.wte.weight").zero_()
    assert model.transformer.wte.weight.abs().sum() > 0


def test_a_module_without_values_is_refused() -> None:
    with pytest.raises(ModelError, match=r"on the meta device and have no values: .*\n  → build the module on a real"):
        ModuleWeights(tiny_models.build_meta("gpt2"))


def test_seeded_boxes_are_boxes_of_the_seeded_tensor() -> None:
    recipe = init_recipe.record(lambda: tiny_models.build("bert"))
    weights = SeededWeights(recipe, seed=3)
    whole = {name: weights.read(name) for name in weights.names()}
    model = tiny_models.build("bert")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole[name])
    assert_reads_like(SeededWeights(recipe, seed=3), model)


def test_a_tensor_is_drawn_once_for_all_the_boxes_asked_for() -> None:
    weights = SeededWeights(init_recipe.record(lambda: nn.Linear(30, 30)), seed=0)
    with patch.object(init_recipe.Recipe, "values", autospec=True, side_effect=init_recipe.Recipe.values) as values:
        assert weights.read_flat("weight", columns((30, 30)).boxes()).numel() == 600
    assert values.call_count == 1


def test_values_are_drawn_in_float32_and_then_cast() -> None:
    weights = SeededWeights(init_recipe.record(lambda: nn.Linear(30, 30)), seed=0)
    half = weights.read("weight", dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half, weights.read("weight").to(torch.bfloat16))


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "vit", "gpt2"])
def test_boxes_are_read_from_files_in_whatever_form_they_are_stored(tmp_path: Path, architecture: str) -> None:
    model = tiny_models.build(architecture)
    model.save_pretrained(tmp_path)
    assert_reads_like(SafetensorsWeights(tmp_path, tiny_models.build_meta(architecture)), model)


def test_a_box_of_fused_experts_reads_only_the_stored_experts_it_needs(tmp_path: Path) -> None:
    tiny_models.build("mixtral").save_pretrained(tmp_path)
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    source = match(tiny_models.build_meta("mixtral"), shapes).sources["model.layers.1.mlp.experts.gate_up_proj"]
    assert not isinstance(source, Converted) and source.shape == (4, 96, 32)
    part = source.part(Box((2, 40, 0), (1, 16, 32)))
    assert {key.split("experts.")[1] for key in part.keys} == {"2.w1.weight", "2.w3.weight"}
    assert sum(piece.source.numel for piece in part.pieces) == 16 * 32


def test_conversions_that_are_more_than_moving_boxes_are_left_to_transformers(tmp_path: Path) -> None:
    text = dict(tiny_models._HEAD_DIM, moe_intermediate_size=24, num_experts=4)
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32)
    model = hf.Qwen3VLMoeForConditionalGeneration(hf.Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    stored = {}
    for name, tensor in model.state_dict().items():
        stored[name] = tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor.clone()
    save_file(stored, tmp_path / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}
    experts = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    assert isinstance(match(model, shapes).sources[experts], Converted)
    weights = SafetensorsWeights(tmp_path, model)
    assert_reads_like(weights, model)
    with patch.object(key_map._Group, "convert", autospec=True, side_effect=key_map._Group.convert) as convert:
        weights.read_flat(experts, columns(weights.shape(experts)).boxes())
    assert convert.call_count == 1


def test_the_base_model_s_files_serve_the_model_with_a_head_and_back(tmp_path: Path) -> None:
    model = tiny_models.build("gpt2")
    model.transformer.save_pretrained(tmp_path / "base")
    assert "wte.weight" in load_file(tmp_path / "base" / "model.safetensors")
    assert_reads_like(SafetensorsWeights(tmp_path / "base", model), model)
    model.save_pretrained(tmp_path / "head")
    weights = SafetensorsWeights(tmp_path / "head", model.transformer)
    assert_reads_like(weights, model.transformer)


def test_tied_weights_may_be_stored_under_any_of_their_names(tmp_path: Path) -> None:
    model = tiny_models.build("gpt2")
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    only_alias = {name: tensor for name, tensor in stored.items() if name != "transformer.wte.weight"}
    for number, tensors in enumerate((stored, only_alias)):
        save_file(tensors, _folder(tmp_path / str(number)) / "model.safetensors")
        assert_reads_like(SafetensorsWeights(tmp_path / str(number), model), model)


def test_tied_weights_stored_with_different_values_are_refused(tmp_path: Path) -> None:
    model = tiny_models.build("gpt2")
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored["lm_head.weight"] += 1
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"transformer.wte.weight and lm_head.weight.*\n  → set tie_word_embeddings"):
        SafetensorsWeights(tmp_path, model)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _classifier() -> Any:
    config = hf.BertConfig(**tiny_models._DECODER, num_labels=3)
    return hf.BertForSequenceClassification(config).eval()


def test_missing_parameters_are_listed(tmp_path: Path) -> None:
    tiny_models.build("bert").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"lacks 4 of the parameters of BertForSeq.*: .*classifier.bias") as caught:
        SafetensorsWeights(tmp_path, _classifier())
    assert "initialised from the seed" in caught.value.hint


def test_a_new_head_is_initialised_from_the_seed_when_that_is_allowed(tmp_path: Path) -> None:
    pretrained = tiny_models.build("bert")
    pretrained.save_pretrained(tmp_path)
    seeded = SeededWeights(init_recipe.record(_classifier), seed=1)
    weights = SafetensorsWeights(tmp_path, _classifier(), missing_from=seeded)
    assert weights.missing == (
        "bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight", "classifier.bias",
    )  # fmt: skip
    assert "cls.predictions.bias" in weights.unexpected
    assert torch.equal(weights.read("classifier.weight"), seeded.read("classifier.weight"))
    embeddings = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(weights.read(embeddings), pretrained.get_parameter(embeddings))


def test_a_shape_that_differs_is_shown_with_both_shapes(tmp_path: Path) -> None:
    tiny_models.build("llama").save_pretrained(tmp_path)
    config = hf.LlamaConfig(**{**tiny_models._GQA, "vocab_size": 50})
    with pytest.raises(ModelError, match=r"embed_tokens.weight: stored \[99, 32\], model \[50, 32\]"):
        SafetensorsWeights(tmp_path, hf.LlamaForCausalLM(config))


def test_an_expert_that_is_not_stored_shows_as_another_shape(tmp_path: Path) -> None:
    model = tiny_models.build("mixtral")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    lacking = {key: tensor for key, tensor in stored.items() if "layers.0" not in key or "experts.3" not in key}
    save_file(lacking, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"gate_up_proj: stored \[3, 96, 32\], model \[4, 96, 32\]"):
        SafetensorsWeights(tmp_path, model)
    half = {key: tensor for key, tensor in stored.items() if "layers.0" not in key or "experts.3.w1" not in key}
    save_file(half, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"cannot be turned into model.layers.0.mlp.experts.gate_up_proj"):
        SafetensorsWeights(tmp_path, model)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ModelError, match=r"has no model.safetensors .*\n  → give a folder written by save_pretrained"):
        SafetensorsWeights(tmp_path, model)
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(ModelError, match=r"only pytorch_model.bin.*\n  → load the model once"):
        SafetensorsWeights(tmp_path, model)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    (tmp_path / "model.safetensors").write_text("not tensors")
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read as safetensors"):
        SafetensorsWeights(tmp_path, model)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ModelError, match=r"names files that are not there: model-00001-of-00001.safetensors"):
        SafetensorsWeights(tmp_path, model)
    index.write_text("[]")
    with pytest.raises(ModelError, match=r"index.json is not a safetensors index"):
        SafetensorsWeights(tmp_path, model)

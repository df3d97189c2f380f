from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from phalanx.errors import ConfigError
from phalanx.model.weights.weights import SafetensorsWeights, tied_names
from phalanx.state.huggingface import DiskNames, export
from phalanx.state.layout import StateShard, boxes_of_range
from phalanx.state.reshard import gather_tensors
from tests import tiny_models
from tests.state.state_workers import Mail, data_of, on_threads


def parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())


def shake(model: Any) -> Any:
    """Moves every parameter off its initial value, so that a tensor that was not loaded shows."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def load(folder: Path, cls: Any) -> Any:
    model, report = cls.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(report.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return model.eval()


LIGHT = ("gpt2", "llama")  # in `make check`


@pytest.mark.parametrize(
    "architecture", [pytest.param(it, marks=() if it in LIGHT else pytest.mark.heavy) for it in tiny_models.CONFIGS]
)
def test_an_exported_model_loads_with_identical_logits(tmp_path: Path, architecture: str) -> None:
    model = shake(tiny_models.build(architecture))
    folder = export(tmp_path / "out", model=tiny_models.build_meta(architecture), tensors=parameters(model))
    loaded = load(folder, type(model))
    assert torch.equal(tiny_models.logits(loaded), tiny_models.logits(model))
    assert tied_names(loaded) == tied_names(model)
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == [type(model).__name__] and written["dtype"] == "float32"
    assert (folder / "generation_config.json").exists() == model.can_generate()
    assert not (tmp_path / ".out.writing").exists()

    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = load_file(folder / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == theirs.keys(), "the names on disk are those that save_pretrained uses"
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("architecture", tiny_models.CONFIGS)
def test_stored_weights_are_read_as_the_model_names_them(tmp_path: Path, architecture: str) -> None:
    model = shake(tiny_models.build(architecture))
    model.save_pretrained(tmp_path)
    weights = SafetensorsWeights(tmp_path, tiny_models.build_meta(architecture))
    assert weights.missing == weights.unexpected == ()
    for name, parameter in parameters(model):
        assert torch.equal(weights.read(name), parameter), name


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral", "t5"])
def test_a_model_larger_than_a_shard_is_split_with_an_index(tmp_path: Path, architecture: str) -> None:
    model = shake(tiny_models.build(architecture))
    folder = export(tmp_path / "out", model=model, tensors=parameters(model), shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values())) and len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    with safe_open(folder / shards[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert torch.equal(tiny_models.logits(load(folder, type(model))), tiny_models.logits(model))
    weights = SafetensorsWeights(folder, model)
    assert all(torch.equal(weights.read(name), parameter) for name, parameter in parameters(model))


def test_an_export_keeps_the_dtype_of_the_tensors(tmp_path: Path) -> None:
    model = tiny_models.build("llama").bfloat16()
    folder = export(tmp_path / "out", model=tiny_models.build_meta("llama"), tensors=parameters(model))
    loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16 and json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_configuration_to_write_may_differ_from_the_built_model_s(tmp_path: Path) -> None:
    original = tiny_models.CONFIGS["gpt2"][1]()
    model = tiny_models.build("gpt2")
    model.config.use_cache, model.config.resid_pdrop = False, 0.0
    export(tmp_path / "out", model=model, tensors=parameters(model), config=original)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.use_cache is True and loaded.config.resid_pdrop == 0.1


def test_generation_settings_of_the_folder_that_training_began_with_are_kept(tmp_path: Path) -> None:
    base = tmp_path / "base"
    hf.GenerationConfig(max_new_tokens=7, eos_token_id=2).save_pretrained(base)
    model = tiny_models.build("llama")
    folder = export(tmp_path / "out", model=model, tensors=parameters(model), base_folder=base)
    assert hf.GenerationConfig.from_pretrained(folder).max_new_tokens == 7


def test_the_tokenizer_is_saved_beside_the_model(tmp_path: Path) -> None:
    class Saves:
        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    model = tiny_models.build("gpt2")
    folder = export(tmp_path / "out", model=model, tensors=parameters(model), tokenizer=Saves())
    assert (folder / "tokenizer.json").exists()


def test_persistent_buffers_are_stored_too(tmp_path: Path) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

    model = Normed()
    model.norm.running_mean.fill_(5)  # pyright: ignore
    folder = export(tmp_path / "out", model=model, tensors=parameters(model))
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == model.state_dict().keys() and (stored["norm.running_mean"] == 5).all()
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors"]
    weights = SafetensorsWeights(folder, Normed())
    assert "norm.running_mean" in weights.buffer_names() and "norm.running_mean" not in weights.names()
    assert (weights.read("norm.running_mean") == 5).all()


def test_experts_are_written_as_they_come_without_waiting_for_each_other() -> None:
    model = tiny_models.build_meta("mixtral")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert all(len(group) == 1 for group in DiskNames(model, shapes)._groups())


def test_tensors_that_are_stored_together_wait_for_each_other() -> None:
    with torch.device("meta"):
        model = hf.Dinov2Model(hf.Dinov2Config(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
            use_swiglu_ffn=True))  # fmt: skip
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = DiskNames(model, shapes)
    if names.stored == shapes:
        pytest.skip("this version of transformers stores the model as it is")
    streamed = dict(names.convert((name, torch.zeros(shape)) for name, shape in shapes.items()))
    assert {key: tuple(tensor.shape) for key, tensor in streamed.items()} == names.stored
    assert {len(group) for group in names._groups()} > {1}


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    model = tiny_models.build("gpt2")
    for _ in range(2):
        export(tmp_path / "out", model=shake(model), tensors=parameters(model), shard_bytes=20_000)
    export(tmp_path / "out", model=model, tensors=parameters(model))
    assert not list((tmp_path / "out").glob("model-*")) and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_with_other_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds files that are not an exported model\n  → give a folder"):
        export(tmp_path, model=nn.Linear(1, 1), tensors=[])
    with pytest.raises(ConfigError, match="it is a file"):
        export(tmp_path / "thesis.tex", model=nn.Linear(1, 1), tensors=[])


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    model = tiny_models.build("gpt2")

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield next(parameters(model))
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        export(tmp_path / "out", model=model, tensors=failing())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral"])
def test_a_model_that_no_rank_holds_whole_is_exported_by_one_of_them(tmp_path: Path, architecture: str) -> None:
    model, world, mail = shake(tiny_models.build(architecture)), 3, Mail()
    values = dict(parameters(model))
    layout: dict[int, list[StateShard]] = {rank: [] for rank in range(world)}
    for name, value in values.items():
        cuts = [value.numel() * rank // world for rank in range(world + 1)]
        for rank in range(world):
            boxes = boxes_of_range(tuple(value.shape), cuts[rank], cuts[rank + 1])
            layout[rank].append(StateShard(name, tuple(value.shape), "float32", boxes))

    def body(rank: int) -> None:
        local = data_of(layout[rank], values)
        tensors = gather_tensors(layout, local, rank=rank, transport=mail.seat(rank))
        if rank != 0:
            assert not list(tensors)
            return
        export(tmp_path / "out", model=tiny_models.build_meta(architecture), tensors=tensors)

    on_threads(world, body)
    assert torch.equal(tiny_models.logits(load(tmp_path / "out", type(model))), tiny_models.logits(model))

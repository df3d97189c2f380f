"""HuggingFace modules in memory, as a user hands them over: captured, checked with their own dropout, and trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import phalanx
from phalanx.errors import CaptureError, DataError
from phalanx.model import comparison, proofs, selfcheck
from tests import tiny_models
from tests.run_helpers import records

OPTIONS = {"seq_len": 16, "batch_size": 4, "steps": 2, "lr": 1e-3, "progress": "off", "export": False, "device": "cpu"}


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What these tests capture is captured anew, and so checked as a user's module is."""
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "captures"))
    monkeypatch.setattr("phalanx.prepare.read_model.prove", selfcheck.prove)


class Mean(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def small(layers: int = 1) -> Any:
    """What a module in memory is captured with, which takes most of the time, grows with its layers."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=layers, n_embd=16, n_head=2, vocab_size=99, n_positions=16)
    )


def train(module: Any, out: Path, **options: Any) -> Any:
    return phalanx.train(module, "synthetic:8", out=out, **{**OPTIONS, **options})


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.long)])
def test_a_module_with_dropout_is_checked_and_trained(name: str, tmp_path: Path):
    module = tiny_models.build(name)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    result = train(module, tmp_path)
    assert len(result.losses) == 2 and result.module() is module
    assert all(not torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
    assert "not checked" not in str(records(tmp_path, "start")[0])


def test_a_module_that_was_loaded_from_a_folder_is_trained(tmp_path: Path):
    small().save_pretrained(tmp_path / "model")
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert len(train(module, tmp_path / "run").losses) == 2


def test_the_check_leaves_the_gradients_of_a_module_in_float64_alone(tmp_path: Path):
    module = small().double()
    train(module, tmp_path, dtype="float64")
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_check_takes_no_more_tokens_than_the_module(tmp_path: Path):
    module = small()
    assert module.config.n_positions == OPTIONS["seq_len"]
    assert len(train(module, tmp_path).losses) == 2


def checked_row(folder: Path) -> str:
    return records(folder, "start")[0]["header"]["checked"]


def test_what_was_checked_is_said_and_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(proofs, "_own_code", lambda: "")  # a worker of the tests has no main file to be known by
    for number in range(2):
        train(small(), tmp_path / str(number), steps=1)
    first, second = (checked_row(tmp_path / str(number)) for number in range(2))
    assert "compared with the module on 4 and 3 samples of the data, twice" in first and first.endswith(" s")
    assert second == f"{first}, remembered"


def test_a_named_model_is_checked_too(tmp_path: Path):
    train("gpt2", tmp_path, tiny=True, steps=1)
    assert "compared with the module on 4 and 3 samples" in checked_row(tmp_path)


def test_a_large_module_is_checked_with_fewer_layers_and_as_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(selfcheck, "_LARGEST_WHOLE", 10)
    train(small(layers=5), tmp_path, steps=1)
    assert "a tiny model of its architecture and the module with fewer layers" in checked_row(tmp_path)


def test_a_large_batch_is_cut_to_what_takes_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selfcheck, "_MOST_FLOPS", 1.0)
    train(small(), tmp_path / "gpt2", steps=1)
    assert checked_row(tmp_path / "gpt2").startswith(
        "loss and gradients compared with a tiny model of its architecture, "
    )
    phalanx.train(Mean(), [{"x": torch.ones(3)}] * 8, out=tmp_path / "own", **OPTIONS)
    assert "the module on 2 and 2 samples" in checked_row(tmp_path / "own")


def test_a_module_that_memory_cannot_hold_twice_is_said_to_be_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(proofs, "available_memory", lambda: 0.0)
    train(small(), tmp_path, steps=1)
    assert "nothing: checking needs" in checked_row(tmp_path)


def test_samples_in_float64_are_not_rounded_without_a_word(tmp_path: Path):
    data = [{"x": torch.full((3,), 0.1, dtype=torch.float64)}] * 8
    with pytest.raises(DataError, match="input 'x' is in float64, whose values would be rounded to float32"):
        phalanx.train(Mean(), data, out=tmp_path, **OPTIONS)
    assert len(phalanx.train(Mean(), data, out=tmp_path, **{**OPTIONS, "dtype": "float64"}).losses) == 2


def test_wrong_dropout_in_a_capture_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    keys = comparison.dropout_keys
    monkeypatch.setattr(comparison, "dropout_keys", lambda blocks, samples: keys(blocks, samples + 1))
    torch.manual_seed(0)  # of the model's values
    with pytest.raises(CaptureError, match="disagrees with the model"):
        train(small(), tmp_path)


def test_labels_that_are_predicted_from_padding_are_told_of() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        max_position_embeddings=16, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    ids, mask = torch.randint(1, 32, (2, 8)), torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0
    model, labels = transformers.LlamaForCausalLM(config), ids.where(mask.bool(), -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with pytest.raises(CaptureError, match="disagrees with the model") as refused:
        phalanx.open(model, example=batch, device="cpu")
    assert "samples begin with padding" in refused.value.hint
    labels[1, 3] = -100
    phalanx.open(model, example=batch, device="cpu")

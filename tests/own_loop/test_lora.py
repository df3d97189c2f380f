"""Adapters are trained exactly under every plan, stored as peft stores them, and merged into the model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import phalanx
from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.lora import Lora, adapted_layers, add_adapters, is_adapter, merged
from phalanx.state.adapters import targets
from tests.own_loop import jobs
from tests.own_loop.jobs import LR, both, llama, net, numbers, opened, words
from tests.own_loop.test_own_loop_is_exact import require_equal, widened

LORA = Lora(2, 8.0)


def plain(kind: str, begun: dict[str, Any], steps: int = 3) -> tuple[list[float], nn.Module]:
    model = add_adapters(llama() if kind == "llama" else net(), LORA).double()
    model.load_state_dict(begun)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if is_adapter(name)], lr=1.0)
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        if kind == "llama":
            loss = widened(model, words(step))
        else:
            x, target = numbers(step)
            loss = both(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(
    ("world", "plan", "kind"),
    [
        (1, "mb=2", "net"),
        (2, "tp=2", "net"),
        pytest.param(2, "pp=2,mb=4", "net", marks=pytest.mark.long),
        pytest.param(2, "tp=2,mb=2", "llama", marks=pytest.mark.long),
        pytest.param(4, "pp=2,dp=2,zero=3,mb=2", "llama", marks=pytest.mark.long),
    ],
)
def test_adapters_are_trained_as_in_plain_pytorch(pool: WorkerPool, world: int, plan: str, kind: str) -> None:
    found = (
        jobs.lora(RankContext.alone(), plan, kind) if world == 1 else pool.run(jobs.lora, plan, kind, world=world)[0]
    )
    begun, ended = found
    losses, model = plain(kind, begun.values)
    require_equal(ended, losses, model)
    frozen = [name for name in ended.values if not is_adapter(name)]
    assert all(torch.equal(ended.values[name], begun.values[name]) for name in frozen)
    assert not all(torch.equal(value, begun.values[name]) for name, value in ended.values.items())


def test_a_run_leaves_an_adapter_folder_as_peft_has_it(tmp_path: Path) -> None:
    result = phalanx.train(
        "gpt2", "synthetic:8", tiny=True, steps=2, batch_size=4, seq_len=16, lr=1e-2, out=tmp_path / "run",
        lora="r=2,alpha=4,targets=c_attn", progress="off", device="cpu",
    )  # fmt: skip
    assert result.export is not None
    settings = json.loads((result.export / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA" and settings["task_type"] == "CAUSAL_LM"
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (2, 4, ["c_attn"])
    assert settings["fan_in_fan_out"] is True and settings["bias"] == "none"
    stored = load_file(result.export / "adapter_model.safetensors")
    module = result.module()
    values = dict(module.named_parameters())
    assert stored.keys() == {f"base_model.model.{name}" for name in values if is_adapter(name)}
    assert all(torch.equal(value, values[name.removeprefix("base_model.model.")]) for name, value in stored.items())
    assert any(value.abs().max() > 0 for name, value in stored.items() if name.endswith("lora_B.weight"))


@pytest.mark.long
def test_a_module_in_memory_gets_its_adapters_merged_in(tmp_path: Path) -> None:
    model = llama().float()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = [{"input_ids": words(0)["input_ids"][i], "labels": words(0)["labels"][i]} for i in range(8)]
    result = phalanx.train(
        model, rows, steps=2, batch_size=4, lr=1e-2, out=tmp_path / "run", lora="r=2,targets=q_proj+v_proj",
        merge_lora=True, progress="off", device="cpu",
    )  # fmt: skip
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in range(4) for kind in "qv"}
    loaded = LlamaForCausalLM.from_pretrained(result.export)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_merged_weights_compute_what_adapted_layers_do() -> None:
    config = GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=11, n_positions=8)
    adapted, fresh = (GPT2LMHeadModel(config).double().eval() for _ in range(2))
    add_adapters(adapted, LORA)
    for name, parameter in adapted.named_parameters():
        if is_adapter(name):
            nn.init.normal_(parameter)
    tensors = [(name, value.detach()) for name, value in adapted.double().named_parameters()]
    layers = adapted_layers(adapted)
    assert len(layers) == 8 and all(layers.values())  # four of each layer, and none outside
    fresh.load_state_dict(dict(merged(reversed(tensors), layers, LORA)), strict=False)
    ids = torch.arange(8)[None]
    torch.testing.assert_close(fresh(ids).logits, adapted(ids).logits)


def test_peft_finds_exactly_the_adapted_layers() -> None:
    linear = ["layers.0.up", "layers.1.up", "layers.0.down", "layers.1.down", "head"]
    assert targets(["layers.0.up", "layers.1.up"], linear) == ["up"]
    assert targets(["layers.1.up"], linear) == ["layers.1.up"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r", "'r' is no setting of adapters"),
        ("rank=4", "'rank=4' is no setting of adapters"),
        ("r=0", "r must be a whole number of 1 or more"),
        ("alpha=3", "r must be a whole number of 1 or more"),
        ("r=x", "r = 'x' is not a number"),
        ("r=2,alpha=0", "alpha must be above 0"),
        ("r=2,dropout=1", "dropout from 0 to below 1"),
    ],
)
def test_adapters_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as info:
        Lora.read(text)
    assert "r=16" in info.value.hint


def test_targets_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer is called 'q_porj'") as info:
        add_adapters(llama(), Lora(2, 4.0, targets=("q_porj",)))
    assert "did you mean 'q_proj'" in info.value.hint
    with pytest.raises(ConfigError, match="Linear has no linear layers in a list of layers"):
        add_adapters(nn.Linear(2, 2), Lora(2, 4.0))
    with pytest.raises(ConfigError, match="merge_lora = True does nothing without lora"):
        phalanx.RunConfig(merge_lora=True)


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="compares with peft itself")
def test_peft_loads_the_folder_and_its_models_train(tmp_path: Path) -> None:
    import peft  # pyright: ignore[reportMissingImports]

    session = opened(RankContext.alone(), llama(), "mb=2", words(0), lora="r=2,alpha=8", has_optimizer=True, lr=LR)
    session.forward_backward(words(0))
    session.step()
    session.export(tmp_path / "adapter")
    loaded: Any = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    assert float(widened(loaded, words(1)).detach()) == pytest.approx(session.evaluate(words(1)), rel=1e-9)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    own: Any = peft.get_peft_model(llama(), config)
    theirs = opened(RankContext.alone(), own, "mb=2", words(0))
    assert float(theirs.forward_backward(words(0))) == pytest.approx(float(widened(own, words(0)).detach()), rel=1e-9)
    assert all(".lora_" in name for name, _ in theirs.named_parameters())

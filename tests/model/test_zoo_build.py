"""Building models from configurations, on the CPU and on the meta device."""

from __future__ import annotations

import resource
import time

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, OPTConfig

from phalanx.errors import ConfigError, ModelError
from phalanx.model.zoo import zoo_table
from phalanx.model.zoo.zoo import build, resolve

# One zoo name for each architecture.
ENTRIES = [entry for name in reversed(zoo_table.names()) if (entry := zoo_table.lookup(name))]
ARCHITECTURES = {entry.model_type: entry.name for entry in ENTRIES}

PUBLISHED_SIZES = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "EleutherAI/gpt-neo-2.7B": 2_651_307_520,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "bert-base-cased": 108_340_804,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
    "meta-llama/Llama-2-13b-chat-hf": 13_015_864_320,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "openai/whisper-small": 241_734_912,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-3-1b-it": 999_885_952,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "google-t5/t5-small": 60_506_624,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "gpt3-125m": 125_226_240,
    "gpt3-175b": 174_604_259_328,
}


def _size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


@pytest.mark.parametrize("name", zoo_table.names())
def test_every_entry_resolves_to_its_architecture_and_task(name: str) -> None:
    entry, spec = zoo_table.lookup(name), resolve(name)
    assert entry is not None and spec.config is not None
    assert (spec.name, spec.task, spec.config.model_type) == (name, entry.task, entry.model_type)
    assert spec.config.architectures and spec.folder is None and spec.factory is None


@pytest.mark.parametrize(("name", "size"), PUBLISHED_SIZES.items())
def test_full_size_models_have_their_published_number_of_parameters(name: str, size: int) -> None:
    assert _size(build(resolve(name), device="meta")) == size


def test_the_demo_model_has_about_three_million_parameters_and_a_byte_vocabulary() -> None:
    spec = resolve("phalanx-demo")
    assert spec.config is not None and spec.config.vocab_size == 259
    assert 2_500_000 < _size(build(spec)) < 3_500_000


def test_llama_3_keeps_its_rotary_scaling() -> None:
    rope = resolve("meta-llama/Llama-3.2-1B").config.rope_parameters  # type: ignore[union-attr]
    assert rope["rope_type"] == "llama3" and rope["factor"] == 32.0 and rope["rope_theta"] == 500000.0
    small = build(resolve("meta-llama/Llama-3.2-1B"), device="meta").get_submodule("model.rotary_emb").inv_freq
    plain = (
        build(
            resolve(
                "meta-llama/Llama-3.2-1B", overrides={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
            ),
            device="meta",
        )
        .get_submodule("model.rotary_emb")
        .inv_freq
    )
    assert torch.equal(small[:4], plain[:4]) and torch.allclose(small[-1] * 32, plain[-1])


def test_changing_a_resolved_config_leaves_the_table_alone() -> None:
    resolve("google/gemma-3-1b-it").config.rope_parameters["full_attention"]["rope_theta"] = 1.0  # type: ignore
    fresh = resolve("google/gemma-3-1b-it").config
    assert fresh is not None and fresh.rope_parameters["full_attention"]["rope_theta"] == 1000000.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_a_meta_build_has_empty_parameters_and_the_buffers_of_a_real_build(name: str, dtype: torch.dtype) -> None:
    spec = resolve(name, tiny=True)
    real, empty = build(spec, dtype=dtype), build(spec, dtype=dtype, device="meta")
    ours = dict(empty.named_parameters(remove_duplicate=False))
    for path, parameter in real.named_parameters(remove_duplicate=False):
        assert ours[path].is_meta and not parameter.is_meta
        assert (ours[path].shape, ours[path].dtype) == (parameter.shape, parameter.dtype)
        assert ours[path].requires_grad == parameter.requires_grad
    assert [path for path, _ in real.named_parameters()] == [path for path, _ in empty.named_parameters()], "ties"
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(real.named_buffers()).keys()
    for path, buffer in real.named_buffers():
        assert buffers[path].device.type == "cpu" and torch.equal(buffers[path], buffer), path
        assert buffers[path].dtype == buffer.dtype


def test_some_architecture_has_buffers_that_no_checkpoint_holds() -> None:
    model = build(resolve("gpt-j-6b", tiny=True), device="meta")
    assert not {path for path, _ in model.named_buffers()} & set(model.state_dict())


def test_a_70b_model_is_built_on_meta_in_seconds_and_little_memory() -> None:
    spec = resolve("meta-llama/Llama-3.3-70B-Instruct")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    build(spec, device="meta", dtype=torch.bfloat16)
    assert time.monotonic() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_building_leaves_torch_as_it_was_even_when_it_fails() -> None:
    original = nn.Module.register_parameter
    build(resolve("gpt2", tiny=True), device="meta")
    assert nn.Module.register_parameter is original
    with pytest.raises(ModelError):
        build(resolve("gpt2", tiny=True, overrides={"n_head": 3}), device="meta")
    assert nn.Module.register_parameter is original
    assert not nn.Linear(2, 2).weight.is_meta


def test_models_are_built_to_train_without_a_cache_and_without_layer_drop() -> None:
    spec = resolve(OPTConfig(layerdrop=0.5), tiny=True)
    model = build(spec)
    assert model.training and model.config.use_cache is False
    assert model.config.layerdrop == 0.0 and model.get_submodule("model.decoder").layerdrop == 0.0
    assert spec.config is not None and spec.config.layerdrop == 0.5, "the specification is not changed by building"


@pytest.mark.parametrize("name", ["gpt2", "whisper-small", "t5-small", "bert-base-cased", "gpt-neo-2.7b"])
def test_dropout_sets_every_dropout_of_the_model(name: str) -> None:
    model = build(resolve(name, tiny=True), dropout=0.25)
    layers = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    assert layers.count(0.25) == len(layers) and (layers or name == "whisper-small")
    floats = {key: value for key, value in model.config.to_dict().items() if "drop" in key and value is not None}
    assert floats and all(value == (0.0 if "layerdrop" in key else 0.25) for key, value in floats.items()), floats


def test_a_dropout_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        build(resolve("gpt2", tiny=True), dropout=1.5)
    assert "dropout is 1.5; allowed: 0 ≤ dropout < 1" in _message(error)


def test_a_registered_attention_is_used_and_own_attention_classes_are_kept() -> None:
    calls: list[str] = []

    def attention(module, query, key, value, mask, **_):
        calls.append(type(module).__name__)
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None

    AttentionInterface.register("zoo_test", attention)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    build(resolve("llama-3.2-1b", tiny=True), attention="zoo_test")(input_ids=tokens)
    assert calls == ["LlamaAttention"] * 4
    own = build(resolve("gpt-j-6b", tiny=True), attention="zoo_test")
    own(input_ids=tokens)
    assert len(calls) == 4 and own.config._attn_implementation == "eager"


def test_values_that_do_not_fit_together_are_reported_with_the_model() -> None:
    with pytest.raises(ModelError) as error:
        build(resolve("gpt2", tiny=True, overrides={"n_head": 3}))
    assert "cannot build 'gpt2-tiny' for causal-lm" in _message(error) and "divisible" in _message(error)

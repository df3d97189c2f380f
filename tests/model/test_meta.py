"""Modules and factories that the user built, on the CPU and on the meta device."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from phalanx.errors import ConfigError, ModelError
from phalanx.model.zoo.zoo import ModelSpec, build, resolve


def _message(error: pytest.ExceptionInfo[BaseException]) -> str:
    return str(error.value)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_parameter(name="left", param=shared)
        self.register_parameter("right", shared)
        self.head.weight = self.body.weight
        self.body.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0))


@pytest.mark.parametrize("model", [Plain, Plain()], ids=["factory", "module"])
def test_plain_modules_and_factories_are_built_on_meta_with_ties_and_buffers(model: object) -> None:
    spec = resolve(model)  # type: ignore[arg-type]
    assert (spec.name, spec.task, spec.config) == ("Plain", "custom", None)
    built = build(spec, device="meta", dtype=torch.float64)
    assert isinstance(built, Plain) and built.head.weight is built.body.weight and built.left is built.right
    assert all(parameter.is_meta and parameter.dtype == torch.float64 for parameter in built.parameters())
    assert not built.left.requires_grad and not built.body.bias.requires_grad and built.body.weight.requires_grad
    assert torch.equal(built.table, torch.arange(4.0, dtype=torch.float64))


def test_a_module_shares_its_parameters_with_what_is_built_and_is_itself_left_alone() -> None:
    module = Plain().eval()
    built = build(resolve(module))
    assert built is not module and built.training and not module.training
    assert [id(p) for p in built.parameters()] == [id(p) for p in module.parameters()]
    wide = build(resolve(module), dtype=torch.float64)
    assert wide.get_parameter("body.weight").dtype == torch.float64 and module.body.weight.dtype == torch.float32
    build(resolve(module), device="meta")
    assert not module.body.weight.is_meta


def test_a_huggingface_module_brings_its_config_and_task_and_keeps_its_buffers_precision() -> None:
    module = build(resolve("gpt-j-6b", tiny=True))
    module.config.use_cache = True
    spec = resolve(module)
    assert (spec.name, spec.task, spec.config) == ("GPTJForCausalLM", "causal-lm", module.config)
    built = build(spec, dtype=torch.bfloat16)
    assert built.config.use_cache is False and module.config.use_cache is True
    assert {buffer.dtype for buffer in built.buffers()} == {buffer.dtype for buffer in module.buffers()}


def test_a_huggingface_module_takes_another_attention_and_loses_its_layer_drop() -> None:
    module = build(resolve("facebook/opt-6.7b", tiny=True))
    module.get_submodule("model.decoder").layerdrop = 0.5
    built = build(resolve(module), attention="sdpa")
    assert built.config._attn_implementation == "sdpa" and module.config._attn_implementation == "eager"
    assert built.get_submodule("model.decoder").layerdrop == 0.0
    assert module.get_submodule("model.decoder").layerdrop == 0.5


@pytest.mark.parametrize(("option", "value"), [("tiny", True), ("overrides", {"n_layer": 2})])
def test_options_that_need_a_config_are_refused_for_modules(option: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(Plain(), **{option: value})  # type: ignore[arg-type]
    assert f"{option} cannot act on a module or factory" in _message(error) and "module.config" in _message(error)


def test_dropout_is_refused_for_modules() -> None:
    with pytest.raises(ConfigError) as error:
        build(resolve(Plain()), dropout=0.0)
    assert "dropout cannot be set on 'Plain': the module is built by you" in _message(error)


def test_a_factory_that_returns_no_module_is_refused() -> None:
    with pytest.raises(ModelError) as error:
        build(ModelSpec("make", "custom", None, None, lambda: 7))  # type: ignore[arg-type, return-value]
    assert "factory 'make' returned an object of type int" in _message(error)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = Plain()
    module.lock = threading.Lock()
    with pytest.raises(ModelError) as error:
        build(resolve(module))
    assert "module 'Plain' cannot be copied" in _message(error) and "hand over a factory" in _message(error)


def test_a_module_without_values_cannot_be_built_on_a_device() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ModelError) as error:
        build(resolve(module))
    assert "module 'Linear' cannot be copied" in _message(error) and "meta" in _message(error)


def test_a_buffer_computed_from_parameters_is_refused_on_meta() -> None:
    class Derived(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("norm", self.weight.detach().norm())

    assert build(resolve(Derived)).training
    with pytest.raises(ModelError) as error:
        build(resolve(Derived), device="meta")
    assert "buffer 'norm' of 'Derived' is computed from parameters" in _message(error)

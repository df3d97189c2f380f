"""The plain model with dropout injected: stock code in everything but the decisions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.model import reference
from phalanx.model.ops import random


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.drop(self.inner(x)))


def keep(site: str, keys: Tensor, shape: tuple[int, ...], p: float) -> Tensor:
    site_keys = random.site_keys(keys, torch.tensor([random.site_hash(site)]))[0]
    return random.keep_features(site_keys, shape, p) / (1 - p)


KEYS = random.sample_keys(0, 0, 3)


def test_each_call_of_dropout_is_decided_by_its_module_path_and_call_index() -> None:
    model, x = Model(), torch.randn(3, 4)
    with reference.injected(model, KEYS, (), torch.float32):
        got = model(x)
    expected = model.inner[0](x) * keep("inner.1#0", KEYS, (3, 4), 0.5)
    expected = expected * keep("drop#0", KEYS, (3, 4), 0.25) * keep("drop#1", KEYS, (3, 4), 0.25)
    torch.testing.assert_close(got, expected)


def test_outside_and_in_eval_mode_nothing_is_injected() -> None:
    model, x = Model(), torch.ones(3, 4)
    with reference.injected(model, KEYS, (), torch.float32):
        torch.testing.assert_close(model.eval()(x), model.inner[0](x))
    model.train()
    torch.manual_seed(0)
    first = model(x)
    torch.manual_seed(0)
    assert torch.equal(model(x), first)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_hooks_are_removed_when_the_model_fails() -> None:
    model = Model()
    with pytest.raises(RuntimeError), reference.injected(model, KEYS, (), torch.float32):
        model(torch.randn(3, 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, p=0.5, training=self.training)


def test_probabilities_of_an_attending_module_are_dropped_by_head_query_and_key() -> None:
    model = nn.ModuleDict({"attn": Attention(), "mlp": Attention()})
    x = torch.ones(3, 2, 5, 6)
    with reference.injected(model, KEYS, ("attn",), torch.float32):
        attending, other = model["attn"](x), model["mlp"](x)
    site_keys = random.site_keys(KEYS, torch.tensor([random.site_hash("attn#0")]))[0]
    expected = random.keep_attention(site_keys, torch.arange(2), torch.arange(5), 6, 0.5)
    assert torch.equal(attending, expected * 2.0)
    assert torch.equal(other, keep("mlp#0", KEYS, (3, 2, 5, 6), 0.5))


def test_float64_runs_compute_in_float64_where_models_cast_to_float32() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x.float(), -1, dtype=torch.float32) * torch.ones(4, dtype=torch.float32)

    x = torch.randn(3, 4, dtype=torch.float64)
    with reference.injected(Casts(), KEYS, (), torch.float64):
        got = Casts()(x)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.softmax(x, -1), rtol=0, atol=0)
    with reference.injected(Casts(), KEYS, (), torch.float32):
        assert Casts()(x.float()).dtype == torch.float32


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"loss": t, "logits": None}, lambda t: (t, None)])
def test_the_loss_is_found_in_whatever_a_model_returns(wrap) -> None:
    class Returns(nn.Module):
        def forward(self, x: Tensor):
            return wrap(x.mean())

    assert reference.loss(Returns(), {"x": torch.ones(3)}).item() == 1

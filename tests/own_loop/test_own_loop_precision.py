"""In half precision an optimizer of one's own works on float32 masters, and a loss scale stays inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.own_loop.open import open_on
from phalanx.own_loop.session import OwnSession
from tests.own_loop.jobs import LR, both, net, numbers

ADAM = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def opened(dtype: str, model: nn.Module | None = None, **given: Any) -> OwnSession:
    options = {**ADAM, "dtype": dtype, "clip": None, "device": "cpu"}
    example = tuple(each.float() if each.is_floating_point() else each for each in numbers(0))
    return open_on(RankContext.alone(), model or net().float(), RunConfig.create(**options), example, both, **given)


def batch(step: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    x, target = numbers(step)
    return factor * x.float(), target


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ones_own_optimizer_and_the_sessions_give_the_same(dtype: str) -> None:
    one, other = opened(dtype, has_optimizer=True), opened(dtype)
    optimizer = torch.optim.AdamW(other.parameters(), **ADAM, fused=True)
    for step in range(3):
        assert torch.equal(one.forward_backward(batch(step)), other.forward_backward(batch(step)))
        one.step()
        optimizer.step()
        optimizer.zero_grad()
    assert {tensor.dtype for tensor in other.parameters()} == {torch.float32}
    found, expected = other.state_dict(), one.state_dict()
    assert all(value.dtype == getattr(torch, dtype) for value in found.values())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_gradients_that_are_not_finite_change_nothing_and_lower_the_scale() -> None:
    session = opened("float16")
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    before, scale = session.state_dict(), session._session.state.loss_scale
    assert scale is not None
    began = float(scale.value)
    session.forward_backward(batch(0, factor=1e5))
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in session.state_dict().items())
    assert float(scale.value) == began / 2
    session.forward_backward(batch(0))
    optimizer.step()
    assert not all(torch.equal(value, before[name]) for name, value in session.state_dict().items())


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("passing", torch.ones(5), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.linear(x) * self.table + self.passing
        return out, F.relu(out)


def test_a_state_dict_is_what_the_module_loads() -> None:
    model = WithTable()
    session = opened("float32", model)
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    session.forward_backward(batch(0))
    optimizer.step()
    fresh = WithTable()
    fresh.load_state_dict(session.state_dict())
    assert not torch.equal(fresh.linear.weight, model.linear.weight)


def test_values_changed_by_hand_are_computed_with_after_a_refresh() -> None:
    session = opened("bfloat16")
    before = session.evaluate(batch(0))
    with torch.no_grad():
        for tensor in session.parameters():
            tensor.zero_()
    session.refresh()
    assert session.evaluate(batch(0)) != before
    assert all(not value.any() for value in session.state_dict().values())

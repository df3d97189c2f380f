"""Initial values made ahead: the same, in whatever order they are asked for, and no more of them than wait at once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from phalanx.model.weights import ahead
from phalanx.model.weights.ahead import Ahead
from phalanx.model.weights.init_recipe import record
from phalanx.model.weights.weights import SeededWeights


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Embedding(5, 4))


@pytest.mark.parametrize("order", [1, -1])
def test_values_do_not_depend_on_being_expected(order: int) -> None:
    plain, expecting = (SeededWeights(record(module), seed=3) for _ in range(2))
    expecting.expect(plain.names())
    for name in (*plain.names()[::order], plain.names()[0]):  # the first a second time
        assert torch.equal(expecting.read(name), plain.read(name))


def test_only_so_many_wait_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_WAITING_BYTES", 20)
    made, names = list[str](), [str(i) for i in range(12)]
    all_begun = threading.Barrier(2, timeout=20)

    def make(name: str) -> Tensor:
        made.append(name)
        if name == "1":
            all_begun.wait()
        return torch.tensor(float(name))

    values = Ahead(make, [(name, 10) for name in names], threads=2)
    all_begun.wait()
    assert set(made) == {"0", "1"}
    assert [values.take(name).item() for name in names] == list(range(12))
    assert sorted(made) == sorted(names), "each once"


def test_what_cannot_be_made_is_heard_when_it_is_asked_for() -> None:
    def fail(name: str) -> Tensor:
        raise ValueError(f"no values for {name}")

    values = Ahead(fail, [("a", 1)], threads=1)
    with pytest.raises(ValueError, match="no values for a"):
        values.take("a")

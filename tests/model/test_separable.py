"""Modules of the user's own that compute samples from each other are refused where a plan would cut the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import phalanx
from phalanx.errors import PlanError
from phalanx.model import separable
from tests.run_helpers import padded_samples, records

WIDTH = 4
Mix = Callable[[Tensor], Tensor]
OWN: dict[str, Any] = {"batch_size": 8, "steps": 1, "progress": "off", "export": False}


class Net(nn.Module):
    """A regression whose hidden values go through a function."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1)
        self.mix = mix

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.mix(torch.tanh(self.first(x)))
        return functional.mse_loss(self.head(self.drop(hidden))[:, 0], y)


class Fresh(Net):
    """Its last layer begins with zeros, which would hide anything before it."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        nn.init.zeros_(self.head.weight)


class Contrastive(Net):
    """Every sample must be told from all others of its batch."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = functional.normalize(self.first(x), dim=-1)
        return functional.cross_entropy(z @ z.t(), torch.arange(x.shape[0]))


class Ids(Net):
    """Of integers only, which cannot be made different by a little."""

    def __init__(self, mix: Mix) -> None:
        super().__init__(mix)
        self.embed = nn.Embedding(6, WIDTH)

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(self.mix(self.embed(ids).mean(1)), label)


def batch_norm(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.var(0, unbiased=False).add(1e-5).sqrt()


def unbiased_batch_norm(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.std(0) + 1e-5)


def attention(x: Tensor) -> Tensor:
    return (x @ x.t()).softmax(-1) @ x


MIXES: dict[str, Mix] = {
    "centred": lambda x: x - x.mean(0, keepdim=True),
    "batch norm": batch_norm,
    "unbiased batch norm": unbiased_batch_norm,
    "attention over samples": attention,
    "divided by the largest": lambda x: x / x.abs().max(),
    "normalised over samples": lambda x: functional.normalize(x, dim=0),
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "summed up": lambda x: x.cumsum(0),
    "relative to the first": lambda x: x - x[:1],
    "divided by the number of samples": lambda x: x / x.shape[0],
    "centred and multiplied": lambda x: (x - x.mean(0)) @ torch.ones(WIDTH, WIDTH),
}
EQUAL_TOO = ("centred", "batch norm", "rolled", "divided by the number of samples")
APART: dict[str, Mix] = {
    "nothing": lambda x: x,
    "centred": lambda x: x - x.mean(1, keepdim=True),
    "attention in a sample": lambda x: (x[:, :, None] * x[:, None, :]).softmax(-1).sum(-1),
    "rounded": lambda x: (x * 4).round(),
    "narrow": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "a constant": lambda x: x @ torch.eye(WIDTH, dtype=x.dtype),
}


def points() -> list[dict[str, Tensor]]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "y": row.sum()} for row in x]


def train(module: nn.Module, data: Any, out: Path, plan: str = "mb=2", **options: Any) -> Any:
    return phalanx.train(module, data, out=out, plan=plan, **{**OWN, **options})


@pytest.mark.parametrize("name", MIXES)
def test_a_module_whose_samples_depend_on_each_other_is_refused(name: str, tmp_path: Path):
    with pytest.raises(
        PlanError, match=r"depend on each other in 'Net'.*micro-batches or replicas \(plan mb=2\)"
    ) as info:
        train(Net(MIXES[name]), points(), tmp_path)
    assert "mb=1,dp=1" in info.value.hint


@pytest.mark.parametrize(
    "module", [Contrastive(MIXES["centred"]), Fresh(MIXES["centred"])], ids=["contrastive", "fresh"]
)
def test_neither_the_loss_nor_zeros_hide_it(module: nn.Module, tmp_path: Path):
    with pytest.raises(PlanError, match="depend on each other"):
        train(module, points(), tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EQUAL_TOO else (pytest.mark.long,)) for name in MIXES]
)
def test_equal_samples_do_not_hide_it(name: str, tmp_path: Path):
    with pytest.raises(PlanError, match="depend on each other"):
        train(Net(MIXES[name]), [{"x": torch.zeros(WIDTH), "y": torch.ones(())}] * 8, tmp_path)


def test_equal_integers_do_not_hide_it(tmp_path: Path):
    data = [{"ids": torch.tensor([0, 3, 5, 1, 3]), "label": torch.tensor(1)}] * 8
    with pytest.raises(PlanError, match="depend on each other"):
        train(Ids(MIXES["centred"]), data, tmp_path)


def test_it_is_refused_in_half_precision_and_from_a_factory(tmp_path: Path):
    with pytest.raises(PlanError, match="depend on each other"):
        train(lambda: Net(batch_norm), points(), tmp_path, dtype="bfloat16")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in APART),
        *(pytest.param(name, "bfloat16", marks=() if name == "narrow" else (pytest.mark.long,)) for name in APART),
    ],
)
def test_a_module_that_keeps_samples_apart_is_trained(name: str, dtype: str, tmp_path: Path):
    assert train(Net(APART[name]), points(), tmp_path, dtype=dtype).steps == 1


def test_integers_with_ignored_labels_are_trained(tmp_path: Path):
    data = [{"ids": torch.tensor([0, 3, n % 5]), "label": torch.tensor(-100 if n < 6 else 1)} for n in range(8)]
    assert train(Ids(APART["centred"]), data, tmp_path, shuffle=False).steps == 1


def test_a_plan_that_leaves_the_batch_whole_is_exact_for_any_module(tmp_path: Path):
    module, data = Net(batch_norm), points()
    module.drop.p = 0.0
    batch = {name: torch.stack([sample[name] for sample in data]) for name in ("x", "y")}
    expected = module(**batch).item()
    assert train(module, data, tmp_path, plan="mb=1").losses[0] == pytest.approx(expected, rel=1e-5)


def test_a_module_that_gives_no_finite_loss_is_left_to_the_run(tmp_path: Path):
    data = [{"x": torch.full((WIDTH,), float("nan")), "y": torch.ones(())}] * 8
    train(Net(APART["nothing"]), data, tmp_path)
    [start] = records(tmp_path, "start")
    assert "no finite loss to compare" in str(start["header"])


def test_a_module_that_is_too_large_to_be_tried_gets_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(separable, "_LARGEST_MODULE", 10)
    train(Net(batch_norm), points(), tmp_path)
    [start] = records(tmp_path, "start")
    assert "not checked for samples that depend on each other (too large to be tried)" in str(start["header"])


def test_a_huggingface_module_in_memory_is_trained(tmp_path: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    module = GPT2LMHeadModel(GPT2Config(vocab_size=90, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    assert train(module, padded_samples(8, 90), tmp_path, plan="mb=4").steps == 1

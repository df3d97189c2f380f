"""Metrics of evaluations: equal to what plain PyTorch computes, under plans, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.errors import CaptureError, ConfigError, PhalanxError
from phalanx.model import reference
from phalanx.model.zoo.zoo import resolve
from phalanx.prepare.initial_weights import open_weights
from phalanx.training.trainer import Trainer
from tests.run_helpers import padded_samples, records, short_config, short_run

MODEL = "phalanx-demo"
OPTIONS: dict[str, Any] = {"steps": 1, "eval_every": 1, "eval_samples": 7, "export": False, "dtype": "float64"}


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Tensor]]:
    return padded_samples(24, vocabulary=90)


def margin(outputs: Any, batch: Any) -> Tensor:
    return outputs["logits"][:, 0].max(-1).values


def evaluated(folder: Path) -> dict[str, float]:
    return {name: value for name, value in records(folder, "step")[-1].items() if name.startswith("eval_")}


@pytest.fixture(scope="module")
def expected(samples) -> dict[str, float]:
    """Of the untrained model, by hand."""
    spec = resolve(MODEL, tiny=True)
    model = reference.plain(spec, torch.float64, 0.0)
    weights, _ = open_weights(MODEL, spec, 0)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights.read(name))
    batch = {name: torch.stack([sample[name] for sample in samples[:7]]) for name in samples[0]}
    keys = torch.zeros(7, dtype=torch.int64)
    with torch.no_grad(), reference.injected(model, keys, (), torch.float64):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    known, hits = labels != -100, logits[:, :-1].argmax(-1) == labels
    best = logits[:, 0].max(-1).values.mean().item()
    return {"eval_accuracy": (hits & known).sum().item() / known.sum().item(), "eval_margin": best}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("mb=3", marks=pytest.mark.long),
        "mb=3,slices=2",
        pytest.param("pp=2,dp=2,mb=2,zero=1", marks=pytest.mark.long),
        pytest.param("tp=2,mb=3", marks=pytest.mark.long),  # which splits the vocabulary
        pytest.param("pp=2,tp=2,mb=3,slices=2", marks=pytest.mark.long),
    ],
)
def test_metrics_are_those_of_the_plain_model(samples, expected, tmp_path: Path, plan: str):
    config = short_config(
        tmp_path, **OPTIONS, plan=plan, metrics=["accuracy"], batch_size=6, lr=1e-30, weight_decay=0.0
    )
    Trainer(MODEL, samples, config, eval_data=samples, metrics={"margin": margin}).fit()
    found = evaluated(tmp_path)
    assert found["eval_perplexity"] == math.exp(found["eval_loss"])
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


class Reports(nn.Module):
    """Returns further values beside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        predicted = self.layer(x)[:, 0]
        return {"loss": nn.functional.mse_loss(predicted, y), "size": predicted.abs().mean(), "first": x[:, 0]}


class Silent(Reports):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, y)["loss"]


@pytest.fixture
def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, generator=generator), "y": torch.randn((), generator=generator)} for _ in range(8)]


def first_of(outputs: Any, batch: Any) -> tuple[Any, Any]:
    return (outputs["first"] * 2).sum(), len(outputs["first"])


def test_values_that_a_model_returns_are_averaged_and_functions_see_the_others(rows, tmp_path: Path):
    model = Reports()
    options = {**OPTIONS, "dtype": "float32", "tiny": False, "eval_samples": 8, "batch_size": 4, "lr": 1e-30}
    with torch.no_grad():
        expected = model.layer(torch.stack([row["x"] for row in rows]))[:, 0].abs().mean().item()
    config = short_config(tmp_path, **options, metrics=["values"], weight_decay=0.0)
    Trainer(model, rows, config, eval_data=rows, metrics={"twice": first_of}).fit()
    found = evaluated(tmp_path)
    assert "eval_perplexity" not in found, "the loss is not one of tokens"
    assert found["eval_size"] == pytest.approx(expected, rel=1e-5)
    assert found["eval_twice"] == pytest.approx(2 * sum(float(row["x"][0]) for row in rows) / 8, rel=1e-5)


@pytest.mark.parametrize(
    "metric, message",
    [
        (lambda outputs, batch: outputs["nothing"], r"metric 'own' failed: KeyError: 'nothing'(.|\n)*first \[4\]"),
        (lambda outputs, batch: 3, r"metric 'own' gave 3 for 4 samples(.|\n)*or a pair \(sum, count\)"),
        (lambda outputs, batch: torch.ones(2, 2), r"metric 'own' gave shape \[2, 2\] for 4 samples"),
    ],
)
def test_a_metric_that_fails_is_named(rows, tmp_path: Path, metric, message):
    options = {**OPTIONS, "dtype": "float32", "tiny": False, "eval_samples": 4, "batch_size": 4}
    with pytest.raises(ConfigError, match=message):
        short_run(Reports(), rows, tmp_path, **options, eval_data=rows, metrics={"own": metric})


def test_a_model_that_returns_nothing_else_has_no_metrics(rows, tmp_path: Path):
    options = {**OPTIONS, "dtype": "float32", "tiny": False, "eval_samples": 4, "batch_size": 4}
    with pytest.raises(CaptureError, match=r"it returns nothing but its loss(.|\n)*return a dict"):
        short_run(Silent(), rows, tmp_path, **options, eval_data=rows, metrics={"own": first_of})
    with pytest.raises(ConfigError, match=r"accuracy needs logits and labels; the model returns size, first"):
        short_run(Reports(), rows, tmp_path / "b", **options, eval_data=rows, metrics=["accuracy"])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"metrics": ["acuracy"], "eval_data": "synthetic"}, r"metrics = 'acuracy' is unknown(.|\n)*'accuracy'"),
        ({"metrics": ["accuracy"]}, r"metrics = 'accuracy' has nothing to evaluate(.|\n)*set eval_data"),
        ({"metrics": {"accuracy": margin}, "eval_data": "synthetic"}, "'accuracy' is no metric of your own"),
    ],
)
def test_metrics_that_cannot_be_are_refused(tmp_path: Path, given, message):
    with pytest.raises(PhalanxError, match=message):
        short_run(MODEL, "synthetic:8", tmp_path, **given)

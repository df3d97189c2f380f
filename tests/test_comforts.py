"""What fine-tuners expect of a run: the best checkpoint, early ends, learning rates and optimizers of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import phalanx
from phalanx.errors import ConfigError, PhalanxError
from phalanx.params.lr_schedule import ScheduledRate, checked_rate
from phalanx.params.optimizer_instance import read_optimizer
from phalanx.state.checkpoint import find
from phalanx.state.snapshot import Mark, Snapshot
from phalanx.training.trainer import Trainer
from tests.run_helpers import losses, padded_samples, records, short_config, short_run

MODEL = "phalanx-demo"


@pytest.fixture(scope="module")
def samples() -> list[dict[str, Any]]:
    return padded_samples(24, vocabulary=90)


def test_a_snapshot_remembers_the_lowest_eval_loss_and_how_long_ago_it_was():
    snapshot = Snapshot({}, Mark("", ""), Mark("", ""), 10)
    assert [snapshot.judge(step, loss) for step, loss in enumerate((3.0, 2.0, 2.0, float("nan"), 1.0), 1)] == [
        True, True, False, False, True,
    ]  # fmt: skip
    assert (snapshot.best_loss, snapshot.best_step, snapshot.worse_in_a_row) == (1.0, 5, 0)
    snapshot.not_saved(4)
    assert snapshot.best_step == 5
    snapshot.not_saved(5)  # the best that there is on the disk
    assert (snapshot.best_loss, snapshot.best_step) == (2.0, 2)


def test_the_length_of_epochs_is_that_of_the_samples_that_a_run_begins_with(tmp_path: Path):
    """Wherever it goes on."""
    np.save(tmp_path / "tokens.npy", np.arange(320) % 90)
    options: dict[str, Any] = {"seq_len": 8, "seq_len_at": "3:16", "steps": None, "epochs": 1, "batch_size": 4}
    options |= {"checkpoint_every": 4, "keep_checkpoints": 9}
    whole = short_run("gpt2", tmp_path / "tokens.npy", tmp_path / "one", **options)
    resume = str(tmp_path / "one" / "checkpoints" / "step-00000004")
    again = short_run("gpt2", tmp_path / "tokens.npy", tmp_path / "two", **options, resume=resume)
    assert whole.steps == again.steps == 10 and again.loss == whole.loss


def test_a_checkpoint_of_whatever_name_is_gone_back_to(tmp_path: Path):
    options: dict[str, Any] = {"seq_len": 8, "batch_size": 4, "spike_factor": 1.00001, "on_spike": "rollback"}
    options |= {"max_nonfinite": 100, "checkpoint_every": 100, "lr_schedule": "constant"}
    short_run("gpt2", "synthetic", tmp_path / "one", **options, steps=12)
    (tmp_path / "one" / "checkpoints" / "step-00000012").rename(tmp_path / "good")
    with pytest.raises(PhalanxError, match="going back to good, and leaving 1 batch out; that would"):
        short_run("gpt2", "synthetic", tmp_path / "two", **options, steps=16, resume=str(tmp_path / "good"))


def rising(step: int) -> float:
    """A learning rate that makes the loss fall at first and then rise."""
    return 3e-3 if step <= 2 else 2.0


def test_the_best_checkpoint_is_kept_and_the_run_ends_early(samples, tmp_path: Path):
    result = short_run(
        MODEL, samples, tmp_path, eval_data=samples, eval_every=1, eval_samples=8, steps=12, keep_best=True,
        keep_checkpoints=1, early_stop=2, lr_function=rising, clip=None, optimizer="sgd",
    )  # fmt: skip
    found = {record["step"]: record["eval_loss"] for record in records(tmp_path, "step")}
    best = min(found, key=lambda step: found[step])
    assert result.best == tmp_path / "checkpoints" / f"step-{best:08}"
    assert result.steps == best + 2 < 12
    assert {path.name for path in find(tmp_path / "checkpoints")} == {result.best.name, f"step-{result.steps:08}"}
    (ended,) = records(tmp_path, "ended")
    assert "2 evaluations in a row were not below" in ended["reason"]
    assert result.export is not None and records(tmp_path, "finish")[0]["best_step"] == best


class Stopper:
    def on_start(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] == 2:
            self.trainer.stop()


def test_a_callback_can_end_the_run_which_then_ends_well_and_can_go_on(samples, tmp_path: Path):
    whole = short_run(MODEL, samples, tmp_path / "whole", steps=5, lr_steps=5)
    result = short_run(MODEL, samples, tmp_path / "a", steps=5, lr_steps=5, callbacks=[Stopper()], checkpoint_every=0)
    assert result.steps == 3, "the step that was under way is the last"
    assert result.export is not None and result.checkpoint is not None
    assert records(tmp_path / "a", "ended")[0]["reason"] == "asked for (stop)"
    short_run(MODEL, samples, tmp_path / "a", steps=5, lr_steps=5, resume="auto")
    assert tuple(losses(tmp_path / "a").values()) == whole.losses


@pytest.mark.long
def test_a_callback_can_end_a_run_of_several_ranks(samples, tmp_path: Path):
    result = short_run(MODEL, samples, tmp_path, steps=400, plan="dp=2", callbacks=[Stopper()], export=False)
    assert 2 < result.steps < 400


def halving(step: int) -> float:
    return 1e-2 * 0.5**step


def test_a_function_of_the_step_says_the_learning_rate_and_a_resumed_run_needs_it(samples, tmp_path: Path):
    short_run(MODEL, samples, tmp_path, steps=2, lr_function=halving, export=False)
    assert [record["lr"] for record in records(tmp_path, "step")] == [halving(1), halving(2)]
    assert "lr from your own function" in records(tmp_path, "start")[0]["header"]["optimizer"]
    with pytest.raises(ConfigError, match=r"step 2 was made with 0.0025 from lr_function, and would now"):
        short_run(MODEL, samples, tmp_path, steps=3, resume="auto")
    short_run(MODEL, samples, tmp_path, steps=3, lr_function=halving, resume="auto", export=False)


def test_a_scheduler_of_torch_is_a_function_of_the_step():
    rate = ScheduledRate(lambda optimizer: StepLR(optimizer, 2, gamma=0.1), lr=1.0)
    expected = [1.0, 1.0, 0.1, 0.1, 0.01]
    assert [rate(step) for step in range(1, 6)] == pytest.approx(expected)
    assert rate(2) == 1.0, "an earlier step can be asked for"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=5), r"OneCycleLR also changes momentum(.|\n)*=False"),
        (
            lambda optimizer: ReduceLROnPlateau(optimizer),
            r"ReduceLROnPlateau, whose rate is not a function",
        ),
        (lambda optimizer: 3, r"scheduler made a int(.|\n)*torch.optim.lr_scheduler"),
    ],
)
def test_a_scheduler_that_is_no_function_of_the_step_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        ScheduledRate(make, 1.0)(3)


def test_a_rate_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"lr_function gave -1 for step 4(.|\n)*at least 0"):
        checked_rate(lambda step: -1, 4)


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"lr_function": halving, "warmup_steps": 1},
            "warmup_steps = 1 does nothing: lr_function says what",
        ),
        ({"lr_function": halving, "scheduler": StepLR}, "lr_function and scheduler exclude each other"),
        ({"early_stop": 2}, r"early_stop = 2 goes by the eval loss(.|\n)*set eval_data"),
        ({"keep_best": True}, r"keep_best = True goes by the eval loss"),
        ({"early_stop": 2, "eval_data": "stdlib"}, r"early_stop = 2 does nothing: there is one evaluation"),
        ({"keep_best": True, "checkpoint_every": "never"}, "keep_best = True saves checkpoints"),
        ({"eval_samples": 8}, "eval_samples = 8 does nothing without eval_data"),
        ({"generate_tokens": 8}, "generate_tokens = 8 does nothing without generate_every"),
        (
            {"keep_checkpoints": 5, "checkpoint_every": "never"},
            "keep_checkpoints = 5 does nothing with checkpoint_every",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, given, message):
    with pytest.raises(ConfigError, match=message):
        short_run(MODEL, "synthetic", tmp_path, **given)


def test_the_model_is_heard_while_it_is_trained(tmp_path: Path):
    options = {"generate_every": 2, "generate_prompts": ["import ", "def "], "generate_tokens": 5, "lr": 1e-2}
    result = short_run(MODEL, "stdlib", tmp_path, steps=4, **options)
    said = records(tmp_path, "sample")
    assert [(record["step"], record["prompt"]) for record in said] == [
        (2, "import "),
        (2, "def "),
        (4, "import "),
        (4, "def "),
    ]
    ids = torch.tensor([[*b"def "]])
    module = result.module()
    written = module.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    assert said[-1]["text"] == bytes(i for i in written[0, 4:].tolist() if i < 256).decode(errors="replace")


def test_ranks_without_a_place_take_part_in_samples_of_the_model(tmp_path: Path, lent_ranks: list[int]):
    options = {"generate_every": 1, "generate_prompts": "import ", "generate_tokens": 3, "device": "cpu"}
    plans = {"plan": "pp=1,dp=1", "plan_at": ("2:pp=2,mb=2", "3:pp=1,dp=1")}
    short_run(MODEL, "stdlib", tmp_path, **options, **plans, timeout=20.0)
    assert lent_ranks == [2] and [record["step"] for record in records(tmp_path, "sample")] == [1, 2, 3]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"generate_every": 2}, "generate_every = 2 does nothing without generate_prompts"),
        ({"generate_prompts": "x"}, r"generate_prompts = \('x',\) does nothing without generate_every"),
        ({"generate_every": 9, "generate_prompts": ""}, r"generate_prompts = '' has no tokens"),
        (
            {"generate_every": 1, "generate_prompts": "x", "data": "synthetic"},
            "needs a tokenizer, and the data is tokens",
        ),
        ({"generate_every": 1, "generate_prompts": "x", "model": "bert-base-cased"}, "masked-lm does not write text"),
    ],
)
def test_samples_that_cannot_be_made_are_refused(tmp_path: Path, given, message):
    given = {"steps": 1, "data": "stdlib", "model": MODEL, **given}
    with pytest.raises(ConfigError, match=message):
        short_run(given.pop("model"), given.pop("data"), tmp_path, **given)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.last(self.norm(self.first(x)).tanh())[:, 0], y)


def grouped(model: Model) -> torch.optim.Optimizer:
    groups = [
        {"params": [*model.first.parameters()], "lr": 1e-2, "weight_decay": 0.3},
        {"params": [*model.norm.parameters()], "lr": 1e-1},
    ]
    return torch.optim.AdamW(groups, lr=5e-3, betas=(0.8, 0.9), amsgrad=True)


@pytest.mark.parametrize("plan", ["", pytest.param("dp=2,zero=1", marks=pytest.mark.long)])
def test_an_optimizer_instance_updates_as_it_would_by_itself(tmp_path: Path, plan: str):
    generator = torch.Generator().manual_seed(0)
    rows = [{"x": torch.randn(4, generator=generator), "y": torch.randn((), generator=generator)} for _ in range(8)]
    plain, model = Model(), Model()
    own = grouped(plain)
    for _ in range(3):
        own.zero_grad()
        plain(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]}).backward()
        own.step()
    config = short_config(tmp_path, batch_size=8, clip=None, lr_schedule="constant", plan=plan, tiny=False)
    Trainer(model, rows, config, optimizer=grouped(model)).fit()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], parameter, rtol=1e-5, atol=1e-6)
    assert torch.equal(model.last.weight, Model().last.weight), "what is in no group is not trained"


def stepped(model: Model) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4), torch.ones(2)).backward()
    optimizer.step()
    return optimizer


def unlike(model: Model) -> torch.optim.Optimizer:
    groups = [{"params": [model.first.weight]}, {"params": [model.last.weight], "momentum": 0.5}]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    "make, message",
    [
        (stepped, r"SGD has state from earlier steps, which would be lost"),
        (unlike, r"group 1 of optimizer SGD has momentum = 0.5, and group 0 0(.|\n)*lr and weight_decay only"),
        (lambda model: torch.optim.SGD([torch.ones(3)], lr=1), r"a tensor of shape \[3\] that is no parameter of the"),
    ],
)
def test_an_optimizer_that_cannot_be_read_is_refused(make, message):
    model = Model()
    with pytest.raises(ConfigError, match=message):
        read_optimizer(make(model), model)


def test_an_optimizer_of_unknown_parameters_and_options_that_contradict_it_are_refused(tmp_path: Path):
    optimizer = torch.optim.SGD([torch.ones(3)], lr=1)
    with pytest.raises(ConfigError, match=r"the model is not a module in memory(.|\n)*optimizer_class="):
        phalanx.train(MODEL, "synthetic", optimizer=optimizer, out=str(tmp_path))
    model = Model()
    with pytest.raises(ConfigError, match=r"lr = 0.5 does nothing: the optimizer that was given has its own"):
        phalanx.train(model, [], optimizer=grouped(model), lr=0.5, out=str(tmp_path))

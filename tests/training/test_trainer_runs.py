"""What a run leaves behind and how it goes on: exact resume, the run folder, evaluation, callbacks, skipped steps."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.cli.main import main
from phalanx.config import RunConfig
from phalanx.errors import ConfigError, PhalanxError
from phalanx.state import checkpoint
from phalanx.training.trainer import Trainer
from tests.run_helpers import losses, padded_samples, records, short_config, short_run

LLAMA, GPT2 = "phalanx-demo", "gpt2"


class Crash:
    """Ends a run as a crash would, after this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] == self.step:
            raise RuntimeError("power cut")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param(GPT2, {"plan": "mb=3"}, id="accumulation"),
        pytest.param(LLAMA, {"dtype": "bfloat16", "seq_len": 8}, id="masters", marks=pytest.mark.long),
        pytest.param(LLAMA, {"dtype": "float16", "seq_len": 8}, id="scaled loss"),
        pytest.param(
            GPT2, {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}, id="momentum", marks=pytest.mark.long
        ),
        pytest.param(GPT2, {"optimizer": "torch.optim.NAdam"}, id="own optimizer", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_repeats_the_losses_bit_for_bit(model: str, options: dict[str, Any], tmp_path: Path):
    # GPT-2 has dropout; 7 samples in batches of 4: every batch ends inside an epoch.
    options = {**options, "steps": 7, "lr": 1e-2, "checkpoint_every": 2, "warmup_steps": 2, "export": False}
    whole = short_run(model, "synthetic:7", tmp_path / "whole", **options)
    with pytest.raises(PhalanxError, match=r"Crash\.on_step failed at \S+:\d+: RuntimeError: power cut"):
        short_run(model, "synthetic:7", tmp_path / "cut", callbacks=[Crash(5)], **options)
    rest = short_run(model, "synthetic:7", tmp_path / "cut", resume="auto", **options)
    assert rest.losses == whole.losses[4:]
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    ours, expected = rest.module().state_dict(), whole.module().state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_checkpoint_can_be_named_and_the_run_extended(tmp_path: Path):
    options = {"lr_schedule": "constant", "export": False}
    first = short_run(LLAMA, "synthetic:8", tmp_path / "a", steps=2, **options)
    more = short_run(LLAMA, "synthetic:8", tmp_path / "b", steps=4, resume=str(first.checkpoint), **options)
    whole = short_run(LLAMA, "synthetic:8", tmp_path / "c", steps=4, **options)
    assert first.losses + more.losses == whole.losses
    start = records(tmp_path / "b", "start")[0]
    assert more.steps == 4 and start["first_step"] == 2
    origin = f"from {first.checkpoint}, after step 2; the run was to have 2 steps then"
    assert start["header"]["weights"] == origin


def test_a_finished_run_that_is_resumed_trains_nothing_and_exports_again(tmp_path: Path):
    first = short_run(LLAMA, "synthetic:8", tmp_path)
    again = short_run(LLAMA, "synthetic:8", tmp_path, resume="auto")
    assert again.losses == () and again.loss == first.loss and again.export == first.export


def test_what_a_resumed_run_does_not_do_any_more_is_not_shown_as_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    evaluated = {"eval_data": "synthetic:4", "eval_samples": 4, "checkpoint_every": 1}
    assert short_run(LLAMA, "synthetic:8", tmp_path, steps=2, **evaluated).eval_loss is not None
    more = short_run(
        LLAMA,
        "synthetic:8",
        tmp_path,
        steps=4,
        resume="auto",
        profile_steps="1:2",
        timeline_step=3,
        progress="plain",
    )
    assert more.eval_loss is None and len(more.losses) == 2
    said = capsys.readouterr()
    assert "option profile_steps = 1:2 does nothing: this run goes on after step 2" in said.out + said.err
    assert "timeline_step" not in said.out + said.err and not list(tmp_path.glob("*trace*"))


def test_resume_auto_starts_afresh_where_there_is_nothing(tmp_path: Path):
    assert len(short_run(LLAMA, "synthetic:8", tmp_path, resume="auto").losses) == 3


def test_the_run_folder_holds_config_plan_log_checkpoints_export_and_trace(tmp_path: Path):
    options = {"plan": "mb=2", "checkpoint_every": 1, "keep_checkpoints": 2, "profile_steps": "2:3", "steps": 4}
    result = short_run(LLAMA, "synthetic:8", tmp_path, **options)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.yaml", "plan.json", "log-rank0.jsonl", "checkpoints", "export", "trace-steps-2-3.json",
    }  # fmt: skip
    assert RunConfig.load(tmp_path / "config.yaml") == short_config(
        tmp_path, model=LLAMA, data="synthetic:8", **options
    )
    assert json.loads((tmp_path / "plan.json").read_text())["mb"] == 2
    assert [path.name for path in checkpoint.find(tmp_path / "checkpoints")] == ["step-00000004", "step-00000003"]
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000004"
    assert len(records(tmp_path, "start")) == len(records(tmp_path, "finish")) == 1
    steps = records(tmp_path, "step")
    assert [record["loss"] for record in steps] == list(result.losses)
    assert steps[-1]["samples"] == 16 and steps[-1]["tokens"] == 64 and steps[0]["flops_per_second"] > 0


def test_the_header_says_what_was_derived_and_why(tmp_path: Path):
    short_run(LLAMA, "synthetic:10", tmp_path, steps=None, epochs=1.5, plan="mb=3", freeze=("*norm*",), export=False)
    header = records(tmp_path, "start")[0]["header"]
    assert header["steps"] == "4 (1.5 epochs of 10 samples in batches of 4)"
    assert header["plan"].startswith("mb=3: 3 × 1 to 2 of the 4 samples, schedule 1f1b")
    assert header["weights"].startswith("FRESH, from seed 0: ")
    assert "decay 0.1 on 29 matrices of 29 tensors" in header["optimizer"]
    assert header["device"].startswith("cpu (")


def test_evaluation_is_forward_only_without_dropout_and_always_on_the_same_samples(tmp_path: Path):
    seen: list[dict[str, Any]] = []

    class Watch:
        def on_evaluate(self, record: dict[str, Any]) -> None:
            seen.append(record)

    def run(out: str, **options: Any) -> Any:
        common = {"eval_data": "synthetic:6", "eval_samples": 5, "steps": 4, "lr": 1e-9}
        return short_run(GPT2, "synthetic:8", tmp_path / out, export=False, **{**common, **options})

    often = run("often", eval_every=2, callbacks=[Watch()])
    assert [(r["step"], r["eval_samples"]) for r in seen] == [(2, 5), (4, 5)]
    # The rate is so small that nothing is learned: equal values mean equal samples and no dropout.
    assert seen[0]["eval_loss"] == pytest.approx(seen[1]["eval_loss"], rel=1e-5)
    assert [r.get("eval_loss") for r in records(tmp_path / "often", "step")] == [
        None, seen[0]["eval_loss"], None, seen[1]["eval_loss"],
    ]  # fmt: skip
    at_the_end = run("end")
    assert at_the_end.eval_loss == often.eval_loss and at_the_end.losses == often.losses


def test_evaluation_data_may_be_an_object_given_to_the_trainer(tmp_path: Path):
    config = short_config(tmp_path, eval_every=1)
    trainer = Trainer(GPT2, "synthetic:8", config, eval_data=padded_samples(4, 90))
    assert trainer.config.eval_data == ("list",)
    with pytest.raises(ConfigError, match=r"option eval_every = 1 has nothing to evaluate(.|\n)*set eval_data as well"):
        Trainer(GPT2, "synthetic:8", config)
    with pytest.raises(ConfigError, match="option eval_every = 1 has nothing to evaluate"):
        Trainer.from_config(config)


def test_the_command_line_and_files_name_what_is_to_be_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "run.yaml"
    file.write_text("eval_every: 5\n")
    for arguments in (["--eval-every", "5"], ["--config", str(file)]):
        assert main(["train", *arguments, "--out", str(tmp_path)]) == 2
        assert "error: option eval_every = 5 has nothing to evaluate" in capsys.readouterr().err


def test_callbacks_are_called_at_their_moments(tmp_path: Path):
    calls: list[str] = []

    class All:
        def on_start(self, trainer: Trainer) -> None:
            calls.append(f"start at {trainer.loop.snapshot.step}")

        def on_step(self, record: dict[str, Any]) -> None:
            calls.append(f"step {record['step']}")

        def on_checkpoint(self, path: Path) -> None:
            calls.append(path.name)

        def on_end(self, result: Any) -> None:
            calls.append(f"end at {result.steps}")

    short_run(LLAMA, "synthetic:8", tmp_path, steps=2, callbacks=[All()])
    assert calls == ["start at 0", "step 1", "step 2", "step-00000002", "end at 2"]


class Poison:
    """Makes a parameter infinite before these consecutive steps, and whole again after them."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_start(self, trainer: Trainer) -> None:
        self.weight = trainer.loop.session.state.parameters.values["model.norm.weight"]

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] + 1 == self.steps[0]:
            self.good = self.weight.clone()
            self.weight.fill_(math.inf)
        if record["step"] == self.steps[-1]:
            self.weight.copy_(self.good)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_with_non_finite_gradients_is_skipped_and_counted(optimizer: str, tmp_path: Path):
    options = short_config(tmp_path, steps=4, optimizer=optimizer)
    trainer = Trainer(LLAMA, "synthetic:8", options, callbacks=[Poison(2, 3)])
    result = trainer.fit()
    assert result.skipped == 2
    steps = records(tmp_path, "step")
    assert [bool(record.get("skipped")) for record in steps] == [False, True, True, False]
    assert all(torch.isfinite(value).all() for value in trainer.loop.session.state.parameters.values.values())
    assert math.isfinite(result.loss)


def test_too_many_non_finite_steps_in_a_row_stop_the_run(tmp_path: Path):
    with pytest.raises(PhalanxError, match="2 steps in a row were not finite, the last at step 3") as info:
        short_run(LLAMA, "synthetic:8", tmp_path, steps=9, max_nonfinite=1, callbacks=[Poison(2, 3, 4)])
    assert "lower lr" in info.value.hint
    assert records(tmp_path, "error")[0]["message"].startswith("the gradients of 2 steps")
    with pytest.raises(PhalanxError, match="the gradients of 1 step in a row were not finite, the last at step 2"):
        short_run(LLAMA, "synthetic:8", tmp_path / "none", steps=9, max_nonfinite=0, callbacks=[Poison(2)])


def test_model_options_change_the_models_configuration(tmp_path: Path):
    options = {"model_options": {"num_hidden_layers": 2, "num_labels": 3}, "export": True, "steps": 1}
    result = short_run("google/vit-base-patch16-224-in21k", "synthetic:8", tmp_path, **options)
    config = result.module().config
    assert (config.num_hidden_layers, config.num_labels) == (2, 3)


def test_an_unknown_model_option_is_refused_with_the_nearest_name(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"num_hiden_layers(.|\n)*num_hidden_layers"):
        short_run(LLAMA, "synthetic:8", tmp_path, model_options={"num_hiden_layers": 2})


def test_images_are_counted_in_samples_not_tokens(tmp_path: Path):
    short_run("google/vit-base-patch16-224-in21k", "synthetic:8", tmp_path, steps=1)
    assert records(tmp_path, "step")[0]["unit"] == "samples"
    finish = records(tmp_path, "finish")[0]
    assert "samples_per_second" in finish and "tokens_per_second" not in finish


def test_a_run_says_what_padding_wastes_and_keeps_that_for_planning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps({"prompt": "a" * 5, "completion": "b" * (n % 3)}) + "\n" for n in range(12)))
    options: dict[str, Any] = {"steps": 1, "export": False, "seq_len": 32}
    short_run(LLAMA, str(data), tmp_path / "run", **options)
    said = records(tmp_path / "run", "start")[0]["header"]["padding"]
    assert said == "78.1% of the tokens; --seq-len 8 would waste least (12.5% padding, 0.0% cut off)"
    monkeypatch.setattr("phalanx.training.header.profile_data", lambda batches: pytest.fail("looked at again"))
    short_run(LLAMA, str(data), tmp_path / "again", **options)
    assert records(tmp_path / "again", "start")[0]["header"]["padding"] == said
    short_run(LLAMA, "synthetic:8", tmp_path / "whole", **options)
    assert "padding" not in records(tmp_path / "whole", "start")[0]["header"]


def test_a_store_that_cannot_be_used_keeps_no_run_from_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    monkeypatch.setattr("phalanx.profile.kept_data.profiles_path", lambda: data / "profiles.sqlite")
    short_run(LLAMA, str(data), tmp_path / "run", steps=1, export=False)
    assert "padding" not in records(tmp_path / "run", "start")[0]["header"]

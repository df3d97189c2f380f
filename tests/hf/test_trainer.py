"""`phalanx.hf.Trainer` gives what transformers' Trainer gives, under any plan: losses, rates, metrics, events."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, TrainerCallback

from phalanx.errors import ConfigError
from phalanx.hf import Trainer, TrainingArguments
from phalanx.launch.worker_pool import WorkerPool
from tests.hf import jobs
from tests.hf.history import history
from tests.hf.scripts import (
    COMMON,
    VOCABULARY,
    bert,
    causal_script,
    classification_script,
    llama,
    padded,
    sentences,
    texts,
)

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text("utf-8"))


def require_equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [each.keys() for each in found] == [each.keys() for each in expected]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5, msg=f"{mine} instead of {theirs}")


def test_a_causal_language_model_with_accumulation_clipping_decay_and_a_schedule(tmp_path: Path) -> None:
    trainer = causal_script(Trainer, TrainingArguments, str(tmp_path))
    result = trainer.train()
    require_equal(history(trainer), REFERENCE["causal"])
    assert result.global_step == 6 and result.training_loss == pytest.approx(REFERENCE["causal"][-1]["train_loss"])


def test_a_classification_with_metrics_and_predictions_is_evaluated_before_it_is_trained(tmp_path: Path) -> None:
    trainer = classification_script(Trainer, TrainingArguments, str(tmp_path))
    with torch.no_grad():
        expected = bert().eval()(**_stacked(sentences(10, seed=1)))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected.loss), rel=1e-5)
    trainer.train()
    require_equal(history(trainer), REFERENCE["classification"])  # which begins anew with training
    predicted = trainer.predict(sentences(5, seed=2))
    torch.testing.assert_close(torch.tensor(predicted.predictions), torch.tensor(REFERENCE["predictions"]))
    assert predicted.metrics["test_loss"] == pytest.approx(REFERENCE["test_loss"], rel=1e-5)
    assert predicted.label_ids.tolist() == [each["label"] for each in sentences(5, seed=2)]


@pytest.mark.parametrize(
    ("name", "world", "plan"),
    [
        ("classification_script", 2, "dp=2,zero=1,mb=2"),  # batches of 2 samples for 4 parts at the end of an epoch
        pytest.param("causal_script", 2, "pp=2,mb=2", marks=pytest.mark.long),
        pytest.param("causal_script", 4, "tp=2,dp=2,zero=3", marks=pytest.mark.long),
        pytest.param("classification_script", 2, "tp=2,mb=2", marks=pytest.mark.long),
    ],
)
def test_the_same_under_a_plan(pool: WorkerPool, tmp_path: Path, name: str, world: int, plan: str) -> None:
    found = pool.run(jobs.run_script, name, plan, str(tmp_path), world=world)
    for each in found:
        require_equal(each, REFERENCE[name.removesuffix("_script")])


@pytest.mark.long
@pytest.mark.parametrize("plan", ["tp=2", "pp=2,mb=2", "dp=2,zero=3"])
@pytest.mark.parametrize("name", ["causal_script", "classification_script"])
def test_predictions_under_a_plan_are_the_models_outputs(
    pool: WorkerPool, tmp_path: Path, name: str, plan: str
) -> None:
    """tp=2 splits the vocabulary that a causal model's outputs are over."""
    is_causal = name == "causal_script"
    samples = texts(7, seed=2) if is_causal else sentences(7, seed=2)
    model, batch = (llama(), padded(samples)) if is_causal else (bert(), _stacked(samples))
    with torch.no_grad():
        expected = model.eval()(**batch)
    known = batch["labels"] != -100 if is_causal else torch.ones(len(samples), dtype=torch.bool)
    for predictions, labels, metrics in pool.run(jobs.predict, name, plan, str(tmp_path), world=2):
        seen = torch.tensor(predictions)
        torch.testing.assert_close(seen[known], expected.logits[known], rtol=2e-5, atol=2e-6)
        assert torch.tensor(labels)[known].equal(batch["labels"][known])
        assert metrics["test_loss"] == pytest.approx(float(expected.loss), rel=2e-5)


def _stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"input_ids": torch.tensor([s["input_ids"] for s in samples]),
            "labels": torch.tensor([s["label"] for s in samples])}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers' Trainer needs accelerate")
def test_the_reference_is_what_transformers_gives_here() -> None:
    from tests.hf.record import record

    found = record()
    for name in ("causal", "smoothed", "classification"):
        require_equal(found[name], REFERENCE[name])


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="adapters of peft")
def test_adapters_of_peft_are_trained_and_saved_as_peft_has_them(tmp_path: Path) -> None:
    import peft  # pyright: ignore[reportMissingImports]

    def adapted() -> Any:
        torch.manual_seed(0)
        return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    args = TrainingArguments(
        str(tmp_path), max_steps=3, learning_rate=1e-2, save_strategy="steps", save_steps=2, **COMMON
    )  # fmt: skip
    trainer = Trainer(model=adapted(), args=args, train_dataset=texts(8), data_collator=padded, plan="mb=2")
    trainer.train()
    model, batch = adapted(), padded(texts(3, seed=5))
    assert all(".lora_" in name for name, _ in trainer.session.named_parameters())
    trainer.save_model(tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "out")
    with torch.no_grad():
        assert not torch.equal(loaded(**batch).loss, model(**batch).loss)
        torch.testing.assert_close(loaded(**batch).loss, trainer.model(**batch).loss)
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").is_file()
    again = Trainer(model=adapted(), args=args, train_dataset=texts(8), data_collator=padded, plan="mb=4")
    again.train(resume_from_checkpoint=True)
    assert again.state.log_history[2]["loss"] == pytest.approx(trainer.state.log_history[2]["loss"], rel=1e-5)


class Watcher(TrainerCallback):
    """Writes down what happens; ends the run after two steps."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append(f"step {state.global_step}")
        control.should_training_stop = state.global_step == 2
        control.should_save = state.global_step == 1

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **given: Any) -> None:
        self.events.append("log " + ("loss" if "loss" in logs else "end"))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("save")

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.events.append("end")


def test_callbacks_see_events_and_end_the_run_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    watcher = Watcher()
    trainer = causal_script(Trainer, TrainingArguments, str(tmp_path), callbacks=[watcher], eval_strategy="no")
    trainer.train()
    assert watcher.events == ["step 1", "log loss", "save", "step 2", "log loss", "log end", "end"]
    again = causal_script(Trainer, TrainingArguments, str(tmp_path))
    again.train(resume_from_checkpoint=True)
    require_equal(history(again)[:-1], REFERENCE["causal"][:-1])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert isinstance(saved, nn.Module)


class Freezer(TrainerCallback):
    """Freezes the head, lets it learn again in the second step, and at last something that never learned."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        model.lm_head.requires_grad_(state.global_step > 0)
        if state.global_step == 2:
            model.requires_grad_(True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **given: Any) -> None:
        self.norms.append(logs["grad_norm"])


def test_what_a_callback_freezes_in_the_model_rests_until_it_learns_again(tmp_path: Path) -> None:
    model, freezer = llama(), Freezer()
    model.model.embed_tokens.requires_grad_(False)
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=3, **COMMON)
    trainer = Trainer(
        model=model, args=args, train_dataset=texts(16), data_collator=padded, plan="mb=2", callbacks=[freezer]
    )
    with pytest.raises(ConfigError, match=r"embed_tokens\.weight requires a gradient now, and required none when"):
        trainer.train()
    expected = llama()
    expected.model.embed_tokens.requires_grad_(False)
    expected.lm_head.requires_grad_(False)
    batch = next(iter(trainer.get_train_dataloader()))
    expected(**batch).loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 1e9)
    assert freezer.norms[0] == pytest.approx(float(norm), rel=1e-5)
    values = trainer.session.state_dict()
    assert torch.equal(values["model.embed_tokens.weight"], llama().model.embed_tokens.weight)
    assert not torch.equal(values["lm_head.weight"], llama().lm_head.weight)


@pytest.mark.long
def test_the_model_holds_what_was_trained_and_a_folder_of_it_loads(tmp_path: Path) -> None:
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
    trainer = causal_script(
        Trainer, TrainingArguments, str(tmp_path), **changes, eval_strategy="steps", load_best_model_at_end=True
    )
    trainer.train()
    trainer.save_model(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    batch = padded(texts(3, seed=5))
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).loss, trainer.model(**batch).loss)
    assert not torch.equal(trainer.model.lm_head.weight, llama().lm_head.weight)
    assert trainer.state.best_model_checkpoint is not None and Path(trainer.state.best_model_checkpoint).is_dir()


@pytest.mark.long
def test_label_smoothing_is_a_loss_outside(tmp_path: Path) -> None:
    trainer = causal_script(
        Trainer, TrainingArguments, str(tmp_path), label_smoothing_factor=0.1, eval_strategy="no", num_train_epochs=1,
        plan="mb=2",
    )  # fmt: skip
    trainer.train()
    require_equal(history(trainer), REFERENCE["smoothed"])


class OwnLoss(Trainer):
    """As fine-tuners override it."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        assert model.config.vocab_size == VOCABULARY
        flat = outputs.logits[:, :-1].reshape(-1, VOCABULARY)
        loss = F.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=-100, reduction="sum")
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@pytest.mark.long
def test_compute_loss_of_ones_own_and_an_optimizer_and_a_schedule_of_ones_own(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, seed=7,
        max_grad_norm=0.5, eval_strategy="epoch", save_strategy="no", report_to="none", use_cpu=True, logging_steps=1,
        disable_tqdm=True,
    )  # fmt: skip
    model = llama()
    no_decay = [p for name, p in model.named_parameters() if "norm" in name]
    decay = [p for name, p in model.named_parameters() if "norm" not in name]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    rates = [0.0, 0.5, 1.0, 0.8535533905932738, 0.5, 0.14644660940672627, 0.0]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])
    trainer = OwnLoss(
        model=model, args=args, data_collator=padded, train_dataset=texts(22), eval_dataset=texts(6, seed=1),
        optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()
    require_equal(history(trainer), REFERENCE["causal"])

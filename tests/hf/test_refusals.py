"""What of transformers' Trainer is not there is refused by name, with what to do instead."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn

from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.hf import Trainer, TrainingArguments
from phalanx.hf import arguments as arguments_of_hf
from phalanx.hf.arguments import require_free_store
from phalanx.hf.data import Randomness, as_large_as, rows_of
from phalanx.hf.optimizers import make_optimizer
from phalanx.launch.join import find_place
from phalanx.plan.plan import Plan
from tests.hf.scripts import llama, padded, texts


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{"use_cpu": True, "report_to": "none", "disable_tqdm": True, **changes})


def trainer(folder: Path, kind: type[Trainer] = Trainer, **given: Any) -> Trainer:
    changes = given.pop("arguments", {})
    known: dict[str, Any] = {"model": llama(), "train_dataset": texts(8), "data_collator": padded}
    return kind(args=arguments(folder, **changes), **(known | given))


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha = 5.0 does nothing in phalanx.hf.Trainer", "leave it out"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size = True does nothing", "per_device_train_batch_size"),
        ({"skip_memory_metrics": False}, "skip_memory_metrics = False does nothing", "phalanx inspect"),
        ({"use_liger_kernel": True}, "use_liger_kernel = True does nothing", "compiled"),
        ({"push_to_hub": True}, "push_to_hub = True does nothing", "trainer.model.push_to_hub"),
        ({"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps"},
         "save_only_model = True leaves out of checkpoints what load_best_model_at_end", "leave one of them out"),
        ({"train_sampling_strategy": "batch_rebalance"}, "'batch_rebalance' is unknown here", "random, sequential"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
         "_checkpointing_kwargs = {'every_n_layers': 2} does nothing", "recompute=block"),
    ],
)  # fmt: skip
def test_arguments_that_would_do_nothing(tmp_path: Path, changes: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path, arguments=changes)
    assert message in str(error.value) and hint in str(error.value)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_of_activations_is_a_part_of_the_plan_by_both_of_its_names(tmp_path: Path, name: str) -> None:
    if name not in {each.name for each in dataclasses.fields(transformers.TrainingArguments)}:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    given = arguments_of_hf.TrainingArguments(output_dir=str(tmp_path), **{name: True})
    assert arguments_of_hf.plan_of(given, "dp=2") == "dp=2,recompute=block"
    assert arguments_of_hf.plan_of(given, "recompute=light") == "recompute=light"


class OwnStep(Trainer):
    def training_step(self, *given: Any) -> None:
        """Nobody calls it."""


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"model": None}, "it needs a model or model_init", "give model=…"),
        ({"model_init": llama}, "it needs a model or model_init", "give model=…"),
        ({"model": None, "model_init": lambda trial: llama()}, "model_init takes arguments", "give one without"),
        ({"kind": OwnStep}, "OwnStep.training_step overrides a method of transformers' Trainer", "compute_loss"),
        ({"optimizers": (None, object())}, "a scheduler moves an optimizer", "give both"),
    ],
)
def test_what_a_trainer_is_made_of(tmp_path: Path, given: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        trainer(tmp_path, **given)
    assert message in str(error.value) and hint in str(error.value)


def without_data(folder: Path) -> None:
    trainer(folder, train_dataset=None).train()


def without_evaluation_data(folder: Path) -> None:
    trainer(folder).evaluate()


def without_a_length(folder: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(texts(4))

    trainer(folder, train_dataset=Stream()).train()


def without_a_session(folder: Path) -> None:
    assert trainer(folder).session


def saved_before_training(folder: Path) -> None:
    trainer(folder, model=nn.Linear(2, 2)).save_model(folder)


def without_a_checkpoint(folder: Path) -> None:
    trainer(folder).train(resume_from_checkpoint=True)


def from_transformers_checkpoint(folder: Path) -> None:
    (folder / "optimizer.pt").touch()
    trainer(folder).train(resume_from_checkpoint=str(folder))


def with_an_optimizer_of_others(folder: Path) -> None:
    other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    trainer(folder, optimizers=(other, None), arguments={"max_steps": 1, "save_strategy": "no"}).train()


@pytest.mark.parametrize(
    ("does", "kind", "message", "hint"),
    [
        (without_data, ConfigError, "there is no data to train on", "give train_dataset"),
        (without_evaluation_data, ConfigError, "there is no data to evaluate on", "give eval_dataset"),
        (without_a_length, ConfigError, "the dataset has no length", "set max_steps"),
        (without_a_session, ConfigError, "not under its plan yet", "call train()"),
        (saved_before_training, ConfigError, "Linear is no model of HuggingFace's", "call train() before"),
        (without_a_checkpoint, CheckpointError, "holds no checkpoint", "give the path of one"),
        (from_transformers_checkpoint, CheckpointError, "was written by transformers' own Trainer", "from_pretrained"),
        pytest.param(
            with_an_optimizer_of_others, ConfigError, "updates a tensor of shape [2, 3]",
            "make it of model.parameters()", marks=pytest.mark.heavy,  # captures
        ),
    ],
)  # fmt: skip
def test_what_a_trainer_is_asked_for(
    tmp_path: Path, does: Any, kind: type[PhalanxError], message: str, hint: str
) -> None:
    with pytest.raises(kind) as error:
        does(tmp_path)
    assert message in str(error.value) and hint in str(error.value)


def test_options_of_ddp_are_said_to_do_nothing(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="ddp_timeout: they do nothing here"):
        trainer(tmp_path, arguments={"ddp_timeout": 7})


def test_every_argument_of_transformers_acts_is_refused_or_said_to_do_nothing() -> None:
    assert {each.name for each in dataclasses.fields(transformers.TrainingArguments)} <= arguments_of_hf._KNOWN


def test_an_argument_that_nobody_here_knows_is_refused_where_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments_of_hf, "_KNOWN", arguments_of_hf._KNOWN - {"eval_delay"})
    trainer(tmp_path)
    with pytest.raises(ConfigError, match=r"eval_delay = 3 is not known to phalanx\.hf\.Trainer") as error:
        trainer(tmp_path, arguments={"eval_delay": 3})
    assert "transformers' own Trainer" in error.value.hint


def test_the_log_level_is_transformers(tmp_path: Path) -> None:
    before = transformers.logging.get_verbosity()
    try:
        trainer(tmp_path, arguments={"log_level": "error"})
        assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    finally:
        transformers.logging.set_verbosity(before)


def test_names_that_are_not_there_say_so(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"has no 'hyperparameter_search', which transformers\.Trainer has"):
        trainer(tmp_path).hyperparameter_search()


def test_a_batch_that_is_too_small_grows_by_rows_that_are_not_learned() -> None:
    batch = {"input_ids": torch.arange(6).view(2, 3), "labels": torch.tensor([1, 2])}
    grown = as_large_as(Plan.parse("dp=2,mb=2"), batch)
    assert grown["labels"].tolist() == [1, 2, -100, -100] and rows_of(grown) == 4
    assert grown["input_ids"][3].tolist() == [3, 4, 5]
    assert as_large_as(Plan.parse("mb=2"), batch)["labels"].tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"labels that are numbers cannot be left out[\s\S]*dataloader_drop_last"):
        as_large_as(Plan.parse("dp=2,mb=2"), {"x": torch.ones(2, 1), "labels": torch.tensor([0.5, 1.5])})


def test_random_numbers_of_collators_are_apart_and_come_back() -> None:
    torch.manual_seed(3)
    first = Randomness()
    torch.rand(5)  # somebody else's
    with first.drawn():
        torch.rand(2)
    state = first.state()
    with first.drawn():
        expected = torch.rand(3)
    again = Randomness()
    again.load(state)
    with again.drawn():
        assert torch.equal(torch.rand(3), expected)


def test_arguments_that_formed_process_groups_where_ranks_meet() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4000"}
    place = find_place(variables)
    require_free_store(False, place)
    with pytest.raises(ConfigError, match=r"formed process groups[\s\S]*from phalanx\.hf import Trainer"):
        require_free_store(True, place)


class Grouped(torch.optim.SGD):
    """One that a factory would make."""


def test_an_optimizer_that_looks_into_the_module(tmp_path: Path) -> None:
    given = trainer(tmp_path)
    chosen: Any = (Grouped, {"lr": 0.1, "optimizer_dict": {}})
    with pytest.raises(ConfigError, match=r"optim = 'adamw_torch\w*' looks for its parameters in the module"):
        make_optimizer(cast(Any, None), given.args, (), given.model, chosen)

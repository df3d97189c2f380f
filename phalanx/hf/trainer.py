"""A drop-in for `transformers.Trainer`: the same constructor, arguments, callbacks and history, under a plan.

Every process of the plan runs the same script and makes the same calls. What is computed is a session's
(`phalanx.open`); the loop is in `loop.py`. What of transformers' Trainer is not there is refused by name.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import set_seed
from transformers.integrations import get_reporting_integration_callbacks
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)  # fmt: skip
from transformers.trainer_utils import (
    EvalLoopOutput,
    PredictionOutput,
    TrainOutput,
    enable_full_determinism,
    speed_metrics,
)
from transformers.utils import find_labels, logging

from phalanx.errors import ConfigError
from phalanx.hf import optimizers
from phalanx.hf.arguments import TrainingArguments, options_of, plan_of, require_covered
from phalanx.hf.computation import Computation
from phalanx.hf.data import Batch, Randomness, batches, loader, num_items, train_sampler, without_unused
from phalanx.hf.evaluation import Wanted, evaluate
from phalanx.hf.given import (
    default_collator,
    dtype_of,
    initialised,
    require_hooks,
    saved,
    smoother,
    without_adapters,
)  # fmt: skip
from phalanx.hf.loop import Loop
from phalanx.launch.context import RankContext
from phalanx.own_loop.session import OwnSession


class Trainer:
    """As `transformers.Trainer`; `plan`, or PHALANX_PLAN, says how the model is split. After train() `model` holds what
    was trained, on rank 0."""

    loss_is_scaled_for_ga: bool | None = None  # of compute_loss, as in transformers

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None,
        callbacks: list[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        plan: str = "",
        context: RankContext | None = None,
    ) -> None:
        self.args = args if args is not None else TrainingArguments("tmp_trainer")
        require_hooks(type(self), Trainer)
        require_covered(self.args)
        logging.set_verbosity(self.args.get_process_log_level())
        (enable_full_determinism if self.args.full_determinism else set_seed)(self.args.seed)
        if (model is None) == (model_init is None):
            raise ConfigError("Trainer: it needs a model or model_init, one of them", "give model=…")
        self.model = model if model is not None else initialised(model_init)
        self._base = without_adapters(self.model)  # whose forward says what the model takes
        config: Any = getattr(self.model, "config", None)
        if config is not None:
            config.use_cache = self.args.use_cache
        self.data_collator = data_collator or default_collator(processing_class)
        self.train_dataset, self.eval_dataset, self.processing_class = train_dataset, eval_dataset, processing_class
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.compute_loss_func, self.optimizer_cls_and_kwargs = compute_loss_func, optimizer_cls_and_kwargs
        self.given_optimizer, self.given_scheduler = optimizers
        if self.given_scheduler is not None and self.given_optimizer is None:
            raise ConfigError("Trainer: optimizers = (None, scheduler): a scheduler moves an optimizer", "give both")
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = self.given_scheduler
        self.label_names = self.args.label_names or find_labels(type(self._base))
        self.label_smoother = smoother(self.args, self.model)
        self.randomness = Randomness()
        self._context = context
        self.computation = Computation(
            self.model, plan_of(self.args, plan), options_of(self.args, dtype_of(self.model)), context,
            self._user_loss if self._computes_loss_outside else None, ("labels",),
        )  # fmt: skip
        self._set_callbacks(callbacks or [])

    def _set_callbacks(self, callbacks: list[TrainerCallback | type[TrainerCallback]]) -> None:
        defaults: list[Any] = [DefaultFlowCallback, *get_reporting_integration_callbacks(self.args.report_to)]
        self.callback_handler = CallbackHandler(
            [*defaults, *callbacks], self.model, self.processing_class, None, self.lr_scheduler
        )
        self.callback_handler.add_callback(PrinterCallback if self.args.disable_tqdm else ProgressCallback)
        self.control = TrainerControl()
        self.state = self.new_state()
        self.has_own_callbacks = bool(callbacks)
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def new_state(self) -> TrainerState:
        kept: list[Any] = [
            each for each in [*self.callback_handler.callbacks, self.control] if isinstance(each, ExportableState)
        ]
        zero = self.is_world_process_zero()
        return TrainerState(is_local_process_zero=zero, is_world_process_zero=zero, stateful_callbacks=kept)

    # Training.

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, ignore_keys_for_eval: list[str] | None = None
    ) -> TrainOutput:
        """Trains from where the model is, or from a checkpoint: its folder, or True for the newest one."""
        if self.train_dataset is None and type(self).get_train_dataloader is Trainer.get_train_dataloader:
            raise ConfigError("Trainer.train: there is no data to train on", "give train_dataset=…")
        return Loop(self, resume_from_checkpoint or None, ignore_keys_for_eval).run()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """For losses outside of the model. Override it: `model(**inputs)` gives the outputs of the whole batch."""
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif self.label_smoother is not None:
            shifts = type(self._base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            loss = self.label_smoother(outputs, labels, shift_labels=shifts)
        else:
            raise ConfigError(
                f"{type(self).__name__}.compute_loss calls the one it overrides, whose loss is computed inside of the "
                "model and cannot leave it",
                "compute the loss from the outputs, or do not override compute_loss",
            )
        return (loss, outputs) if return_outputs else loss

    @property
    def _computes_loss_outside(self) -> bool:
        overridden = type(self).compute_loss is not Trainer.compute_loss
        return overridden or self.compute_loss_func is not None or self.label_smoother is not None

    @property
    def is_loss_scaled(self) -> bool:
        """Whether a loss of the user's own is a part of the step's loss already, not the mean of its batch: as
        transformers decides it."""
        if not self._computes_loss_outside or self.label_smoother is not None:
            return False
        if self.loss_is_scaled_for_ga is not None:
            return self.loss_is_scaled_for_ga
        return self._accepts_loss_kwargs or self.compute_loss_func is not None

    def _user_loss(self, model: Any, inputs: dict[str, Any], items: int | None) -> Tensor:
        counted = None if items is None else torch.tensor(items)
        if "num_items_in_batch" in inspect.signature(self.compute_loss).parameters:
            return self.compute_loss(model, inputs, num_items_in_batch=counted)
        return self.compute_loss(model, inputs)

    def num_items(self, batch: Batch) -> int | None:
        """The labels of a batch that are learned, where its loss is their mean."""
        if not self._accepts_loss_kwargs and self.compute_loss_func is None:
            return None
        config = getattr(self.model, "config", None)
        shifts = LOSS_MAPPING.get(getattr(self._base, "loss_type", None) or "") is ForCausalLMLoss
        return num_items(batch, shifts and not getattr(config, "is_encoder_decoder", False))

    @property
    def _accepts_loss_kwargs(self) -> bool:
        known = getattr(self._base, "accepts_loss_kwargs", None)
        if known is not None:
            return bool(known)
        parameters = inspect.signature(self._base.forward).parameters.values()
        return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)

    # Data.

    def get_train_dataloader(self) -> DataLoader[Any]:
        name = getattr(self.processing_class, "model_input_names", [None])[0]
        sampler = train_sampler(self.train_dataset, self.args, name)
        return loader(self.train_dataset, self.args, self._collator(), self.args.per_device_train_batch_size, sampler)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ConfigError("Trainer.evaluate: there is no data to evaluate on", "give eval_dataset=…")
        return loader(dataset, self.args, self._collator(), self.args.per_device_eval_batch_size, None)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        return self.get_eval_dataloader(test_dataset)

    def _collator(self) -> Callable[[list[Any]], Batch]:
        if not self.args.remove_unused_columns:
            return self.data_collator
        taken = [*inspect.signature(self._base.forward).parameters, "label", "label_ids", *self.label_names]
        return without_unused(self.data_collator, taken, type(self._base).__name__)

    # The optimizer.

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_optimizer(self) -> torch.optim.Optimizer:
        """Of what this rank updates."""
        if self.optimizer is None and self.given_optimizer is not None:
            self.optimizer = optimizers.like(self.given_optimizer, self.model, self.session)
        elif self.optimizer is None:
            decayed = self.get_decay_parameter_names(self.model)
            self.optimizer = optimizers.make_optimizer(
                self.session, self.args, decayed, self.model, self.optimizer_cls_and_kwargs
            )
        self.session.optimizer = self.optimizer
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        moved = optimizer or self.optimizer
        assert moved is not None
        if self.given_scheduler is None:
            self.lr_scheduler = optimizers.make_scheduler(moved, self.args, num_training_steps)
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return optimizers.decayed_names(model)

    # Evaluation.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss, and what compute_metrics makes of all predictions; of several datasets one after the other."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, dict):
            found: dict[str, float] = {}
            for name, each in dataset.items():
                found |= self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        source = self.get_eval_dataloader(dataset)
        output = self._evaluated(source, self.compute_metrics is None, ignore_keys, metric_key_prefix)
        assert output.metrics is not None
        self.log(output.metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, output.metrics)
        return output.metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """All outputs, whole, on every rank."""
        source = self.get_test_dataloader(test_dataset)
        output = self._evaluated(source, False, ignore_keys, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)
        return PredictionOutput(output.predictions, output.label_ids, output.metrics)

    def _evaluated(
        self, source: DataLoader[Any], loss_only: bool, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        began, config = time.time(), getattr(self.model, "config", None)
        ignored = ignore_keys or getattr(config, "keys_to_ignore_at_inference", None) or ["past_key_values"]
        wanted = Wanted(
            self.label_names, ignored, loss_only or self.args.prediction_loss_only, self.num_items,
            self.preprocess_logits_for_metrics, self.compute_metrics, prefix,
        )  # fmt: skip
        handler: Any = self.callback_handler
        handler.eval_dataloader = source

        def after_batch() -> None:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        output = evaluate(self.computation, batches(source, self.randomness), self.args, wanted, after_batch)
        assert output.metrics is not None and output.num_samples is not None
        steps = math.ceil(output.num_samples / self.args.per_device_eval_batch_size)
        output.metrics.update(speed_metrics(prefix, began, num_samples=output.num_samples, num_steps=steps))
        return output

    # What is kept and said.

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """An ordinary HuggingFace folder, of the model as it is now. All ranks call it."""
        folder = Path(output_dir or self.args.output_dir or ".")
        if self.computation.session is not None:
            self.session.export(folder)
        elif self.is_world_process_zero():
            saved(self.model, folder)
        if self.is_world_process_zero():
            named = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if named is not None:
                named.save_pretrained(str(folder))

    def save_state(self) -> None:
        if self.is_world_process_zero():
            self.state.save_to_json(str(Path(self.args.output_dir or ".") / "trainer_state.json"))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def take_back(self) -> None:
        """What was trained, in `model`; all ranks call it, rank 0 gets it."""
        values = self.session.state_dict()
        if values:
            self.model.load_state_dict(values)

    def close(self) -> None:
        """Ends this rank's part; a script that ends does it by itself."""
        if self.computation.session is not None:
            self.computation.session.close()

    # Callbacks, and where this is.

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callback_handler.add_callback(callback)
        self.has_own_callbacks = True

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> TrainerCallback | None:
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        self.callback_handler.remove_callback(callback)

    def is_world_process_zero(self) -> bool:
        return (self._context.rank if self._context is not None else self.args.process_index) == 0

    def is_local_process_zero(self) -> bool:
        return (self._context.local_rank if self._context is not None else self.args.local_process_index) == 0

    @property
    def session(self) -> OwnSession:
        if self.computation.session is None:
            raise ConfigError("Trainer: the model is not under its plan yet", "call train() or evaluate() before")
        return self.computation.session

    def __getattr__(self, name: str) -> Any:
        known = name in vars(transformers.Trainer)
        why = f"phalanx.hf.Trainer has no {name!r}" + (", which transformers.Trainer has" if known else "")
        raise AttributeError(why + "; docs/hf.md says what is there")

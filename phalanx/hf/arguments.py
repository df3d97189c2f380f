"""Transformers' TrainingArguments: what acts here, what is said elsewhere, what is refused; and where this process is.

`TrainingArguments` here is the same class without accelerate, which would form process groups of its own.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.training_args import ParallelMode

from phalanx.errors import ConfigError
from phalanx.launch.context import local_device
from phalanx.launch.join import Place, find_place
from phalanx.plan import fields

_SAY_IN_PLAN = "say it in the plan: Trainer(…, plan='dp=4,zero=3'), or PHALANX_PLAN; see docs/plans.md"
_REFUSED = {
    "fsdp": _SAY_IN_PLAN,
    "fsdp_config": _SAY_IN_PLAN,
    "deepspeed": _SAY_IN_PLAN,
    "parallelism_config": _SAY_IN_PLAN,
    "use_liger_kernel": "leave it out: segments of the model are compiled as they are",
    "liger_kernel_config": "leave it out: segments of the model are compiled as they are",
    "neftune_noise_alpha": "leave it out, or train with transformers' own Trainer",
    "auto_find_batch_size": "set per_device_train_batch_size; the plan's mb says in how many parts it is computed",
    "torch_compile_backend": "use torch_compile=True",
    "torch_compile_mode": "use torch_compile=True",
    "torch_empty_cache_steps": "leave it out: memory is predicted, not found out",
    "push_to_hub": "call trainer.model.push_to_hub(…) after train()",
    "bf16_full_eval": "leave it out: evaluation is in the precision of training",
    "fp16_full_eval": "leave it out: evaluation is in the precision of training",
    "optim_target_modules": "choose an optimizer that updates whole parameters",
    "enable_jit_checkpoint": "use save_strategy='steps'",
    "include_num_input_tokens_seen": "leave it out",
    "batch_eval_metrics": "leave it out: metrics are computed from all predictions",
    "skip_memory_metrics": "leave it out; phalanx inspect predicts the memory of a plan",
    "restore_callback_states_from_checkpoint": "leave it out",
    "debug": "leave it out; phalanx verify compares every gradient with the plain model's",
}
# They say how machinery works that is not used here; scripts set them by habit.
_MOOT = (
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
    "ddp_timeout", "eval_use_gather_object", "eval_accumulation_steps", "save_on_each_node", "accelerator_config",
    "average_tokens_across_devices", "dataloader_pin_memory", "dataloader_in_order", "hub_model_id",
    "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision",
)  # fmt: skip
# Any other, as of a later transformers, is refused where it is set.
_KNOWN = {
    *_REFUSED, *_MOOT, "output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "optim_args", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm",
    "label_smoothing_factor", "bf16", "fp16", "tf32", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile", "use_cache", "logging_strategy",
    "logging_steps", "logging_first_step", "logging_dir", "log_on_each_node", "logging_nan_inf_filter", "log_level",
    "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
    "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size",
    "prediction_loss_only", "eval_on_start", "eval_do_concat_batches", "include_for_metrics", "save_only_model",
    "save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "ignore_data_skip", "full_determinism", "seed", "data_seed", "use_cpu", "dataloader_drop_last",
    "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "remove_unused_columns", "label_names", "train_sampling_strategy",
    "length_column_name", "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank",
}  # fmt: skip
_SAMPLING = ("random", "sequential", "group_by_length")


class TrainingArguments(transformers.TrainingArguments):
    """As transformers', for every process of a plan."""

    @property
    def _place(self) -> Place | None:
        return find_place(os.environ)

    @cached_property
    def _setup_devices(self) -> torch.device:
        self.distributed_state, place = None, self._place
        wanted = "cpu" if self.use_cpu else "auto"
        found = local_device(wanted, place.local_rank, place.world) if place else local_device(wanted, 0)
        self._n_gpu = int(torch.device(found).type == "cuda")
        return torch.device(found)

    @property
    def parallel_mode(self) -> ParallelMode:
        return ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        return self._place.world if self._place else 1

    @property
    def process_index(self) -> int:
        return self._place.rank if self._place else 0

    @property
    def local_process_index(self) -> int:
        return self._place.local_rank if self._place else 0


def require_free_store(has_groups: bool, place: Place | None) -> None:
    """has_groups: whether torch has any. Where no launcher holds the store, accelerate has taken its port."""
    if has_groups and place is not None and not place.store_exists:
        raise ConfigError(
            "TrainingArguments of transformers formed process groups where the ranks of the plan are to meet",
            "import it from where the Trainer is: from phalanx.hf import Trainer, TrainingArguments; or start the "
            "script with torchrun",
        )


def require_covered(args: transformers.TrainingArguments) -> None:
    """Refuses by name what was set and would do nothing."""
    require_free_store(dist.is_available() and dist.is_initialized(), find_place(os.environ))
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    for name, hint in _REFUSED.items():
        value = getattr(args, name, None)
        if value not in (None, "", [], {}, "no", False) and value != defaults.get(name) and not _derived(args, name):
            raise ConfigError(f"TrainingArguments: {name} = {value!r} does nothing in phalanx.hf.Trainer", hint)
    for each in dataclasses.fields(transformers.TrainingArguments):  # those of a subclass are the script's own
        usual = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if each.name not in _KNOWN and _is_set(getattr(args, each.name, None), usual):
            raise ConfigError(
                f"TrainingArguments: {each.name} = {getattr(args, each.name)!r} is not known to phalanx.hf.Trainer",
                "leave it out, or train with transformers' own Trainer",
            )
    if not args.skip_memory_metrics:
        raise ConfigError(
            "TrainingArguments: skip_memory_metrics = False does nothing in phalanx.hf.Trainer",
            _REFUSED["skip_memory_metrics"],
        )
    if args.save_only_model and args.load_best_model_at_end:
        raise ConfigError(
            "TrainingArguments: save_only_model = True leaves out of checkpoints what load_best_model_at_end = True "
            "goes back to",
            "leave one of them out; save_total_limit=1 keeps the best and the newest checkpoint alone",
        )
    if args.train_sampling_strategy not in _SAMPLING:
        raise ConfigError(
            f"TrainingArguments: train_sampling_strategy = {args.train_sampling_strategy!r} is unknown here",
            f"use {', '.join(_SAMPLING)}",
        )
    moot = [name for name in _MOOT if _is_set(getattr(args, name, None), defaults.get(name))]
    if moot:
        what = f"TrainingArguments: {', '.join(moot)}: they do nothing here; the plan decides how ranks work together"
        warnings.warn(what, stacklevel=3)


def _is_set(value: Any, usual: Any) -> bool:
    """Whether somebody wants something; transformers makes an object of its usual values where there was none."""
    if usual is None and dataclasses.is_dataclass(value) and not isinstance(value, type):
        usual = type(value)()
    return value not in (None, False) and value != usual


def _derived(args: transformers.TrainingArguments, name: str) -> bool:
    """Whether transformers set it by itself."""
    return name == "torch_compile_backend" and args.torch_compile and args.torch_compile_backend == "inductor"


def options_of(args: transformers.TrainingArguments, dtype: torch.dtype) -> dict[str, Any]:
    """The options of a session. dtype: of the model as it was loaded."""
    own = str(dtype).removeprefix("torch.")
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    masters = {} if half or own not in ("bfloat16", "float16") else {"master_weights": False}
    return {
        "dtype": half or own, **masters, "seed": args.seed,
        "device": "cpu" if args.use_cpu else "auto", "compile": "inductor" if args.torch_compile else "auto",
    }  # fmt: skip


def plan_of(args: transformers.TrainingArguments, plan: str) -> str:
    """As given, or in PHALANX_PLAN; activation checkpointing is what plans call recompute."""
    text = plan or os.environ.get("PHALANX_PLAN", "")
    name = _checkpointing()
    kwargs: dict[str, Any] = dict(getattr(args, f"{name}_kwargs") or {})
    kwargs.pop("use_reentrant", None)  # there is one way to compute again here
    if kwargs:
        raise ConfigError(
            f"TrainingArguments: {name}_kwargs = {kwargs!r} does nothing in phalanx.hf.Trainer",
            "say in the plan which blocks are computed again: recompute=block*8+none*24; see docs/plans.md",
        )
    if getattr(args, name) and "recompute" not in fields.read(text):
        text = ",".join(filter(None, (text, "recompute=block")))
    return text


def _checkpointing() -> str:
    """What transformers calls it; from 5.23 on the older name is an alias of the newer one."""
    named = {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    return "activation_checkpointing" if "activation_checkpointing" in named else "gradient_checkpointing"

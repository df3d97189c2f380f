"""What options of a run may not stand together, or do nothing for want of another: each is refused with what to do.

The limits of a single option stand beside it (`config.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx.errors import ConfigError, nearest
from phalanx.written import AUTO, SIMPLE, parse_bytes, parse_steps

if TYPE_CHECKING:
    from phalanx.config import RunConfig

OPTIMIZERS = ("adamw", "sgd", "muon")

# An option in this table acts only when another one has one of these values; set otherwise, it is refused.
ACTS_ONLY_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "betas": ("optimizer", ("adamw", "muon")),
    "eps": ("optimizer", ("adamw", "muon")),
    "min_lr_ratio": ("lr_schedule", ("cosine", "linear")),
    "lr_steps": ("lr_schedule", ("cosine", "linear")),
    "master_weights": ("dtype", ("bfloat16", "float16")),
}


def require_eval_data(config: RunConfig) -> None:
    """Asked once what was given as objects has its name in the options."""
    if config.eval_every and not config.eval_data:
        raise ConfigError(f"option eval_every = {config.eval_every} has nothing to evaluate", "set eval_data as well")
    if _is_set(config, "eval_samples") and not config.eval_data:
        raise ConfigError(
            f"option eval_samples = {config.eval_samples} does nothing without eval_data",
            "set eval_data as well, or leave eval_samples out",
        )
    for option in ("early_stop", "keep_best"):
        value = getattr(config, option)
        if value and not config.eval_data:
            raise ConfigError(
                f"option {option} = {value} goes by the eval loss", "set eval_data as well, and eval_every"
            )
    if config.early_stop and not config.eval_every:
        raise ConfigError(
            f"option early_stop = {config.early_stop} does nothing: there is one evaluation, at the end",
            "set eval_every to the steps between evaluations",
        )


def _is_set(config: RunConfig, option: str) -> bool:
    return getattr(config, option) != type(config).model_fields[option].default


def require_no_import(optimizer: Any) -> None:
    if isinstance(optimizer, str) and "." in optimizer and not re.fullmatch(r"torch\.optim\.\w+", optimizer):
        raise ConfigError(
            f"option optimizer = {optimizer!r} in a file would import a module, which runs its code",
            f"if you trust it, name it yourself: --optimizer {optimizer}, or RunConfig.load(…, optimizer=…)",
        )


def require_known_optimizer(name: str) -> None:
    if "." not in name and name not in OPTIMIZERS:
        suggestion = f"{nearest(name, OPTIMIZERS)} Or give a dotted path such as torch.optim.Adagrad"
        raise ConfigError(f"option optimizer = {name!r} is unknown", suggestion)


def _check_deterministic(config: RunConfig) -> None:
    if not config.deterministic:
        if config.slot_size != 1:
            shown = f"option slot_size = {config.slot_size} does nothing with deterministic = False"
            raise ConfigError(shown, "leave slot_size out, or set deterministic")
        return
    if config.compile not in ("auto", "off"):
        raise ConfigError(
            f"option deterministic does not go with compile = {config.compile!r}: what a compiler fuses depends on the "
            "plan, and with it the rounding",
            "leave compile out: deterministic runs are not compiled",
        )
    if config.measure_top is not None:
        raise ConfigError(
            f"option deterministic does not go with measure_top = {config.measure_top}: a plan that is chosen by "
            "measurement may split tensors otherwise in the next run, which changes bits",
            "leave measure_top out, or give a plan",
        )


def require_together(config: RunConfig) -> None:
    """What no single option's limits can say; the first contradiction is raised."""
    for option, (other, values) in ACTS_ONLY_WITH.items():
        condition = getattr(config, other)
        if _is_set(config, option) and condition not in values:
            shown = f"option {option} = {getattr(config, option)!r} does nothing with {other} = {condition!r}"
            raise ConfigError(shown, f"leave {option} out, or set {other} to {' or '.join(values)}")
    _check_deterministic(config)
    if config.measure_top is not None and not config.searches_plan:
        shown = f"option measure_top = {config.measure_top} does nothing with plan = {config.plan or SIMPLE!r}"
        raise ConfigError(f"{shown}, for which nothing is searched", f"leave measure_top out, or use plan={AUTO}")
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(f"options steps = {config.steps} and epochs = {config.epochs} exclude each other", "give one")
    if config.steps is not None and config.warmup_steps > config.steps:
        longer = f"option warmup_steps = {config.warmup_steps} is longer than the run, steps = {config.steps}"
        raise ConfigError(longer, f"choose warmup_steps between 0 and {config.steps}")
    if config.lr_steps is not None and config.warmup_steps > config.lr_steps:
        longer = f"option warmup_steps = {config.warmup_steps} is more than lr_steps = {config.lr_steps}"
        raise ConfigError(longer, f"choose warmup_steps between 0 and {config.lr_steps}")
    if bool(config.generate_every) != bool(config.generate_prompts):
        given, other = ("generate_every", "generate_prompts")[:: 1 if config.generate_every else -1]
        shown = f"option {given} = {getattr(config, given)!r} does nothing without {other}"
        raise ConfigError(shown, f"set {other} as well, or leave {given} out")
    if _is_set(config, "generate_tokens") and not config.generate_every:
        raise ConfigError(
            f"option generate_tokens = {config.generate_tokens} does nothing without generate_every",
            "set generate_every and generate_prompts as well, or leave generate_tokens out",
        )
    if _is_set(config, "keep_checkpoints") and config.checkpoint_every == "never":
        shown = f"option keep_checkpoints = {config.keep_checkpoints} does nothing with checkpoint_every = never"
        raise ConfigError(shown, "leave one of them out")
    if config.on_spike == "rollback" and (config.spike_factor is None or config.checkpoint_every in (0, "never")):
        raise ConfigError(
            "option on_spike = 'rollback' needs to know what a spike is, and checkpoints on the way",
            "set spike_factor and checkpoint_every as well",
        )
    if config.min_ranks > 1 and config.on_loss == "stop":
        raise ConfigError(
            f"option min_ranks = {config.min_ranks} does nothing with on_loss = {config.on_loss!r}",
            "set on_loss to shrink, replace or regrow as well, or leave min_ranks out",
        )
    if config.mirror_every != "never" and config.on_loss == "stop":
        raise ConfigError(
            f"option mirror_every = {config.mirror_every!r} does nothing where a lost rank ends the run",
            "set on_loss to shrink or replace as well, or leave mirror_every out",
        )
    if config.remote is not None and "://" not in config.remote:
        raise ConfigError(
            f"option remote = {config.remote!r} is no URL", "write e.g. s3://bucket/run or file:///backup/run"
        )
    if config.export_dcp and config.lora is not None and not config.merge_lora:
        raise ConfigError(
            "option export_dcp = True would hold adapters without names that others know", "set merge_lora"
        )
    if config.keep_best and config.checkpoint_every == "never":
        raise ConfigError("option keep_best = True saves checkpoints, and checkpoint_every = never", "leave one out")
    if config.merge_lora and config.lora is None:
        raise ConfigError("option merge_lora = True does nothing without lora", "leave it out, or set lora")
    if not config.data:
        raise ConfigError("option data is empty", "name a file or folder, or use 'stdlib' or 'synthetic'")
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(f"option betas = {config.betas} is out of range", "both must be at least 0 and less than 1")
    require_known_optimizer(config.optimizer)
    if config.profile_steps is not None:
        parse_steps(config.profile_steps)
    if config.memory is not None:
        parse_bytes("memory", config.memory)
    _ = config.periods  # refuses what cannot be read


def asked_too_late(config: RunConfig, done: int) -> list[str]:
    """What a run that goes on after so many steps says of steps that were to be looked at and are done: it may have
    been started again as it was, so they are no errors."""
    asked = {"timeline_step": config.timeline_step, "memory_snapshot": config.memory_snapshot}
    if config.profile_steps is not None:
        asked["profile_steps"] = parse_steps(config.profile_steps)[1]
    return [
        f"option {option} = {getattr(config, option)} does nothing: this run goes on after step {done}"
        for option, last in asked.items()
        if last is not None and last <= done
    ]

"""The header of a run: what is trained, on what and how, with the reasons for whatever was derived."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from phalanx.config import RunConfig
from phalanx.engine.inputs import split
from phalanx.errors import PhalanxError, counted
from phalanx.observe.metrics import faster_in_half
from phalanx.params.optimizer_groups import decays
from phalanx.plan.plan import Plan
from phalanx.planning.data_use import WORTH_SAYING
from phalanx.prepare.budget import Fit
from phalanx.prepare.prepare import Prepared
from phalanx.profile.data import profile_data
from phalanx.profile.kept_data import KeptData
from phalanx.session.session import Session
from phalanx.training.job import Job


def header(
    run: Prepared, config: RunConfig, session: Session, origin: str, fit: Fit, own_rate: bool = False,
    padding: str = "",
) -> dict[str, Any]:  # fmt: skip
    """What is trained, on what and how, with the reasons for whatever was derived. own_rate: the learning rate is a
    function of the user's own. padding: what `padding_text` says of the data."""
    counts = {name: math.prod(shape) for name, shape in run.captured.shapes.items()}
    trained = sum(counts[name] for name in run.trainable)
    rows: dict[str, Any] = {
        "model": f"{run.spec.name} ({run.spec.task})",
        "parameters": f"{sum(counts.values()):,}, {trained:,} of them trained",
        "weights": origin,
        "data": run.batches.describe(),
        **({"padding": padding} if padding else {}),
        "device": f"{run.device} ({run.reasons['device']}), segments compiled: {session.compiled.compiler.mode}",
        "dtype": _dtype_text(run, config, session),
        "plan": plan_text(run.plan, config.batch_size),
        **({"chosen": run.choice.reason} if run.choice is not None else {}),
        "optimizer": _optimizer_text(run, config, session, own_rate),
        "memory": fit.describe(),
        "steps": f"{run.total_steps:,} ({run.reasons['steps']})",
    }
    if run.reasons.get("check"):
        rows["checked"] = run.reasons["check"]
    if run.tokenizer is not None:
        rows["tokenizer"] = f"{type(run.tokenizer).__name__}, {run.tokenizer.vocab_size:,} tokens"
    if run.eval_batches is not None:
        rows["evaluation"] = run.eval_batches.describe()
    if run.plan.world > 1:
        opening = session.opening
        rows["ranks"] = ranks_text(run.plan, opening.context.world if opening is not None else run.plan.world)
        decided = [reason for name, reason in run.reasons.items() if name in ("pp", "dp", "mb", "stages")]
        rows["stages"] = "; ".join(decided) or f"stages {'-'.join(map(str, run.plan.stages))}"
    if lab := os.environ.get("PHALANX_LAB"):
        rows["lab"] = lab
    for number, note in enumerate(run.captured.notes, start=1):
        rows[f"note {number}"] = note
    return rows


def padding_text(run: Prepared, job: Job, say: Callable[[str], None]) -> str:
    """What padding wastes of samples from files, by the profile of them that is kept, or by one that is made now and
    kept; "" of other data. A store that cannot be used keeps no run from training."""
    batches, config = run.batches, job.config
    is_padded = batches.padding and not batches.adds_mask and batches.num_samples is not None
    if not is_padded or run.task.modality != "text" or config.seq_len_at or not job.is_named:
        return ""
    try:
        kept = KeptData(config, say)
        profile = (kept.get() or kept.put(profile_data(batches))).profile
    except PhalanxError:
        return ""
    now, best = profile.now, profile.best
    words = f"{now.padding:.1%} of the tokens"
    if best.waste < now.waste - WORTH_SAYING:
        words += f"; --seq-len {best.tokens} would waste least ({best.padding:.1%} padding, {best.cut:.1%} cut off)"
    return words


def _dtype_text(run: Prepared, config: RunConfig, session: Session) -> str:
    if session.compiled.formation.facts.masters:
        return f"{config.dtype} with float32 master weights"
    gpu = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else ""
    return config.dtype + faster_in_half(gpu, config.dtype)


def plan_text(plan: Plan, batch_size: int) -> str:
    """The plan, and what it makes of a batch."""
    sizes = [size for part in split(batch_size, plan.dp) for size in split(part, plan.mb)]
    shown = str(sizes[0]) if len(set(sizes)) == 1 else f"{min(sizes)} to {max(sizes)}"
    replicas = "" if plan.dp == 1 else f"{plan.dp} replicas × "
    interleaved = " in 2 interleaved halves" if plan.halves == 2 else ""
    interleaved += ", each with the backward of the one before" if plan.pairs else ""
    return (
        f"{plan.shown}: {replicas}{plan.mb} × {shown} of the {counted(batch_size, 'sample')}{interleaved}, "
        f"schedule {plan.schedule}, activations {plan.kept}"
    )


def ranks_text(plan: Plan, num_ranks: int) -> str:
    """`8 (2 in a pipeline × 2 replicas × 2 tensor-parallel), 1 more to spare`."""
    beside = f" × {plan.tp} tensor-parallel" if plan.tp > 1 else ""
    spare = f", {num_ranks - plan.world} more to spare" if num_ranks > plan.world else ""
    return f"{plan.world} ({plan.pp} in a pipeline × {counted(plan.dp, 'replica')}{beside}){spare}"


def _optimizer_text(run: Prepared, config: RunConfig, session: Session, own_rate: bool) -> str:
    optimizer, trained = session.state.optimizer.inner, run.trainable
    end = "" if config.lr_schedule == "constant" else f" to {config.min_lr_ratio:.0%}"
    end += f" at step {config.lr_steps}" if config.lr_steps else ""
    warmup = f" after {counted(config.warmup_steps, 'warm-up step')}" if config.warmup_steps else ""
    parts = [
        type(optimizer).__name__ + (" (fused)" if optimizer.defaults.get("fused") else ""),
        "lr from your own function" if own_rate else f"lr {config.lr:g}, {config.lr_schedule}{end}{warmup}",
        f"clipped at norm {config.clip:g}" if config.clip is not None else "not clipped",
    ]
    if any(group.get("weight_decay") for group in optimizer.param_groups):
        usual = [name for name in trained if name not in run.groups.number]
        matrices = sum(decays(run.captured.shapes[name]) for name in usual)
        decayed, of = counted(matrices, "matrix", "matrices"), counted(len(usual), "tensor")
        parts.append(f"decay {config.weight_decay:g} on {decayed} of {of}")
    if run.groups.settings:
        own, groups = counted(len(run.groups.number), "tensor"), counted(len(run.groups.settings), "group")
        parts.append(f"{own} in {groups} of their own")
    return ", ".join(parts)

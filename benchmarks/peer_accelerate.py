"""HuggingFace Accelerate to compare with: its DDP and its FSDP2, with the settings of the plain torch sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from compare import Step
from compare_setting import CLIP, Setting, adamw
from peer_phalanx import layers_of, mean_over_ranks, plain_model
from torch import nn

from phalanx.launch.context import RankContext
from phalanx.plan.plan import Plan


def accelerate(context: RankContext, setting: Setting, plan: Plan, *, sharded: bool) -> Step:
    plain = plain_model(context, setting)
    accelerator = Accelerator(
        cpu=context.device == "cpu",
        mixed_precision="no" if setting.torch_dtype == torch.float32 else "bf16",
        fsdp_plugin=_fsdp2(plain) if sharded else None,
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=True)],
    )
    model, optimizer = accelerator.prepare(plain, adamw(list(plain.parameters())))
    inputs = setting.share(context.rank, context.world, context.device)

    def step() -> Callable[[], float]:
        loss = model(**inputs).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return lambda: mean_over_ranks(loss)

    return step


def _fsdp2(model: nn.Module) -> Any:
    names = sorted({type(layer).__name__ for layer in layers_of(model)})
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=False, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=names,
    )  # fmt: skip

"""Data parallel training with torch's own tools: DistributedDataParallel and FSDP2, each in its faster variants.

Each function builds one side on one rank. Half precision is done as is usual there: autocast for DDP, a mixed
precision policy for FSDP2; both keep float32 weights and reduce float32 gradients, as Phalanx does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from compare import Build, Step
from compare_setting import CLIP, Setting, adamw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx.launch.context import RankContext
from phalanx.model.graph.units import find_layers
from phalanx.plan.plan import Plan


def ddp(context: RankContext, setting: Setting, plan: Plan, *, bucket_mib: int) -> Step:
    model = _model(context, setting)
    with warnings.catch_warnings(action="ignore"):  # the new name of broadcast_buffers is unknown to older versions
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=bucket_mib, broadcast_buffers=False
        )
    half = setting.torch_dtype != torch.float32
    return _step(context, setting, wrapped, lambda: _autocast(context, setting) if half else nullcontext())


def fsdp2(context: RankContext, setting: Setting, plan: Plan, *, reshard: bool) -> Step:
    model = _model(context, setting)
    policy = MixedPrecisionPolicy(param_dtype=setting.torch_dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": init_device_mesh(_kind(context), (context.world,)), "mp_policy": policy}
    for layer in _layers(model):
        fully_shard(layer, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    return _step(context, setting, model, nullcontext)


DDP: dict[str, Build] = {
    "DDP, 25 MiB buckets": partial(ddp, bucket_mib=25),
    "DDP, 100 MiB buckets": partial(ddp, bucket_mib=100),
}
FSDP2_RESHARD: dict[str, Build] = {"FSDP2, resharding after forward": partial(fsdp2, reshard=True)}
FSDP2_KEEP: dict[str, Build] = {"FSDP2, keeping parameters": partial(fsdp2, reshard=False)}


def _step(
    context: RankContext, setting: Setting, model: nn.Module, precision: Callable[[], AbstractContextManager[Any]]
) -> Step:  # fmt: skip
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    inputs = setting.share(context.rank, context.world, context.device)

    def step() -> Callable[[], float]:
        with precision():
            loss = model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: _mean(loss.detach())

    return step


def _model(context: RankContext, setting: Setting) -> nn.Module:
    model = setting.module().to(context.device)
    if _kind(context) == "cuda":
        for layer in _layers(model):
            layer.forward = torch.compile(layer.forward)  # hooks of FSDP2 stay outside, where they break no graph
    return model


def _layers(model: nn.Module) -> list[nn.Module]:
    return [layer for found in find_layers(model) for layer in model.get_submodule(found.path).children()]


def _autocast(context: RankContext, setting: Setting) -> AbstractContextManager[Any]:
    return torch.autocast(_kind(context), setting.torch_dtype)


def _kind(context: RankContext) -> str:
    return torch.device(context.device).type


def _mean(loss: Tensor) -> float:
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()

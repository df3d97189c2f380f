"""Phalanx as one of the sides, and what all those built on the plain HuggingFace model have in common."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from compare import Step, our_rank, our_step
from compare_setting import Setting
from torch import Tensor, nn

from phalanx.launch.context import RankContext
from phalanx.model.captured import Captured
from phalanx.model.graph.units import find_layers
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan


def phalanx(context: RankContext, setting: Setting, plan: Plan) -> Step:
    return our_step(our_rank(context, setting, plan, _captured(setting)), setting)


def completed(text: str, setting: Setting, world: int) -> Plan:
    """With stages balanced as we do it, for those who leave that to their users."""
    captured = _captured(setting)
    costs = captured.blocks.flops(captured.dims(setting.batch()))
    return complete(text, world=world, batch_size=setting.size.samples, costs=costs).plan


@cache
def _captured(setting: Setting) -> Captured:
    return setting.capture()


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [layer for found in find_layers(model) for layer in model.get_submodule(found.path).children()]


def plain_model(context: RankContext, setting: Setting) -> nn.Module:
    """On the rank's device; on a GPU with compiled layers, as its users would have them."""
    model = setting.module().to(context.device)
    if context.device != "cpu":
        for layer in layers_of(model):
            layer.forward = torch.compile(layer.forward)
    return model


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()

"""Pipelines with torch.distributed.pipelining: the same cuts, micro-batches and schedules as Phalanx, stages by hand.

Stages are put together from the HuggingFace model's own modules, because `pipeline()` cannot split models with rotary
positions. Only what is needed for the two shapes of `compare_setting` is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from compare import Step
from compare_setting import CLIP, Setting, adamw
from torch import Tensor, nn
from torch.distributed import pipelining

from phalanx.launch.context import RankContext
from phalanx.plan.plan import Plan

# Ours → torch's. Its interleaved zero bubble with one stage per rank is what ZB-H1 is.
SCHEDULES = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble",
}  # fmt: skip
_SEVERAL_STAGES = ("interleaved", "zb-h1", "zb-v")
_ALIGNED = 8  # half-precision numbers: a product with a multiple of that many columns is not padded
_COMPILES = ("gpipe", "1f1b", "interleaved")  # torch cannot take input and weight gradients of a compiled layer apart


def pipeline(context: RankContext, setting: Setting, plan: Plan) -> Step:
    """One rank of torch's pipeline under our plan."""
    blocks = _blocks(setting.module().to(setting.torch_dtype), setting.shape)
    device = torch.device(context.device)
    numbers = plan.stages_of(context.rank)
    modules = [_Stage([blocks[b] for b in plan.stage_blocks(number)]).to(device) for number in numbers]
    if device.type == "cuda" and plan.schedule in _COMPILES:
        padded = setting.size.vocabulary % _ALIGNED != 0  # a compiled head gives logits with other strides, and torch
        for module in modules:  # then refuses what the stage gives
            module.compile_blocks(head=not padded)
    stages = [
        pipelining.PipelineStage(module, number, plan.num_stages, device)
        for number, module in zip(numbers, modules, strict=True)
    ]
    kind = getattr(pipelining, SCHEDULES[plan.schedule])
    several = plan.schedule in _SEVERAL_STAGES
    schedule = kind(stages if several else stages[0], n_microbatches=plan.mb, loss_fn=causal_loss)
    return _step(setting, schedule, modules, device, first=0 in numbers, last=plan.num_stages - 1 in numbers)


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As in HuggingFace's causal models: each token predicts the next."""
    shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), shifted.flatten())


def _step(
    setting: Setting, schedule: Any, modules: Sequence[nn.Module], device: torch.device, *, first: bool, last: bool
) -> Step:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = adamw(parameters)
    batch = {name: tensor.to(device) for name, tensor in setting.batch().items()}
    inputs = (batch["input_ids"],) if first else ()

    def step() -> Callable[[], float]:
        losses: list[Tensor] = []
        schedule.step(*inputs, **({"target": batch["labels"], "losses": losses} if last else {}))
        _clip(parameters)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: _shared([loss.detach() for loss in losses], device)

    return step


def _clip(parameters: list[nn.Parameter]) -> None:
    """To the norm over all stages, which torch leaves to its users."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = nn.utils.get_total_norm(gradients, foreach=True).square()
    dist.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt(), foreach=True)


def _shared(losses: list[Tensor], device: torch.device) -> float:
    """The mean over micro-batches; all ranks get that of the one that has it."""
    mean = torch.stack(losses).mean().float() if losses else torch.zeros((), device=device)
    dist.all_reduce(mean)
    return float(mean)


class _Stage(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, values: Tensor) -> Tensor:
        tables: Any = None
        for block in self.blocks:
            if isinstance(block, _RotaryLayer):
                tables = block.tables(values) if tables is None else tables
                values = block(values, tables)
            else:
                values = block(values)
        return values

    def compile_blocks(self, *, head: bool) -> None:
        for block in self.blocks:
            if head or not isinstance(block, nn.Sequential):
                block.forward = torch.compile(block.forward)


class _RotaryLayer(nn.Module):
    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def tables(self, values: Tensor) -> Any:
        """The same for all layers of a stage."""
        return self.rotary(values, torch.arange(values.shape[1], device=values.device)[None])

    def forward(self, values: Tensor, tables: Any) -> Tensor:
        return self.layer(values, position_embeddings=tables)


class _LearntPositions(nn.Module):
    def __init__(self, tokens: nn.Module, positions: nn.Module) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


def _blocks(model: Any, shape: str) -> list[nn.Module]:
    """As Phalanx cuts them: the embedding, each layer, the head."""
    if shape == "llama":
        inner = model.model
        layers = [_RotaryLayer(layer, inner.rotary_emb) for layer in inner.layers]
        return [inner.embed_tokens, *layers, nn.Sequential(inner.norm, model.lm_head)]
    inner = model.transformer
    embedding = _LearntPositions(inner.wte, inner.wpe)
    return [embedding, *inner.h, nn.Sequential(inner.ln_f, model.lm_head)]

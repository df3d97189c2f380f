"""DeepSpeed to compare with: ZeRO 1, 2 and 3, and its pipeline with stages that hold equal numbers of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from compare import Step
from compare_setting import CLIP, Setting, adamw
from deepspeed.pipe import PipelineModule
from peer_phalanx import mean_over_ranks, plain_model
from torch import nn
from torch_pipeline import _blocks, _Stage, causal_loss

from phalanx.launch.context import RankContext
from phalanx.plan.plan import Plan


def zero(context: RankContext, setting: Setting, plan: Plan, *, stage: int) -> Step:
    model = plain_model(context, setting)
    config = _config(setting, samples=setting.size.samples // context.world, steps=1)
    config["zero_optimization"] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    engine = _initialize(model, config)
    inputs = setting.share(context.rank, context.world, context.device)

    def step() -> Callable[[], float]:
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        return lambda: mean_over_ranks(loss)

    return step


def pipeline(context: RankContext, setting: Setting, plan: Plan) -> Step:
    """1F1B, the one schedule that it has."""
    deepspeed.init_distributed(dist_init_required=False)  # the stages are laid out over it before there is an engine
    blocks = [_Stage([block]) for block in _blocks(setting.module(), setting.shape)]
    model = PipelineModule(blocks, num_stages=context.world, loss_fn=causal_loss, partition_method="parameters")
    engine = _initialize(model, _config(setting, samples=setting.size.samples // plan.mb, steps=plan.mb))
    batch = {name: tensor.to(context.device).chunk(plan.mb) for name, tensor in setting.batch().items()}
    parts = itertools.cycle(zip(batch["input_ids"], batch["labels"]))

    def step() -> Callable[[], float]:
        loss = engine.train_batch(parts)
        return lambda: float(loss)

    return step


def _initialize(model: nn.Module, config: dict[str, Any]) -> Any:
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def _config(setting: Setting, *, samples: int, steps: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": setting.torch_dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }

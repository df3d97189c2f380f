"""torchtitan to compare with: its Llama model of the same shape under its FSDP, with its flexible attention, compiled.

It builds its own model, so weights are its own; shape, batch, precision, clipping and optimizer settings are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compare import Step
from compare_setting import CLIP, Setting, adamw
from peer_phalanx import mean_over_ranks
from torch import nn
from torch_pipeline import causal_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.llama3 import _build_llama3_layers, parallelize_llama
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from phalanx.launch.context import RankContext
from phalanx.plan.plan import Plan

_NORMAL, _ONES = {"weight": nn.init.normal_}, {"weight": nn.init.ones_}


def fsdp(context: RankContext, setting: Setting, plan: Plan) -> Step:
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = _config(setting).build()
    parallelism = ParallelismConfig(data_parallel_shard_degree=context.world, fsdp_reshard_after_forward="never")
    parallelize_llama(
        model, parallel_dims=ParallelDims.from_config(parallelism, context.world), parallelism=parallelism,
        training=TrainingConfig(mixed_precision_param=setting.dtype, mixed_precision_reduce="float32"),
        compile_config=CompileConfig(enable=context.device != "cpu"), ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device=context.device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(context.device))
    return _step(context, setting, model)


def _step(context: RankContext, setting: Setting, model: Any) -> Step:
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    batch = setting.share(context.rank, context.world, context.device)
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    masks = model.get_attention_masks(positions)

    def step() -> Callable[[], float]:
        loss = causal_loss(model(ids, positions, masks), batch["labels"])
        loss.backward()
        clip_grad_norm_(parameters, CLIP, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return lambda: mean_over_ranks(loss)

    return step


def _config(setting: Setting) -> Llama3Model.Config:
    hf, size = setting.spec().config, setting.size
    rope = ComplexRoPE.Config(dim=size.width // hf.num_attention_heads, max_seq_len=size.tokens, theta=10000)
    config = Llama3Model.Config(
        dim=size.width, vocab_size=size.vocabulary,
        tok_embeddings=Embedding.Config(num_embeddings=size.vocabulary, embedding_dim=size.width, param_init=_NORMAL),
        norm=RMSNorm.Config(normalized_shape=size.width, param_init=_ONES),
        lm_head=Linear.Config(
            in_features=size.width, out_features=size.vocabulary, param_init={"weight": _small},
        ),
        layers=_build_llama3_layers(
            n_layers=size.layers, dim=size.width, n_heads=hf.num_attention_heads, n_kv_heads=hf.num_key_value_heads,
            hidden_dim=hf.intermediate_size, rope=rope, attn_backend="flex",
        ),
    )  # fmt: skip
    set_llama3_sharding_config(config, enable_sp=False)
    return config


def _small(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

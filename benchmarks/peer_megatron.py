"""Megatron-core to compare with: its GPT model of the same shape, with its distributed optimizer, or under 1F1B.

It builds its own model, so weights are its own; shape, batch, precision, clipping and optimizer settings are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from compare import Step
from compare_setting import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Setting
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from phalanx.launch.context import RankContext
from phalanx.plan.plan import Plan


def megatron(context: RankContext, setting: Setting, plan: Plan) -> Step:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=plan.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = _config(setting, plan)
    model = _model(config, setting, plan).to(context.device, setting.torch_dtype)  # positions are float32 otherwise
    overlapped = DistributedDataParallelConfig(use_distributed_optimizer=plan.dp > 1, overlap_grad_reduce=True)
    wrapped = DistributedDataParallel(config, overlapped, model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(_optimizer(setting, plan), [wrapped])
    return _step(context, setting, plan, wrapped, optimizer)


def _step(context: RankContext, setting: Setting, plan: Plan, model: Any, optimizer: Any) -> Step:
    samples, tokens = setting.size.samples // (plan.dp * plan.mb), setting.size.tokens
    share = setting.size.samples // plan.dp
    begin = context.rank % plan.dp * share
    batch = {name: part[begin : begin + share].to(context.device) for name, part in setting.batch().items()}
    train = get_forward_backward_func()

    def step() -> Callable[[], float]:
        model.zero_grad_buffer()
        losses = train(
            forward_step_func=_forward, data_iterator=_parts(batch, plan.mb), model=model, num_microbatches=plan.mb,
            seq_length=tokens, micro_batch_size=samples, forward_only=False,
        )  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        return lambda: sum(float(part["loss"]) for part in losses) / max(1, len(losses))

    return step


def _parts(batch: dict[str, Tensor], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Labels moved by one, as Megatron's models want them."""
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=0)[:, 1:]
    return iter(list(zip(batch["input_ids"].chunk(count), labels.chunk(count))))


def _forward(parts: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
    ids, labels = next(parts)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return model(ids, positions, None, labels=labels), partial(_loss, tokens=ids.shape[1])


def _loss(losses: Tensor, *, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The last token of a sample has nothing to predict."""
    mean = losses[:, : tokens - 1].float().mean()
    return mean, {"loss": mean.detach()}


def _model(config: TransformerConfig, setting: Setting, plan: Plan) -> GPTModel:
    llama = setting.shape == "llama"
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization=config.normalization), setting.size.vocabulary,
        setting.size.tokens, share_embeddings_and_output_weights=False,
        position_embedding_type="rope" if llama else "learned_absolute",
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip


def _config(setting: Setting, plan: Plan) -> TransformerConfig:
    hf = setting.spec().config
    llama = setting.shape == "llama"
    size = setting.size
    return TransformerConfig(
        num_layers=size.layers, hidden_size=size.width, num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads if llama else hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size if llama else 4 * size.width, add_bias_linear=not llama,
        normalization="RMSNorm" if llama else "LayerNorm", gated_linear_unit=llama,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=setting.dtype == "bfloat16",
        params_dtype=setting.torch_dtype, pipeline_dtype=setting.torch_dtype,
        pipeline_model_parallel_size=plan.pp,
    )  # fmt: skip


def _optimizer(setting: Setting, plan: Plan) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam", lr=LR, weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS,
        clip_grad=CLIP, bf16=setting.dtype == "bfloat16", params_dtype=setting.torch_dtype,
        use_distributed_optimizer=plan.dp > 1,
    )  # fmt: skip

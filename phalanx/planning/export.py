"""The same plan in other frameworks' words: arguments of Megatron-LM and torchtitan, a DeepSpeed configuration with its
launch line, an Accelerate configuration; each with what it cannot express.

Only what a plan decides is written; model, data and learning rate are the user's. Pure text; nothing is imported from
those projects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.plan import fields
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class Job:
    """A plan and what it is for. slots: devices of each node."""

    plan: Plan
    batch: int
    tokens: int
    num_layers: int
    slots: tuple[int, ...]
    dtype: str = "bfloat16"

    @property
    def nodes(self) -> int:
        return len(self.slots)

    @property
    def samples(self) -> int:
        """Of a micro-batch, the largest."""
        return -(-self.batch // (self.plan.dp * self.plan.mb))

    @property
    def recomputed(self) -> tuple[int, int]:
        """How many layers compute all of themselves again, and how many the light part."""
        policies = self.plan.policies if len(self.plan.policies) > 1 else self.plan.policies * self.num_layers
        return sum(policy in ("unit", "block") for policy in policies), policies.count("light")


class Exported(NamedTuple):
    """text: what to write or call. cannot: what of the plan is lost."""

    text: str
    cannot: tuple[str, ...]


def export(framework: str, job: Job) -> Exported:
    """framework: one of FRAMEWORKS."""
    exported = FRAMEWORKS[framework](job)
    return Exported(exported.text, (*exported.cannot, *_common(job)))


def _common(job: Job) -> list[str]:
    """What none of them has."""
    plan, lost = job.plan, list[str]()
    if plan.slices:
        lost.append("token slices")
    if any(degree != plan.tp for units in plan.degrees for degree in units):
        lost.append("degrees that differ from unit to unit")
    if plan.overlap != "none" or plan.pairs:
        lost.append(f"overlap={plan.overlap}" if plan.overlap != "none" else "pairs=yes")
    if plan.offload:
        lost.append(fields.write({"offload": plan.offload}))
    if plan.sums:
        lost.append(f"sums={plan.sums}")
    if job.batch % (plan.dp * plan.mb):
        lost.append("micro-batches of different sizes: use a batch that dp × mb divides")
    return lost


def _in_precision(job: Job, words: Mapping[str, str], lost: list[str]) -> str:
    """A framework's word for the precision; "" where it says nothing of it, or lacks it."""
    if job.dtype not in words:
        lost.append(f"dtype={job.dtype}")
    return words.get(job.dtype, "")


def _megatron(job: Job) -> Exported:
    plan, lost = job.plan, list[str]()
    words = [
        f"--tensor-model-parallel-size {plan.tp}", f"--pipeline-model-parallel-size {plan.pp}",
        f"--micro-batch-size {job.samples}", f"--global-batch-size {job.batch}", f"--seq-length {job.tokens}",
    ]  # fmt: skip
    if precision := _in_precision(job, {"bfloat16": "--bf16", "float16": "--fp16", "float32": ""}, lost):
        words.append(precision)
    if plan.sequence:
        words.append("--sequence-parallel")
    if plan.schedule == "interleaved":
        words.append(f"--num-virtual-stages-per-pipeline-rank {plan.v}")
    elif plan.pp > 1 and plan.schedule != "1f1b":
        lost.append(f"schedule={plan.schedule} (its own is 1F1B)")
    words += _megatron_stages(job, lost) + _megatron_zero(plan, lost) + _megatron_recompute(job, lost)
    return Exported(" \\\n  ".join(words), tuple(lost))


def _megatron_stages(job: Job, lost: list[str]) -> list[str]:
    """Layers of the first and the last stage; those between must be equal."""
    plan = job.plan
    layers = [count - (stage == 0) - (stage == plan.num_stages - 1) for stage, count in enumerate(plan.stages)]
    if len(set(layers)) <= 1:
        return []
    if plan.v > 1 or len(set(layers[1:-1])) > 1 or min(layers) < 1:
        lost.append(
            f"stages={'-'.join(map(str, plan.stages))} (only the first and the last may differ from the others)"
        )
        return []
    return [f"--decoder-first-pipeline-num-layers {layers[0]}", f"--decoder-last-pipeline-num-layers {layers[-1]}"]


def _megatron_zero(plan: Plan, lost: list[str]) -> list[str]:
    if not plan.zero:
        return ["--overlap-grad-reduce"] if plan.dp > 1 else []
    if plan.zero_degree:
        lost.append(f"zero_degree={plan.zero_degree} without further settings of its own")
    if plan.zero >= 2:
        strategy = "optim_grads_params" if plan.zero == 3 else "optim_grads"
        return [
            "--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}", "--ckpt-format fsdp_dtensor",
        ]  # fmt: skip
    return ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


def _megatron_recompute(job: Job, lost: list[str]) -> list[str]:
    full, light = job.recomputed
    if full and light:
        lost.append(f"recompute=light of {light} layers beside {full} that compute all again")
    if full:
        each = -(-full // job.plan.num_stages)
        return [f"--recompute-granularity full --recompute-method block --recompute-num-layers {each}"]
    if light:
        lost.append("recompute=light but for attention: its selective recomputation is not the same")
        return ["--recompute-granularity selective"]
    return []


def _deepspeed_nodes(job: Job, lost: list[str]) -> str:
    if len(set(job.slots)) == 1:
        return f"--num_nodes {job.nodes} --num_gpus {job.slots[0]}"
    counts = ", ".join(f"slots={count}" for count in job.slots)
    lost.append(f"nodes of several sizes without a hostfile: HOSTFILE names each node in order, with {counts}")
    return "--hostfile HOSTFILE"


def _deepspeed(job: Job) -> Exported:
    plan, lost = job.plan, list[str]()
    config: dict[str, object] = {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": job.samples,
        "gradient_accumulation_steps": plan.mb,
        "zero_optimization": {"stage": plan.zero, "overlap_comm": True},
    }
    if precision := _in_precision(job, {"bfloat16": "bf16", "float16": "fp16", "float32": ""}, lost):
        config[precision] = {"enabled": True}
    if plan.zero == 3 and plan.zero_degree:
        config["zero_optimization"] = {"stage": 3, "overlap_comm": True, "zero_hpz_partition_size": plan.zero_degree}
    elif plan.zero_degree:
        lost.append(f"zero_degree={plan.zero_degree}")
    if plan.tp > 1:
        config["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.pp > 1:
        lost.append(f"pp={plan.pp} in the file: wrap the model as PipelineModule(layers, num_stages={plan.pp})")
        if plan.zero >= 2:
            lost.append(f"zero={plan.zero} beside a pipeline (its pipelines take 0 and 1)")
        if plan.schedule not in ("1f1b",):
            lost.append(f"schedule={plan.schedule}")
    if any(job.recomputed):
        lost.append("recompute layer by layer: call checkpointing in the model")
    launch = f"deepspeed {_deepspeed_nodes(job, lost)} train.py --deepspeed_config ds_config.json"
    return Exported(f"{json.dumps(config, indent=2)}\n\n{launch}", tuple(lost))


_TITAN = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}


def _torchtitan(job: Job) -> Exported:
    plan, lost = job.plan, list[str]()
    sharded = plan.shards if plan.zero else 1
    if plan.zero in (1, 2):
        lost.append(f"zero={plan.zero}: its FSDP shards parameters, too (fsdp_reshard_after_forward=never keeps them)")
    if plan.pp > 1 and plan.schedule not in _TITAN:
        lost.append(f"schedule={plan.schedule}")
    full, light = job.recomputed
    if full and full < job.num_layers:
        lost.append(f"recompute of {full} layers only: all or a choice by operator")
    local = job.samples * plan.mb if plan.pp > 1 else job.samples
    reshard = "never" if plan.zero < 3 or plan.gathers == "step" else "always"
    training = {
        "local_batch_size": local, "global_batch_size": job.batch, "seq_len": job.tokens,
        "mixed_precision_param": _in_precision(job, {"bfloat16": "bfloat16", "float32": "float32"}, lost) or "float32",
    }  # fmt: skip
    parallelism: dict[str, object] = {
        "data_parallel_shard_degree": sharded, "data_parallel_replicate_degree": plan.dp // sharded,
        "fsdp_reshard_after_forward": reshard, "tensor_parallel_degree": plan.tp, "pipeline_parallel_degree": plan.pp,
    }  # fmt: skip
    if plan.pp > 1:
        parallelism["pipeline_parallel_schedule"] = _TITAN.get(plan.schedule, "1F1B")
        parallelism["pipeline_parallel_microbatch_size"] = job.samples
    words = [f"--training.{name} {value}" for name, value in training.items()]
    words += [f"--parallelism.{name} {value}" for name, value in parallelism.items()]
    mode = "full" if full else "selective" if light else "none"
    return Exported(" \\\n  ".join([*words, f"activation-checkpoint:{mode}"]), tuple(lost))


def _accelerate(job: Job) -> Exported:
    plan, lost = job.plan, list[str]()
    head: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE", "num_machines": job.nodes, "num_processes": plan.world,
        "mixed_precision": _in_precision(job, {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}, lost) or "no",
    }  # fmt: skip
    if plan.pp > 1 or plan.tp > 1:
        head |= {"distributed_type": "MEGATRON_LM", "megatron_lm_config": _accelerate_megatron(job, lost)}
    elif plan.zero >= 2:
        strategy = "HYBRID_SHARD" if plan.zero_degree else "FULL_SHARD" if plan.zero == 3 else "SHARD_GRAD_OP"
        full = job.recomputed[0] > 0
        head |= {"distributed_type": "FSDP", "fsdp_config": {
            "fsdp_sharding_strategy": strategy, "fsdp_activation_checkpointing": full}}  # fmt: skip
    else:
        head["distributed_type"] = "MULTI_GPU" if plan.dp > 1 else "NO"
        if plan.zero == 1:
            lost.append("zero=1 (its FSDP shards gradients, too)")
    if plan.pp == 1 and plan.tp == 1 and plan.mb > 1:
        lost.append(f"mb={plan.mb} (an option of the launch line: --gradient_accumulation_steps {plan.mb})")
    if len(plan.policies) > 1:
        lost.append("recompute layer by layer")
    return Exported(_yaml(head), tuple(lost))


def _accelerate_megatron(job: Job, lost: list[str]) -> dict[str, object]:
    plan = job.plan
    if plan.schedule != "1f1b":
        lost.append(f"schedule={plan.schedule}")
    if plan.zero > 1:
        lost.append(f"zero={plan.zero} beside tensor parallelism or a pipeline (1 at most)")
    return {
        "megatron_lm_tp_degree": plan.tp, "megatron_lm_pp_degree": plan.pp, "megatron_lm_num_micro_batches": plan.mb,
        "megatron_lm_sequence_parallelism": plan.sequence, "megatron_lm_recompute_activations": any(job.recomputed),
        "megatron_lm_use_distributed_optimizer": plan.zero > 0,
    }  # fmt: skip


def _yaml(mapping: Mapping[str, object], indent: str = "") -> str:
    lines: list[str] = []
    for name, value in mapping.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", _yaml(value, indent + "  ")]  # pyright: ignore[reportUnknownArgumentType]
        else:
            shown = str(value).lower() if isinstance(value, bool) else f"'{value}'" if value == "NO" else str(value)
            lines.append(f"{indent}{name}: {shown}")
    return "\n".join(lines)


FRAMEWORKS: Mapping[str, Callable[[Job], Exported]] = {
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
    "accelerate": _accelerate,
}

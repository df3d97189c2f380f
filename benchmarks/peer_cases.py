"""Who takes part in `peers.py`, with which settings, and on which models: tables, nothing else.

A peer is added by adding its rows. Every peer gets the settings that its own documentation recommends for such models;
all are tried, and the fastest is compared with the fastest of our plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compare_setting import Size
from peer_workers import Entrant

OURS = "Phalanx"
PACKAGES = {  # of peers that are not part of torch; none of them is needed by Phalanx
    "Accelerate": "accelerate", "DeepSpeed ZeRO": "deepspeed", "DeepSpeed pipeline": "deepspeed",
    "torchtitan": "torchtitan", "Megatron-core": "megatron.core",
}  # fmt: skip
LLAMA_ONLY = ("torchtitan",)  # it brings its own models, and GPT-2 is not among them

CPU_SIZES = {
    "gpt2": Size(layers=12, width=768, vocabulary=50257, samples=4, tokens=128),
    "llama": Size(layers=2, width=2048, vocabulary=8192, samples=4, tokens=128),
}
GPU_SIZES = {
    "gpt2": Size(layers=12, width=768, vocabulary=50257, samples=32, tokens=1024),
    "llama": Size(layers=8, width=2048, vocabulary=8192, samples=32, tokens=1024),
}
# Over slow links: a small batch of longer sequences, as many tokens as above. What crosses a link does not shrink with
# the batch where gradients do, and a pipeline has less to fill it with.
LINK_SIZES = {shape: replace(size, samples=2, tokens=256) for shape, size in CPU_SIZES.items()}
TINY_SIZES = {shape: Size(layers=2, width=64, vocabulary=64, samples=4, tokens=8) for shape in CPU_SIZES}
TITLES = {"gpt2": "GPT-2 small's shape", "llama": "Llama-1B's width"}


def entrants(world: int, samples: int, ours: Sequence[str] | None = None) -> list[Entrant]:
    """For a number of ranks; micro-batches of one sample or more, four per stage at most. ours: plans to try instead of
    the usual ones."""
    dp = f"dp={world}"
    pp = f"pp={world},mb={min(samples, 4 * world)}"
    return [
        *(Entrant(OURS, plan, "peer_phalanx.phalanx", plan) for plan in ours or our_plans(dp, pp, samples)),
        *(
            Entrant("DDP", f"{size} MiB buckets", "torch_data_parallel.ddp", dp, {"bucket_mib": size})
            for size in (25, 100)
        ),
        Entrant("FSDP2", "keeping parameters", "torch_data_parallel.fsdp2", dp, {"reshard": False}),
        Entrant("FSDP2", "resharding after forward", "torch_data_parallel.fsdp2", dp, {"reshard": True}),
        Entrant("torch pipelining", "1F1B", "torch_pipeline.pipeline", f"{pp},schedule=1f1b"),
        Entrant("torch pipelining", "interleaved", "torch_pipeline.pipeline", f"{pp},schedule=interleaved,v=2"),
        Entrant("torch pipelining", "zero bubble", "torch_pipeline.pipeline", f"{pp},schedule=zb-h1"),
        Entrant("Accelerate", "DDP", "peer_accelerate.accelerate", dp, {"sharded": False}),
        Entrant("Accelerate", "FSDP2", "peer_accelerate.accelerate", dp, {"sharded": True}),
        *(Entrant("DeepSpeed ZeRO", f"stage {n}", "peer_deepspeed.zero", dp, {"stage": n}) for n in (1, 2, 3)),
        Entrant("DeepSpeed pipeline", "1F1B", "peer_deepspeed.pipeline", f"{pp},schedule=1f1b"),
        Entrant("torchtitan", "FSDP", "peer_torchtitan.fsdp", dp, own_weights=True),
        Entrant("Megatron-core", "data parallel", "peer_megatron.megatron", dp, own_weights=True),
        Entrant("Megatron-core", "pipeline", "peer_megatron.megatron", f"{pp},schedule=1f1b", own_weights=True),
    ]


def our_plans(dp: str, pp: str, samples: int) -> list[str]:
    sliced = [
        f"{pp},schedule={order},slices={n}" for order, n in (("1f1b", 2), ("1f1b", 4), ("zb-h1", 4), ("zb-h1", 8))
    ]
    pipelines = [f"{pp},schedule=1f1b", *sliced]
    return pipelines if samples == 1 else [dp, f"{dp},zero=1", f"{dp},zero=3", f"{pp},schedule=zb-h1", *pipelines]

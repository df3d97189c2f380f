"""What else trains a model that is larger than the device, as its users would write it: candidates of `largest.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from phalanx.model.zoo import zoo

CLIP = 1.0


def hf(spec: Any, batch: dict[str, Any], device: str) -> Callable[[], float]:
    """float32 weights, bfloat16 by autocast, one sample at a time, every layer checkpointed."""
    torch.set_default_device(device)
    model: Any = zoo.build(spec, dtype=torch.float32, attention="sdpa", dropout=0.0)
    torch.set_default_device(None)
    return _step(model, batch, device, torch.autocast(device, torch.bfloat16))


def fsdp2(spec: Any, batch: dict[str, Any], device: str) -> Callable[[], float]:
    """Sharded over a world of one, with everything that is not being computed with on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    with torch.device("meta"):
        model: Any = zoo.build(spec, dtype=torch.float32, attention="sdpa", dropout=0.0)
    rules: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
    }
    for layer in model.model.layers:
        fully_shard(layer, **rules)
    fully_shard(model, **rules)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for own in model.parameters():
            local = own.to_local()
            values = torch.empty(local.shape, device=device)  # a draw of a CPU runs on one thread
            local.copy_(values.uniform_(-0.03, 0.03) if local.dim() > 1 else values.fill_(1.0))
    model.model.rotary_emb = type(model.model.rotary_emb)(config=spec.config).to(device)
    return _step(model, batch, device, None)


def _step(model: nn.Module, batch: dict[str, Any], device: str, cast: Any) -> Callable[[], float]:
    given: Any = model
    given.train()
    given.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(given.parameters(), lr=1e-4, fused=True)
    samples = len(batch["input_ids"])
    rows = [{name: own[i : i + 1].to(device) for name, own in batch.items()} for i in range(samples)]

    def step() -> float:
        total = 0.0
        for fed in rows:
            if cast is None:
                loss = given(**fed).loss / samples
            else:
                with cast:
                    loss = given(**fed).loss / samples
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(given.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step

"""Short runs for tests: tiny models, few steps, nothing printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import phalanx
from phalanx.config import RunConfig
from phalanx.observe.runlog import read_log

SHORT = {"tiny": True, "seq_len": 16, "batch_size": 4, "steps": 3, "progress": "off", "log_every": 1}
# For half precision, whose products many CPUs compute a hundred times slower than others.
HALF = {"seq_len": 8, "batch_size": 2}


def short_run(model: Any, data: Any, out: Path, **options: Any) -> Any:
    """A run of a model by name, shrunk to test size."""
    return phalanx.train(model, data, out=out, **{**SHORT, **options})


def short_config(out: Path, **options: Any) -> RunConfig:
    return RunConfig.create(**{**SHORT, "out": out, **options})


def records(folder: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [record for record in read_log(folder / f"log-rank{rank}.jsonl") if record["kind"] == kind]


def losses(folder: Path, rank: int = 0) -> dict[int, float]:
    """Step → loss as the log tells it; a step that was repeated after a crash must have repeated its loss."""
    found: dict[int, float] = {}
    for record in records(folder, "step", rank):
        assert found.setdefault(record["step"], record["loss"]) == record["loss"], f"step {record['step']} differs"
    return found


def padded_samples(count: int, vocabulary: int, length: int = 12) -> list[dict[str, Tensor]]:
    """Causal-LM samples with different numbers of padding tokens, so that micro-batches hold different counts."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for number in range(count):
        ids = torch.randint(3, vocabulary, (length,), generator=generator)
        mask = (torch.arange(length) < length - number % 7).long()
        ids = torch.where(mask == 1, ids, 0)
        samples.append({"input_ids": ids, "labels": torch.where(mask == 1, ids, -100), "attention_mask": mask})
    return samples


class NoDecay(torch.optim.Optimizer):
    """An optimizer of a user's own that knows nothing but a rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad.sign(), alpha=group["lr"])

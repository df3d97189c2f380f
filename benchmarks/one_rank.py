"""A session of one rank with random weights, without a run around it: what benchmarks of one device time and weigh."""

from __future__ import annotations

from typing import Any

import torch

from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.launch.context import RankContext, local_device
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.zoo import zoo
from phalanx.plan.plan import Plan
from phalanx.session.session import Session
from phalanx.tasks.base import Batch


def captured_model(name: str, dtype: str, tiny: bool = False, **fields: Any) -> tuple[zoo.ModelSpec, Captured]:
    """fields: of the model's configuration, to be changed."""
    spec = zoo.resolve(name, tiny=tiny, overrides=fields)
    inputs = tasks.get(spec.task).inputs(spec.config)
    return spec, capture(spec, inputs, dtype=getattr(torch, dtype), dropout=0.0, check=False)


def open_session(captured: Captured, plan: Plan, device: str, look: Any = None, **options: Any) -> Session:
    """options: of the run."""
    context = RankContext.alone(local_device(device, 0))

    def random_values(name: str, is_master: bool, _: object) -> torch.Tensor:
        values = torch.empty(captured.shapes[name], device=context.device, dtype=torch.float32)
        return values.normal_(0, 0.02) if values.dim() > 1 else values.fill_(1.0)

    return Session.open(
        captured, RunConfig(**options, **{"device": device}), plan, context=context, trainable=captured.trainable,
        read=random_values, look=look,
        buffers={name: buffer.to(context.device) for name, buffer in captured.buffers.items()},
    )  # fmt: skip


def on_device(batch: Batch, device: str) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}

"""The plan side: the case run as a plan, through the same engine, optimizer and step as training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.model.capture import attention_sites, capture
from phalanx.model.captured import Captured
from phalanx.model.ops import random
from phalanx.model.segment.compile import Compiler, resolve_mode
from phalanx.model.weights import init_recipe
from phalanx.model.weights.weights import ModuleWeights, SafetensorsWeights, SeededWeights, Weights
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.plan.plan import Plan
from phalanx.prepare import choose_device
from phalanx.program.expand import expand
from phalanx.program.instructions import Op
from phalanx.runtime.accumulate import Accumulator
from phalanx.runtime.engine import Engine
from phalanx.runtime.optimizer import Optimizer
from phalanx.runtime.optimizer_choice import make_optimizer
from phalanx.runtime.step import Feeder, num_samples, split, total_items, total_loss
from phalanx.verification.case import Case, Execution, Step

_NOISE = 0.05  # added to fresh weights: zeros and ones (biases, norms) would hide errors that multiply or add them


def prepare(case: Case) -> tuple[ModelSpec, Captured, dict[str, Tensor]]:
    """The captured model of a case and its initial values."""
    spec = case.spec()
    inputs = case.task_of(spec).inputs(spec.config, padding=case.padding, documents=case.documents)
    captured = capture(spec, inputs, dtype=case.torch_dtype, dropout=case.dropout, check=False)
    return spec, captured, initial_values(spec, captured, case)


def initial_values(spec: ModelSpec, captured: Captured, case: Case) -> dict[str, Tensor]:
    weights = _weights(spec, case)
    values = {name: weights.read(name, dtype=case.torch_dtype) for name in captured.shapes}
    if isinstance(weights, SeededWeights):
        for name, value in values.items():
            generator = torch.Generator().manual_seed(random.site_hash(name))
            value += _NOISE * torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.dtype)
    return values


def _weights(spec: ModelSpec, case: Case) -> Weights:
    if spec.folder is not None:
        return SafetensorsWeights(spec.folder, build(spec, device="meta"))
    if spec.factory is not None:
        return ModuleWeights(build(spec))
    return SeededWeights(init_recipe.record(lambda: build(spec)), case.seed)


def run_plan(case: Case, spec: ModelSpec, captured: Captured, initial: Mapping[str, Tensor]) -> Execution:
    plan, (device, _) = Plan.parse(case.plan), choose_device(case.device)
    parameters = {name: value.detach().clone().to(device) for name, value in initial.items()}
    engine = Engine(
        captured.blocks, parameters, {name: value.to(device) for name, value in captured.buffers.items()},
        trainable=set(captured.trainable), device=device,
        compiler=Compiler(resolve_mode(case.compile, device)), recompute=plan.recompute,
    )  # fmt: skip
    feeder = Feeder(captured, engine, seed=case.seed, dtype=case.torch_dtype)
    optimizer = _optimizer(case, captured, parameters)
    steps = [
        _step(feeder, optimizer, plan, case, consumed, batch, parameters) for consumed, batch in case.batches(spec)
    ]
    facts, implied = _evidence(engine, plan, case, captured)
    return Execution(steps, facts, implied, attention_sites(captured.blocks))


def _optimizer(case: Case, captured: Captured, parameters: Mapping[str, Tensor]) -> Optimizer:
    weights = {name: parameters[name] for name in captured.trainable}
    training = case.training
    config = RunConfig(lr=training.lr, betas=training.betas, eps=training.eps, weight_decay=training.weight_decay)
    return Optimizer(make_optimizer(weights, config), weights, weights, training.clip)


def _step(
    feeder: Feeder, optimizer: Optimizer, plan: Plan, case: Case,
    consumed: int, batch: dict[str, Tensor], parameters: Mapping[str, Tensor],
) -> Step:  # fmt: skip
    """As `runtime.step.Step`, keeping the gradients for comparison before the optimizer uses them up."""
    parts = feeder.micro_batches(batch, consumed, split(num_samples(batch), plan.mb))
    items, accumulator = total_items(feeder.engine, parts), Accumulator()
    feeder.engine.run(expand(plan), parts, items.reciprocal(), accumulator)
    loss = total_loss(parts) / items
    gradients = accumulator.take(optimizer.weights)
    kept = {name: gradient.to(case.torch_dtype).cpu().clone() for name, gradient in gradients.items()}
    optimizer.step(gradients, case.training.lr, loss)
    return Step(float(loss), kept, {name: value.cpu().clone() for name, value in parameters.items()})


def _evidence(engine: Engine, plan: Plan, case: Case, captured: Captured) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was done, and what the plan says should have been."""
    program = Counter(str(i.op) for _ in range(case.steps) for i in expand(plan) if i.op is not Op.STEP)
    element = torch.finfo(case.torch_dtype).bits // 8
    sizes = [torch.Size(shape).numel() for shape in captured.shapes.values()]
    measured = {
        "instructions": dict(engine.executed),
        "parameter bytes": sum(p.numel() * p.element_size() for p in engine.parameters.values()),
        "only inputs kept for backward": engine.keeps_only_inputs(),
    }
    implied = {
        "instructions": dict(program),
        "parameter bytes": sum(sizes) * element,
        "only inputs kept for backward": plan.recompute,
    }
    return measured, implied

"""After a capture: does the graph give the loss and the gradients of the model it came from?

Checked in float64 on a tiny model of the same architecture (or on the user's own module, if it is small), at two
shapes, one of them padded where the architecture takes padding; the sequence exceeds every sliding window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from phalanx import tasks
from phalanx.errors import CaptureError, ConfigError
from phalanx.model import interpret, reference
from phalanx.model.captured import Captured, attention_sites, dropout_keys
from phalanx.model.ops import random
from phalanx.model.zoo.configure import tiny
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.tasks.base import Input
from phalanx.tasks.vocabulary import most_positions

TOLERANCE = 1e-9
_LARGEST_OWN_MODULE = 50_000_000  # parameters; a larger module of the user's own is checked by `phalanx verify` instead
_SHAPES = ((2, 21, False), (3, 16, True))  # samples, tokens, padded


def self_check(spec: ModelSpec, capture: Callable[[ModelSpec, tuple[Input, ...]], Captured], notes: list[str]) -> None:
    """Raises CaptureError naming the tensor that differs. Adds to `notes` when the check cannot be made."""
    if spec.task not in tasks.TASKS or spec.config is None:
        notes.append("not checked against the plain model after capture: use phalanx.verify(model, data=[batch])")
        return
    small = spec
    if spec.factory is None:
        small = ModelSpec(spec.name, spec.task, tiny(copy.deepcopy(spec.config)), None, None)
    elif sum(p.numel() for p in build(spec, device="meta").parameters()) > _LARGEST_OWN_MODULE:
        notes.append("too large to be checked against the plain model after capture: use phalanx verify")
        return
    task = tasks.get(spec.task)
    for samples, usual_tokens, padding in _SHAPES:
        tokens = min(usual_tokens, most_positions(small.config) or usual_tokens)
        try:
            inputs = task.inputs(small.config, padding=padding)
            batch = task.synthetic(small.config, batch=samples, tokens=tokens, seed=1, padding=padding)
        except ConfigError:
            continue  # the task takes no padding
        _compare(small, capture(small, inputs), batch, task.reference_inputs(batch))


def _compare(spec: ModelSpec, captured: Captured, batch: dict[str, Tensor], raw: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    # A copy: a module that is in float64 already would share its parameters with the user's, and get gradients.
    plain = copy.deepcopy(reference.plain(spec, torch.float64, None if spec.factory else 0.0))
    batch, raw = ({k: v.double() if v.is_floating_point() else v for k, v in b.items()} for b in (batch, raw))
    keys = random.sample_keys(0, 0, next(iter(batch.values())).shape[0])
    # The dropout of a module that somebody built is part of it, so both sides draw the same.
    with reference.injected(plain, keys, attention_sites(captured.blocks), torch.float64):
        expected = reference.loss(plain, raw)
    expected.backward()
    parameters = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in plain.named_parameters()}
    dropout = dropout_keys(captured.blocks, keys)
    dims = captured.dims(batch)
    total, count = interpret.sum_and_count(captured.blocks, parameters, captured.buffers, batch, dims, dropout)
    got = total / count
    got.backward()
    _require_equal("the loss", got.detach(), expected.detach(), float(expected.detach().abs()), spec)
    largest = max(float(p.grad.abs().max()) for p in plain.parameters() if p.grad is not None)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            ours = parameters[name].grad
            _require_equal(
                f"the gradient of '{name}'",
                torch.zeros_like(parameter) if ours is None else ours,
                parameter.grad,
                largest,
                spec,
            )


def _require_equal(what: str, got: Tensor, expected: Tensor, scale: float, spec: ModelSpec) -> None:
    error = float((got - expected).abs().max()) / max(scale, 1e-30)
    if not error <= TOLERANCE:
        raise CaptureError(
            f"the captured graph of '{spec.name}' disagrees with the model: {what} is off by {error:.1e}",
            "this architecture does something the capture does not see; please report it with the model's config.json",
        )

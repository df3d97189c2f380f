"""Before training: does the captured graph give the loss and the gradients of the module it came from?

`prove` asks this of every model on the user's own first batches: the module runs eagerly as it was given (its modes,
hooks and buffers) on two batches, twice each, so that what is kept from one call to the next shows too. In float64, or
in float32 where a module cannot compute in float64. What would take too long is made smaller: fewer layers, two
samples, fewer tokens; an architecture of HuggingFace's is then also checked as a tiny model, on tokens beyond every
sliding window. What was proven is remembered for as long as model, code and batches stay the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules import module as any_module
from transformers import PreTrainedModel

from phalanx import tasks
from phalanx.errors import CaptureError, ConfigError, PhalanxError
from phalanx.expressions import evaluate
from phalanx.model import proofs
from phalanx.model.captured import Captured
from phalanx.model.comparison import FAILURES, Comparison
from phalanx.model.graph import stamp
from phalanx.model.graph.units import find_layers
from phalanx.model.reference import default_dtype
from phalanx.model.zoo.configure import tiny
from phalanx.model.zoo.meta import parameters_on_meta
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.tasks.base import Batch, Input, Task
from phalanx.tasks.vocabulary import most_positions

_SAMPLES = (5, 3)  # of the two batches
_LARGEST_WHOLE = 50_000_000  # parameters; larger models are checked with fewer layers
_MOST_FLOPS = 3e10  # of one of eight passes forward and backward: some seconds
_BYTES_PER_PARAMETER = 40  # values and gradients of both sides in float64, and what comes and goes
_CUTS = ((5, None), (2, None), (2, 256), (2, 48))  # samples and tokens of a batch, until they are affordable
_SHAPES = ((2, 21, False), (3, 16, True))  # samples, tokens, padded

Capture = Callable[[ModelSpec, tuple[Input, ...], torch.dtype], Captured]


def prove(spec: ModelSpec, task: Task, captured: Captured, batches: Sequence[Batch], capture: Capture) -> str:
    """Raises CaptureError that names what differs and why; else says in words what was compared."""
    given = None if spec.factory is None else _given(spec)
    if given is not None:
        refuse_lost_hooks(given, spec.name)
    key = proofs.key(spec, given, captured, batches)
    if (known := proofs.read(key)) is not None:
        return f"{known}, remembered"
    begin = time.perf_counter()
    said = _prove(spec, task, captured, batches, capture)
    said += f", {time.perf_counter() - begin:.1f} s"
    proofs.write(key, said)
    return said


def _given(spec: ModelSpec) -> nn.Module:
    """The module as the user gave it, or as the user's factory makes it, without values."""
    assert spec.factory is not None
    with parameters_on_meta():
        return spec.factory()


def num_samples(captured: Captured, batch_size: int) -> tuple[int, int]:
    """Of the two batches to be checked: few, but as many as take the same branches as a whole batch."""
    first, second = (
        next(n for n in range(min(few, batch_size), batch_size + 1) if _alike(captured, n, batch_size))
        for few in _SAMPLES
    )
    return first, second


def _alike(captured: Captured, some: int, all_: int) -> bool:
    """Whether the module's branches on the number of samples come out the same."""
    return all(_holds(condition, some) == _holds(condition, all_) for condition in captured.blocks.conditions)


def _holds(condition: str, samples: int) -> bool | None:
    """None where the condition has no meaning for so few samples."""
    try:
        return bool(evaluate(condition, {"batch": samples}))
    except ZeroDivisionError:
        return None


def refuse_lost_hooks(module: nn.Module, name: str) -> None:
    """Hooks on gradients would not be called: backwards are graphs of their own, and parameters are not the user's."""
    if any_module._global_backward_hooks or any_module._global_backward_pre_hooks:
        raise CaptureError(
            "a backward hook is registered for all modules, which training would not call",
            "remove the hook (the handle that register_module_full_backward_hook returned has a remove method)",
        )
    for path, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter '{path}' of '{name}' has a hook on its gradient, which training would not call",
                "remove the hook; clip with the option clip, and scale or mask values in forward instead",
            )
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise CaptureError(
                f"module '{path or '<root>'}' ({type(part).__name__}) of '{name}' has a backward hook, which training "
                "would not call",
                "remove the hook (the handle that register_full_backward_hook returned has a remove method)",
            )


def _prove(spec: ModelSpec, task: Task, captured: Captured, batches: Sequence[Batch], capture: Capture) -> str:
    model = build(spec, dtype=torch.float64, device="meta", dropout=None if spec.factory else 0.0)
    whole, depth = _num_parameters(model), ""
    if whole > _LARGEST_WHOLE:
        stamp.truncate(model, find_layers(model))
        depth = " with fewer layers"
    share = _num_parameters(model) / whole
    cut = [_affordable(captured, batch, share) for batch in batches]
    said, needed = [], _BYTES_PER_PARAMETER * _num_parameters(model)
    if (depth or any(a is not b for a, b in zip(cut, batches, strict=True))) and _is_stock(spec):
        self_check(replace(spec, factory=None, folder=None), lambda other, ins: capture(other, ins, torch.float64), [])
        said.append("a tiny model of its architecture")
        if share * _flops(captured, cut[0]) > 2 * _MOST_FLOPS:
            return _said(said)
    if needed > proofs.available_memory() / 2:
        return _said(said or [f"nothing: checking needs {needed / 2**30:.0f} GiB of memory; use phalanx verify"])
    _compare(_with_values(spec, model) if depth else spec, task, captured.inputs, cut, capture)
    samples = " and ".join(str(next(iter(batch.values())).shape[0]) for batch in cut)
    return _said([*said, f"the module{depth} on {samples} samples of the data, twice"])


def _said(compared: Sequence[str]) -> str:
    return "loss and gradients compared with " + " and ".join(compared)


def _flops(captured: Captured, batch: Batch) -> float:
    """Of a pass forward and backward."""
    return 3 * sum(captured.blocks.flops(captured.dims(batch)))


def _num_parameters(model: nn.Module) -> int:
    return max(1, sum(p.numel() for p in model.parameters()))


def _is_stock(spec: ModelSpec) -> bool:
    """Whether the configuration says all about the model's code: not for a subclass of the user's own."""
    if spec.config is None or spec.task not in tasks.TASKS:
        return False
    return spec.factory is None or (
        isinstance(module := _given(spec), PreTrainedModel) and type(module).__module__.startswith("transformers.")
    )


def _affordable(captured: Captured, batch: Batch, share: float) -> Batch:
    """As many of the samples, and where that is too much of the tokens, as can be computed in seconds. share: of the
    model that is computed."""
    ends = {"tokens", "source"}
    found, given = batch, next(iter(batch.values())).shape[0]
    for samples, tokens in _CUTS:
        samples = samples if samples < given and _alike(captured, samples, given) else given
        found = {}
        for spec in captured.inputs:
            rows = [slice(samples), *(slice(tokens if dim in ends else None) for dim in spec.dims[1:])]
            found[spec.name] = batch[spec.name][tuple(rows)]
        if share * _flops(captured, found) <= _MOST_FLOPS:
            break
    changed = any(found[name].shape != tensor.shape for name, tensor in batch.items())
    return found if changed else batch


def _with_values(spec: ModelSpec, model: nn.Module) -> ModelSpec:
    """A model with fewer layers that has no values so far, with those that the user gave, else with random ones."""
    given = {} if spec.factory is None else dict(_given(spec).named_parameters())
    made = {name: value for name, value in given.items() if not value.is_meta}
    generator = torch.Generator().manual_seed(0)
    filled: dict[Tensor, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter not in filled:
                path = next(path for path, p in model.named_parameters() if p is parameter)
                value = made[path].detach().double() if path in made else _random(path, parameter, generator)
                filled[parameter] = nn.Parameter(value.clone(), parameter.requires_grad)
            part._parameters[name] = None if parameter is None else filled[parameter]
    return replace(spec, folder=None, factory=lambda: model)


def _random(path: str, like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    centre = 1.0 if like.dim() == 1 and not path.endswith("bias") else 0.0
    return centre + 0.02 * torch.randn(like.shape, generator=generator, dtype=torch.float64)


def self_check(spec: ModelSpec, capture: Callable[[ModelSpec, tuple[Input, ...]], Captured], notes: list[str]) -> None:
    """An architecture by itself, as a tiny model with random tokens, at two shapes, one of them padded. Raises
    CaptureError naming the tensor that differs; adds to `notes` when the check cannot be made."""
    if spec.task not in tasks.TASKS or spec.config is None or spec.factory is not None:
        notes.append("not checked against the plain model after capture: use phalanx.verify(model, data=[batch])")
        return
    small = ModelSpec(spec.name, spec.task, tiny(copy.deepcopy(spec.config)), None, None)
    task = tasks.get(spec.task)
    for samples, usual_tokens, padding in _SHAPES:
        tokens = min(usual_tokens, most_positions(small.config) or usual_tokens)
        try:
            inputs = task.inputs(small.config, padding=padding)
            batch = task.synthetic(small.config, batch=samples, tokens=tokens, seed=1, padding=padding)
        except ConfigError:
            continue  # the task takes no padding
        Comparison(small, task, capture(small, inputs), torch.float64).require([batch], times=1)


def _compare(
    spec: ModelSpec, task: Task, inputs: tuple[Input, ...], batches: Sequence[Batch], capture: Capture
) -> None:
    """In float64; in float32 where the module makes tensors that it cannot combine with those."""
    try:
        with default_dtype(torch.float64):
            comparison = Comparison(spec, task, capture(spec, inputs, torch.float64), torch.float64)
            comparison.try_out(batches[0])
    except (PhalanxError, *FAILURES):
        Comparison(spec, task, capture(spec, inputs, torch.float32), torch.float32).require(batches, times=2)
        return
    with default_dtype(torch.float64):
        comparison.require(batches, times=2)

"""Is the loss of a batch the loss of its parts together? Only then may a plan cut batches.

Asked of modules of the user's own, by computing both: no list of operators could name every way in which samples can
depend on each other. In float64 and without dropout, on the user's first samples. The zoo is known to be fine.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from phalanx.errors import PlanError
from phalanx.model import interpret
from phalanx.model.captured import Captured
from phalanx.model.graph.normalise import widen, without_dropout
from phalanx.model.zoo.zoo import ModelSpec, build

aten = torch.ops.aten

NUM_SAMPLES = 5  # cut into three and two, because many modules treat a single sample in another way
_TOLERANCE, _SMALLEST = 1e-9, 1e-12  # relative; and of losses that are zero but for rounding
_LARGEST_MODULE, _MOST_FLOPS = 200_000_000, 1e12  # parameters, and operations: half a minute on a few cores
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_PRODUCTS = (aten.linear.default, aten.matmul.default)
_NOISE = 0.05  # of a parameter's size: zeros and ones in fresh weights would hide what they multiply

Values = Mapping[str, Tensor]


class Losses(NamedTuple):
    """The mean loss of a batch, computed as a whole and in two parts; not a number where a part cannot be computed."""

    whole: float
    parts: float

    @property
    def agree(self) -> bool:
        return math.isclose(self.whole, self.parts, rel_tol=_TOLERANCE, abs_tol=_SMALLEST)


def require_separable(spec: ModelSpec, captured: Captured, batch: Values, plan: str) -> Captured:
    """Refuses a module whose samples depend on each other. One that cannot be tried gets a note."""
    if not _is_affordable(captured, batch):
        return _with_note(captured, "too large to be tried")
    found = _losses(spec, captured, batch)
    if found is None:
        return _with_note(captured, "no finite loss to compare")
    if not found.agree:
        num_samples = next(iter(batch.values())).shape[0]
        raise PlanError(
            f"the samples of a batch depend on each other in '{spec.name}': {num_samples} of them have the loss "
            f"{found.whole:.6g} together and {found.parts:.6g} in two parts, so that micro-batches or replicas "
            f"(plan {plan}) would change the result",
            "use a plan that does not cut the batch (mb=1,dp=1), or compute every sample by itself: "
            "no statistics, attention or comparisons over the batch",
        )
    return captured


def _with_note(captured: Captured, reason: str) -> Captured:
    note = f"not checked for samples that depend on each other ({reason}): use phalanx verify, or plan mb=1,dp=1"
    return replace(captured, notes=(*captured.notes, note))


def _is_affordable(captured: Captured, batch: Values) -> bool:
    num_parameters = sum(math.prod(shape) for shape in captured.shapes.values())
    flops = 2 * sum(captured.blocks.flops(captured.dims(dict(batch))))
    return num_parameters <= _LARGEST_MODULE and flops <= _MOST_FLOPS


def _losses(spec: ModelSpec, captured: Captured, batch: Values) -> Losses | None:
    """With changed samples and weights, because equal samples and zero weights would hide what samples share; as they
    are where the module cannot compute the changed ones; None where it cannot compute these either."""
    generator = torch.Generator().manual_seed(0)
    parameters, batch = _initial(spec), _widened(batch)
    changed = {name: _varied(tensor, generator) for name, tensor in batch.items()}
    noised = {name: _noised(value, generator) for name, value in parameters.items()}
    captured = replace(
        captured,
        blocks=replace(captured.blocks, constants=_widened(captured.blocks.constants)),
        buffers=_widened(captured.buffers),
    )
    for values, samples in ((noised, changed), (parameters, batch)):
        found = _compared(lambda part, values=values: _sum_and_count(captured, values, part), samples)
        if found is not None:
            return found
    return None


def _compared(compute: Callable[[Values], tuple[float, float]], batch: Values) -> Losses | None:
    """None where the whole has no finite loss, which says nothing about its samples."""
    first = (next(iter(batch.values())).shape[0] + 1) // 2
    try:
        total, count = compute(batch)
    except (RuntimeError, IndexError, ValueError):
        return None
    if not math.isfinite(total) or not count:
        return None
    try:
        parts = [compute({name: t[rows] for name, t in batch.items()}) for rows in (slice(first), slice(first, None))]
    except (RuntimeError, IndexError, ValueError):
        return Losses(total / count, math.nan)
    return Losses(total / count, sum(part[0] for part in parts) / max(1.0, sum(part[1] for part in parts)))


@torch.no_grad()
def _sum_and_count(captured: Captured, parameters: Values, batch: Values) -> tuple[float, float]:
    blocks, dims = captured.blocks, captured.dims(dict(batch))
    unused = {name: torch.empty(0) for block in blocks.blocks for name in block.names("dropout")}
    with _by_default(torch.float64):
        total, count = interpret.sum_and_count(blocks, parameters, captured.buffers, batch, dims, unused, change=_exact)
    return float(total), float(count)


@contextlib.contextmanager
def _by_default(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that a graph makes without saying of what dtype are of this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _exact(graph: fx.Graph) -> None:
    without_dropout(graph)
    widen(graph, _NARROW)
    for node in list(graph.nodes):
        if node.target in _PRODUCTS:  # of tensors with gaps torch has only a very slow one in float64
            with graph.inserting_before(node):
                node.update_arg(0, graph.call_function(aten.contiguous.default, (node.args[0],)))


def _initial(spec: ModelSpec) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):  # a factory draws its weights
        torch.manual_seed(0)
        model = build(spec, dtype=torch.float64)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _widened(tensors: Values) -> dict[str, Tensor]:
    return {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}


def _varied(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Other samples within the range of these: numbers get smaller, integers change places where all rows are alike."""
    if tensor.is_floating_point():
        factors = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) / 2 + 0.5
        return factors * tensor if tensor.any() else factors
    if (tensor == tensor[:1]).all():
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)
    return tensor


def _noised(value: Tensor, generator: torch.Generator) -> Tensor:
    if not value.is_floating_point():
        return value
    size = float(value.square().mean().sqrt()) or 1.0
    return value + _NOISE * size * torch.randn(value.shape, generator=generator, dtype=value.dtype)

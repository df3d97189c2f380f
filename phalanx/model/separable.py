"""Is the loss of a batch the loss of its parts together? Only then may a plan cut batches.

Asked of modules of the user's own, by computing loss and gradients of both: no list of operators could name every way
in which samples can depend on each other. In float64 and without dropout, on those of the user's first samples that
differ most. The zoo is known to be fine, but for losses that are no means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from phalanx.errors import PlanError
from phalanx.model import interpret
from phalanx.model.captured import Captured
from phalanx.model.graph.losses import NOT_KNOWN
from phalanx.model.graph.normalise import widen, without_dropout
from phalanx.model.reference import default_dtype
from phalanx.model.zoo.zoo import ModelSpec, build

aten = torch.ops.aten

NUM_CANDIDATES = 32  # samples, of which the most different are tried
_NUM_SAMPLES = 7  # cut into four and three, because many modules treat a single sample in another way
_TOLERANCE, _SMALLEST = 1e-9, 1e-12  # relative; and of losses that are zero but for rounding
_LARGEST_MODULE, _MOST_FLOPS = 200_000_000, 1e12  # parameters, and operations: half a minute on a few cores
_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_PRODUCTS = (aten.linear.default, aten.matmul.default)
_NOISE = 0.05  # of a parameter's size: zeros and ones in fresh weights would hide what they multiply

Values = Mapping[str, Tensor]


class Found(NamedTuple):
    """A batch computed as a whole and in two parts. A part that cannot be computed has a loss that is not a number."""

    whole: float  # the mean loss
    parts: float
    alone: float  # the losses of the parts, added
    gradient: str  # the name of the parameter whose gradient differs most, where one does

    @property
    def agree(self) -> bool:
        return _is_close(self.whole, self.parts) and not self.gradient


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_SMALLEST)


def require_separable(spec: ModelSpec, captured: Captured, candidates: Values, batch_size: int, plan: str) -> Captured:
    """Refuses a module whose samples depend on each other. One that cannot be tried gets a note, or is refused where
    nothing is known about its loss."""
    require_labels(captured, candidates, plan)
    batch = _most_different(candidates, min(batch_size, _NUM_SAMPLES))
    found, reason = None, "too large to be tried"
    if _is_affordable(captured, batch):
        found, reason = _try(spec, captured, batch), "no finite loss to compare"
    if found is None and captured.blocks.assumed and spec.factory is None:
        raise PlanError(
            f"{captured.blocks.assumed}, so that micro-batches or replicas (plan {plan}) may change the result",
            "use a plan that does not cut the batch (mb=1,dp=1)",
        )
    if found is None:
        return _with_note(captured, reason)
    if found.agree:
        return captured
    num_samples = next(iter(batch.values())).shape[0]
    if _is_close(found.whole, found.alone) and captured.blocks.assumed:
        raise PlanError(
            f"the loss of '{spec.name}' is a sum over samples, not a mean, so that micro-batches or replicas "
            f"(plan {plan}) would change the result",
            "divide the loss by the number of samples or tokens, or use a plan that does not cut the batch (mb=1,dp=1)",
        )
    what = f"the loss {found.whole:.6g} together and {found.parts:.6g} in two parts"
    if found.gradient and _is_close(found.whole, found.parts):
        what = f"another gradient of '{found.gradient}' together than in two parts"
    raise PlanError(
        f"the samples of a batch depend on each other in '{spec.name}': {num_samples} of them have {what}, so that "
        f"micro-batches or replicas (plan {plan}) would change the result"
        + (f" ({captured.blocks.assumed})" if captured.blocks.assumed else ""),
        "use a plan that does not cut the batch (mb=1,dp=1), or compute every sample by itself: "
        "no statistics, attention or comparisons over the batch",
    )


def require_labels(captured: Captured, batch: Values, plan: str) -> None:
    """Where means over labels and over other items are added, parts of a batch add up only if no label is ignored. A
    batch without them is refused where it is used."""
    for name, ignored in captured.blocks.never_ignored:
        if (name, ignored) == NOT_KNOWN or (name in batch and bool((batch[name] == ignored).any())):
            what = f"some of '{name}' are {ignored}, and so ignored" if name else "nothing is known about their number"
            raise PlanError(
                f"{captured.blocks.assumed}: {what}, so that micro-batches or replicas (plan {plan}) would change the "
                "result",
                "use a plan that does not cut the batch (mb=1,dp=1), or divide all terms of the loss by one number",
            )


def _most_different(batch: Values, count: int) -> dict[str, Tensor]:
    """Those with the fewest entries above zero, then those with the most: what is padded, masked or ignored differs
    between the parts then."""
    entries = sum((t > 0).flatten(1).sum(1) if t.dim() > 1 else (t > 0).long() for t in batch.values())
    assert isinstance(entries, Tensor)
    order = entries.argsort(stable=True)
    last = count // 2
    rows = torch.cat([order[: count - last], order[len(order) - last :]]) if len(order) > count else order
    return {name: tensor[rows] for name, tensor in batch.items()}


def _with_note(captured: Captured, reason: str) -> Captured:
    note = f"not checked for samples that depend on each other ({reason}): use phalanx verify, or plan mb=1,dp=1"
    return replace(captured, notes=(*captured.notes, note))


def _is_affordable(captured: Captured, batch: Values) -> bool:
    num_parameters = sum(math.prod(shape) for shape in captured.shapes.values())
    flops = 2 * sum(captured.blocks.flops(captured.dims(dict(batch))))
    return num_parameters <= _LARGEST_MODULE and flops <= _MOST_FLOPS


def _try(spec: ModelSpec, captured: Captured, batch: Values) -> Found | None:
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
        found = _compared(lambda part, values=values: _computed(captured, values, part), samples)
        if found is not None:
            return found
    return None


class Computed(NamedTuple):
    """What a graph gives for some samples."""

    total: float
    count: float
    gradients: dict[str, Tensor]  # of the total


def _compared(compute: Callable[[Values], Computed], batch: Values) -> Found | None:
    """None where the whole has no finite loss, which says nothing about its samples."""
    first = (next(iter(batch.values())).shape[0] + 1) // 2
    try:
        whole = compute(batch)
    except (RuntimeError, IndexError, ValueError):
        return None
    if not math.isfinite(whole.total) or not whole.count:
        return None
    loss = whole.total / whole.count
    try:
        parts = [compute({name: t[rows] for name, t in batch.items()}) for rows in (slice(first), slice(first, None))]
    except (RuntimeError, IndexError, ValueError):
        return Found(loss, math.nan, math.nan, "")
    count = sum(part.count for part in parts)
    alone = sum(part.total / part.count if part.count else 0.0 for part in parts)
    return Found(loss, sum(part.total for part in parts) / (count or math.nan), alone, _different(whole, parts))


def _different(whole: Computed, parts: Sequence[Computed]) -> str:
    """The parameter whose gradient is another one in parts, if there is one."""
    count, worst, name = sum(part.count for part in parts) or math.nan, 0.0, ""
    largest = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0) / whole.count
    for key, gradient in whole.gradients.items():
        together = sum(part.gradients[key] for part in parts) / count
        error = float((gradient / whole.count - together).abs().max()) if gradient.numel() else 0.0
        if error > max(worst, _TOLERANCE * largest, _SMALLEST):
            worst, name = error, key
    return name


def _computed(captured: Captured, parameters: Values, batch: Values) -> Computed:
    blocks, dims = captured.blocks, captured.dims(dict(batch))
    unused = {name: torch.empty(0) for block in blocks.blocks for name in block.names("dropout")}
    leaves = {n: p.detach().requires_grad_(n in captured.trainable) for n, p in parameters.items()}
    with default_dtype(torch.float64):
        total, count = interpret.sum_and_count(blocks, leaves, captured.buffers, batch, dims, unused, change=_exact)
        if total.requires_grad:
            total.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in leaves.items() if p.requires_grad}
    return Computed(float(total.detach()), float(count), gradients)


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

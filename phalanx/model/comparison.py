"""A module run eagerly beside its captured graph: loss and every gradient, and what a call leaves behind.

What differs is named by parameter and module, with the likely cause: a graph holds neither backwards of the user's own
nor hooks on tensors, nor what a module keeps from one call to the next.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.errors import CaptureError
from phalanx.model import interpret, reference
from phalanx.model.captured import Captured, attention_sites, dropout_keys
from phalanx.model.graph import hooks
from phalanx.model.ops import random
from phalanx.model.proofs import attributes_of
from phalanx.model.zoo.zoo import ModelSpec
from phalanx.tasks.base import Batch, Task

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}  # of the largest gradient
FAILURES = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)  # of a module on samples

Computed = tuple[Tensor, dict[str, Tensor]]  # the loss and the gradients of parameters


class Comparison:
    """A plain module with values of its own, and its captured graph."""

    def __init__(self, spec: ModelSpec, task: Task, captured: Captured, dtype: torch.dtype) -> None:
        self.is_named = spec.factory is None
        self.name, self.task, self.captured, self.dtype = spec.name, task, captured, dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            # A copy: a module of this dtype would share its parameters with the user's, and get gradients.
            self.plain = copy.deepcopy(reference.plain(spec, dtype, None if spec.factory else 0.0))

    def require(self, batches: Sequence[Batch], times: int) -> None:
        before = State(self.plain)
        for call in range(times * len(batches)):
            batch = self._converted(batches[call % len(batches)])
            theirs = self._tried(self._eager, batch, "the module")
            before.require_unchanged(self.plain, self.name)
            if theirs[0].isfinite().all():  # otherwise there is nothing to compare, and the run will say so
                ours = self._tried(self._interpreted, batch, "the captured graph")
                self._require_equal(ours, theirs, batch, before)

    def _tried(self, compute: Callable[[Batch], Computed], batch: Batch, side: str) -> Computed:
        try:
            return compute(batch)
        except FAILURES as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CaptureError(
                f"{side} of '{self.name}' fails on the first samples of the data: {reason}",
                "call the module with a batch of the data to see where, and whether sizes and values fit it",
            ) from error

    def try_out(self, batch: Batch) -> None:
        """On a copy of the module, whose state stays as it was given."""
        plain, self.plain = self.plain, copy.deepcopy(self.plain)
        try:
            with contextlib.suppress(CaptureError):
                self._eager(self._converted(batch))
        finally:
            self.plain = plain

    def _converted(self, batch: Batch) -> Batch:
        return {name: t.to(self.dtype) if t.is_floating_point() else t for name, t in batch.items()}

    def _eager(self, batch: Batch) -> Computed:
        self.plain.zero_grad(set_to_none=True)
        sites = attention_sites(self.captured.blocks)
        # Dropout is part of a module that somebody built, so both sides draw the same.
        with hooks.no_checkpointing(), reference.injected(self.plain, _keys(batch), sites, self.dtype):
            loss = reference.loss(self.plain, self.task.reference_inputs(batch))
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise CaptureError(
                f"the loss of '{self.name}' has no gradient, so nothing would be trained",
                "compute the loss without torch.no_grad(), detach() or .item()",
            )
        loss.backward()
        return loss, {n: p.grad.to_dense() for n, p in self.plain.named_parameters() if p.grad is not None}

    def _interpreted(self, batch: Batch) -> Computed:
        captured = self.captured
        leaves = {n: p.detach().requires_grad_(p.requires_grad) for n, p in self.plain.named_parameters()}
        dropout = dropout_keys(captured.blocks, _keys(batch))
        dims = captured.dims(batch)
        total, count = interpret.sum_and_count(captured.blocks, leaves, captured.buffers, batch, dims, dropout)
        loss = total / count
        if loss.requires_grad:
            loss.backward()
        return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def _require_equal(
        self,
        ours: Computed,
        theirs: Computed,
        batch: Batch,
        before: State,
    ) -> None:
        largest = max((float(gradient.abs().max()) for gradient in theirs[1].values() if gradient.numel()), default=0.0)
        errors = {"the loss": _error(ours[0], theirs[0].detach(), float(theirs[0].detach().abs()))}
        for name in {**theirs[1], **ours[1]}:
            module, _, _ = name.rpartition(".")
            kind = type(self.plain.get_submodule(module)).__name__
            what = f"the gradient of '{name}' (module '{module or '<root>'}', {kind})"
            errors[what] = _error(ours[1].get(name), theirs[1].get(name), largest)
        wrong = {what: error for what, error in errors.items() if not error <= TOLERANCES[self.dtype]}
        if not wrong:
            return
        what = "the loss" if "the loss" in wrong else max(wrong, key=lambda name: wrong[name])
        more = f", as are {len(wrong) - 1} other tensors" if len(wrong) > 1 else ""
        raise CaptureError(
            f"the captured graph of '{self.name}' disagrees with the model: {what} is off by {wrong[what]:.1e}{more}",
            self._cause(theirs[0], batch, before),
        )

    def _cause(self, loss: Tensor, batch: Batch, before: State) -> str:
        if functions := _own_functions(loss):
            return (
                f"{', '.join(functions)}: an autograd.Function with a backward of its own is read by its forward only; "
                "write forward so that its ordinary derivative is the one you want (x + (y - x).detach())"
            )
        again, _ = self._eager(batch)
        if float(again.detach()) != float(loss.detach()):
            kept = before.changed_attributes(self.plain)
            return (
                "forward gives another loss when it is called again with the same batch: it keeps state between calls"
                + (f" ({', '.join(kept)})" if kept else " outside of the module, or draws random numbers of its own")
                + "; a step must depend on its batch and on parameters alone"
            )
        if self.is_named:
            return "please report it with the model's config.json: the capture misses something of this architecture"
        mask = batch.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not bool(mask[:, 0].all()):
            return (
                "samples begin with padding: what attention gives a token that sees none is not the same in all of its "
                "implementations; pad on the right (tokenizer.padding_side = 'right'), or let no label be predicted "
                "from padding (-100 for the first token, too)"
            )
        if self.captured.blocks.conditions:
            return (
                "forward takes another branch for this number of samples than the graph, for which "
                f"{' and '.join(self.captured.blocks.conditions)} holds; compute every number of samples alike"
            )
        return (
            "forward does something that a graph of it does not hold, such as a hook on a tensor (register_hook), a "
            "change of .data, or Python code whose outcome depends on the values or the number of the samples"
        )


class State:
    """What a module's forward must leave as it is."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = _tensors_of(module)
        self._attributes = attributes_of(module)

    def require_unchanged(self, module: nn.Module, name: str) -> None:
        now = _tensors_of(module)
        for what, mark in self._tensors.items():
            if now.get(what) != mark:
                raise CaptureError(
                    f"the forward pass of '{name}' changes {what}, which training would not repeat",
                    "keep running state out of the module, and let forward leave parameters and buffers as they are",
                )

    def changed_attributes(self, module: nn.Module) -> list[str]:
        now = attributes_of(module)
        return [what for what, shown in now.items() if self._attributes.get(what) != shown][:3]


def _keys(batch: Mapping[str, Tensor]) -> Tensor:
    return random.sample_keys(0, 0, next(iter(batch.values())).shape[0])


def _error(ours: Tensor | None, theirs: Tensor | None, scale: float) -> float:
    """The largest difference, as a share of `scale`; no gradient is one of zeros."""
    present = ours if ours is not None else theirs
    assert present is not None
    zero = torch.zeros((), dtype=present.dtype)
    ours, theirs = (zero if side is None else side for side in (ours, theirs))
    return float((ours - theirs).abs().max()) / max(scale, 1e-30) if present.numel() else 0.0


def _tensors_of(module: nn.Module) -> dict[str, str]:
    """Every parameter and buffer → a mark that changes with its values and whether it is trained."""
    named = [(f"parameter '{n}'", p) for n, p in module.named_parameters()]
    named += [(f"buffer '{n}'", b) for n, b in module.named_buffers()]
    return {name: f"{tensor.requires_grad} {_sums(tensor.detach())}" for name, tensor in named}


def _sums(tensor: Tensor) -> tuple[float, ...]:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    wide = tensor.double().flatten()
    return float(wide.sum()), float(wide.square().sum()), *wide[:3].tolist()


def _own_functions(loss: Tensor) -> list[str]:
    """Names of the autograd.Functions of the user's own that a loss was computed by."""
    found: dict[str, None] = {}
    seen: set[object] = set()
    stack: list[Any] = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found[type(node).__name__.removesuffix("Backward")] = None
        stack.extend(source for source, _ in node.next_functions)
    return list(found)

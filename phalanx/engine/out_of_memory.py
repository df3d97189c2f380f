"""Running out of memory, told as what was tried and what would need less. Predicting memory is the planner's work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phalanx.errors import PhalanxError
from phalanx.plan.plan import Plan


@contextmanager
def explain_out_of_memory(what: str, hints: list[str], device: torch.device) -> Iterator[None]:
    """Within it, memory running out is an error that names `what` did not fit and offers `hints`."""
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        first_line = str(error).splitlines()[0]
        raise PhalanxError(f"{what} in the memory of {device}: {first_line}", "; or ".join(hints)) from error


def step_needs(plan: Plan, batch_size: int) -> tuple[str, list[str]]:
    """What does not fit when a step runs out of memory, and which plans need less."""
    part = math.ceil(batch_size / plan.dp)
    largest = math.ceil(part / plan.mb)
    samples = "1 sample" if largest == 1 else f"{largest} samples"
    what = f"a micro-batch of {samples} (batch_size {batch_size}, plan {plan.shown}) does not fit"
    hints: list[str] = []
    if plan.mb < part:
        more = min(2 * plan.mb, part)
        if part % (more * plan.multiple) == 0 or plan.multiple == 1:
            hints.append(f"cut the batch into more micro-batches (plan mb={more})")
    if plan.schedule == "gpipe" and plan.mb > 1:
        hints.append("keep one micro-batch's activations at a time (plan schedule=1f1b)")
    if "none" in plan.policies:
        hints.append("keep less for the backward (plan recompute=light, or recompute=block for the least)")
    elif "light" in plan.policies:
        hints.append("keep less for the backward (plan recompute=block)")
    if plan.dp > 1 and plan.zero < 3:
        hints.append(f"share what replicas keep (plan zero={plan.zero + 1})")
    return what, hints or ["use a shorter seq_len, dtype=bfloat16, or a smaller model"]


def model_needs(dtype: str) -> tuple[str, list[str]]:
    """The same for the time before the first step."""
    hints = ["use a smaller model"] if dtype == "bfloat16" else ["use dtype=bfloat16", "use a smaller model"]
    return f"the model's parameters in {dtype} do not fit", hints


# What libraries say that have no error class for it: the CPU's allocator, cuBLAS, cuDNN, NCCL, compiled kernels.
_SIGNS = ("DefaultCPUAllocator", "ALLOC_FAILED", "out of memory", "Cuda failure 2 ")


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Compilers and libraries wrap what happened to them."""
    if error is None:
        return False
    found = isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SIGNS)
    return found or _is_out_of_memory(error.__cause__)

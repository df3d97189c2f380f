"""Running out of memory, told as what was tried and what would need less. Predicting memory is the planner's work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from phalanx.errors import PhalanxError
from phalanx.plan.plan import Plan


@contextmanager
def explain_out_of_memory(plan: Plan, batch_size: int, device: torch.device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        largest = math.ceil(batch_size / plan.mb)
        plural = "sample" if largest == 1 else "samples"
        raise PhalanxError(
            f"a micro-batch of {largest} {plural} does not fit in the memory of {device} "
            f"(batch_size {batch_size}, plan {plan.text or 'mb=1'}): {str(error).splitlines()[0]}",
            "; or ".join(_smaller(plan, batch_size)),
        ) from error


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU's allocator has no error class of its own.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _smaller(plan: Plan, batch_size: int) -> list[str]:
    steps: list[str] = []
    if plan.mb < batch_size:
        steps.append(f"cut the batch into more micro-batches (plan mb={min(2 * plan.mb, batch_size)})")
    if plan.schedule == "gpipe" and plan.mb > 1:
        steps.append("keep one micro-batch's activations at a time (plan schedule=1f1b)")
    if not plan.recompute:
        steps.append("keep less for the backward (plan recompute=yes)")
    return steps or ["use a shorter seq_len, dtype=bfloat16, or a smaller model"]

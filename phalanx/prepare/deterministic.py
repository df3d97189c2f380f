"""What a deterministic run asks of kernels, and which differences between plans change bits all the same.

Sums are exact by the plan (`sums=exact`) and micro-batches have a fixed size (`plan/complete.py`). What is left: the
same kernel on the same samples must always round alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.config import RunConfig
from phalanx.errors import ConfigError
from phalanx.plan.plan import Plan

# By these the tensors that kernels see have other shapes.
_SHAPING = ("tp", "degrees", "sequence", "replicate", "slices", "halves")
_WORDS = {"halves": "overlap"}


def changes_bits(old: Plan, new: Plan) -> tuple[str, ...]:
    """The fields by which two plans round differently, even in a deterministic run."""
    return tuple(_WORDS.get(name, name) for name in _SHAPING if getattr(old, name) != getattr(new, name))


@contextmanager
def fixed_kernels(config: RunConfig, device: torch.device | str) -> Iterator[None]:
    """While a deterministic run lasts, kernels of the same shapes on the same numbers give the same bits."""
    if not config.deterministic:
        yield
    elif torch.device(device).type == "cpu":
        with _one_thread():
            yield
    else:
        with _deterministic_algorithms():
            yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Each thread adds up a part of its own, and how many there are follows from the number of ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """As torch knows them; where it knows none for what a model computes, the run ends and says so."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).partition(",")[0]
        raise ConfigError(
            f"option deterministic cannot be kept on this device: {reason}",
            "train on CPUs (--device cpu), or without --deterministic",
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled

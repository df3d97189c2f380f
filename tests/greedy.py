"""An optimizer for which memory does not suffice, for tests of plans that give way to others.

TEST_GREEDY says for whose files, in which moment, how often, and after how many such moments of a process.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.run_helpers import NoDecay


class Greedy(NoDecay):
    """Memory runs out on one of the ranks, in the moments that the environment names, as often as it says."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        if sum(own.numel() for group in self.param_groups for own in group["params"]) > 1000:  # else it is looked at
            _run_out("state")

    def step(self, closure: Any = None) -> None:
        if sum(own.numel() for group in self.param_groups for own in group["params"]) > 1000:
            _run_out("step")
        super().step()


def _run_out(moment: str) -> None:
    """Whoever makes one of the files first."""
    folder, when, times, *after = os.environ["TEST_GREEDY"].split(",")
    _passed[moment] += 1
    if when != moment or _passed[moment] <= sum(map(int, after)):
        return
    for number in range(int(times)):
        with contextlib.suppress(FileExistsError), (Path(folder) / f"greedy-{number}").open("x"):
            raise torch.OutOfMemoryError("CUDA out of memory.")


_passed = Counter[str]()

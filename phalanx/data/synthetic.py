"""Synthetic data: random samples that are valid for any task, made when they are asked for.

For measuring and testing; a model learns nothing from it but the label it predicts most often.
"""

from __future__ import annotations

import torch

from phalanx.data.noise import keys
from phalanx.data.samples import Indices, Request, Samples
from phalanx.errors import DataError
from phalanx.tasks.base import Batch

_NUM_SAMPLES = 10_000


def is_synthetic(data: object) -> bool:
    return isinstance(data, str) and data.split(":")[0] == "synthetic"


class SyntheticSamples(Samples):
    """Sample i is a function of (seed, i)."""

    padding = False

    def __init__(self, data: str, request: Request) -> None:
        self.num_samples = _num_samples(data)
        self.documents = request.documents
        self.description = "synthetic"
        self._request = request

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        request = self._request
        rows = [
            request.task.synthetic(
                request.config, batch=1, tokens=request.tokens, seed=key, documents=request.documents
            )
            for key in keys(request.seed, indices)
        ]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _num_samples(data: str) -> int:
    _, colon, number = data.partition(":")
    if not colon:
        return _NUM_SAMPLES
    if not number.isdecimal() or int(number) < 1:
        raise DataError(f"data {data!r} does not say how many samples", "write e.g. synthetic:1000, or only synthetic")
    return int(number)

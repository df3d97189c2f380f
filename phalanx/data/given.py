"""A batch that the user hands over, as samples: for what asks for samples of its own, as checks and evaluations do."""

from __future__ import annotations

import torch

from phalanx.data.batches import Batches
from phalanx.data.samples import Indices, Samples
from phalanx.tasks.base import Batch, Task


class GivenSamples(Samples):
    """The rows of one batch."""

    def __init__(self, batch: Batch) -> None:
        self.num_samples = next(iter(batch.values())).shape[0]
        self.description = "batches handed over by a loop of your own"
        self.padding, self.documents = "attention_mask" in batch, "document_ids" in batch
        self._batch = batch

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        rows = torch.from_numpy(indices)
        return {name: tensor[rows.to(tensor.device)] for name, tensor in self._batch.items()}


def given_batches(batch: Batch, task: Task) -> Batches:
    return Batches(GivenSamples(batch), task, tokens=1, seed=0, shuffle=False)

"""Which samples of a micro-batch a rank sees, where a tensor-parallel group divides them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SampleShard:
    """The samples of a micro-batch that a unit of smaller tensor degree sees on this rank."""

    index: int
    count: int

    def of(self, samples: int) -> slice:
        assert samples % self.count == 0, f"{samples} samples cannot be divided into {self.count} parts"
        size = samples // self.count
        return slice(self.index * size, (self.index + 1) * size)

"""What of a batch is data: padding is computed for nothing, and so is what the last batch of an epoch sees again.

Where a range of batches may be planned for, both decide which of them is best. What a batch's size does to the loss is
not weighed.
"""

from __future__ import annotations

from dataclasses import dataclass

WORTH_SAYING = 0.005  # of what is computed or cut off: a length that wastes less by less is not worth a word


@dataclass(frozen=True)
class DataUse:
    """samples: of an epoch; None of a stream. tokens: of a sample. padding: of the tokens of a batch, the share that is
    none of the data's. best_tokens, best_padding, best_cut: the length that wastes least, and what it does."""

    name: str
    samples: int | None
    tokens: int
    padding: float
    cut: float = 0.0
    best_tokens: int = 0
    best_padding: float = 0.0
    best_cut: float = 0.0

    def steps(self, batch: int) -> int | None:
        """Of an epoch: the fewest that see all of it, as `phalanx train` counts them."""
        return None if self.samples is None else -(-self.samples // batch)

    def repeated(self, batch: int) -> int:
        """Samples that the last batch of an epoch sees for the second time."""
        return 0 if self.samples is None else -self.samples % batch

    def useful(self, batch: int) -> float:
        """Of the tokens that an epoch computes, the share that is new data."""
        whole = 1.0 if self.samples is None else self.samples / (self.samples + self.repeated(batch))
        return (1 - self.padding) * whole


def useful_share(data: DataUse | None, batch: int) -> float:
    return 1.0 if data is None else data.useful(batch)


def batches_between(first: int, last: int, data: DataUse | None) -> list[int]:
    """Numbers of samples that are looked at: each twice the one before, and the largest. Of an epoch that is known,
    none is larger; beside each stands the smallest that needs no more steps, which repeats least."""
    most = last if data is None or data.samples is None else max(first, min(last, data.samples))
    found = {most}
    batch = first
    while batch < most:
        found.add(batch)
        batch *= 2
    if data is not None and data.samples is not None:
        steps = {data.steps(own) or 1 for own in found}
        found |= {fewest for count in steps if first <= (fewest := -(-data.samples // count)) <= most}
    return sorted(found)

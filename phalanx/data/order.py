"""The order in which samples are visited: a pure function of (seed, stream position).

Each epoch is a permutation of the samples that is never materialised: a Feistel network permutes a power of two, and
values outside the data are walked along their cycle until they fall inside. Resuming costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phalanx.data.noise import UInts, mix

_ROUNDS = 8


class Order:
    """Stream position → sample index; every sample exactly once per epoch."""

    def __init__(self, seed: int, num_samples: int, shuffle: bool = True) -> None:
        assert num_samples > 0, "an order needs samples"
        self.seed = seed
        self.num_samples = num_samples
        self.shuffle = shuffle

    def index(self, position: int) -> int:
        return int(self.indices(position, 1)[0])

    def indices(self, first: int, count: int) -> NDArray[np.int64]:
        """The sample indices at stream positions [first, first + count)."""
        positions = np.arange(first, first + count, dtype=np.int64)
        epochs, places = np.divmod(positions, self.num_samples)
        if self.shuffle:
            places = _permute(places.astype(np.uint64), self.num_samples, self.seed, epochs)
        return places.astype(np.int64)


def _permute(places: UInts, size: int, seed: int, epochs: NDArray[np.int64]) -> UInts:
    bits = max(2, (size - 1).bit_length())
    out = _feistel(places, bits, seed, epochs)
    while (outside := np.flatnonzero(out >= size)).size:
        out[outside] = _feistel(out[outside], bits, seed, epochs[outside])
    return out


def _feistel(values: UInts, bits: int, seed: int, epochs: NDArray[np.int64]) -> UInts:
    # Halves may differ in width; they change places every round, so an even number of rounds restores the layout.
    low_bits = bits // 2
    widths = (bits - low_bits, low_bits)
    left, right = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
    for number in range(_ROUNDS):
        left_mask = np.uint64((1 << widths[number % 2]) - 1)
        left, right = right, (left ^ mix(seed, epochs, number, right)) & left_mask
    return (left << np.uint64(low_bits)) | right

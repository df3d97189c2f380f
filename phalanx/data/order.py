"""The order in which samples are visited: a pure function of (seed, stream position).

Each epoch is a permutation of the samples that is never materialised: a Feistel network permutes a power of two, and
values outside the data are walked along their cycle until they fall inside. Resuming costs nothing. Its randomness is
counter-based: 64-bit values that are a function of the numbers they are made from, in any order and anywhere. Dropout
has its own keys, in the model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

UInts = NDArray[np.uint64]


def mix(*values: ArrayLike) -> UInts:
    """One well-mixed 64-bit value per element of the broadcast values (SplitMix64, chained)."""
    state = np.zeros(1, np.uint64)
    for value in values:
        state = _avalanche(state + _uint64(value) + np.uint64(0x9E3779B97F4A7C15))
    return state


def keys(seed: int, positions: ArrayLike) -> list[int]:
    """One non-negative 63-bit key per position, fit to seed a generator."""
    return (mix(seed, positions) >> np.uint64(1)).tolist()


def _uint64(value: ArrayLike) -> UInts:
    # A Python integer is wrapped here, since numpy refuses one that does not fit.
    return np.atleast_1d(np.asarray(value % 2**64 if isinstance(value, int) else value)).astype(np.uint64)


def _avalanche(x: UInts) -> UInts:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


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
        return self.at(np.arange(first, first + count, dtype=np.int64))

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sample indices at these stream positions."""
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

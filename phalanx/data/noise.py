"""Counter-based randomness: 64-bit values that are a pure function of the numbers they are made from.

Nothing here has state, so any value can be computed anywhere, in any order. Dropout has its own keys, in the model.
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

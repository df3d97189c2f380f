"""Pre-tokenised data: arrays of token ids in .npy or raw .bin files, used where they lie.

A 1-D array is a stream; a 2-D one holds a sample per row. Ids are checked as they are read, not all at the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.stream import TokenStream, token_dtype
from phalanx.errors import DataError

ARRAY_SUFFIXES = (".npy", ".bin")


def open_array(path: Path, *, vocab_size: int, tokens: int) -> TokenStream:
    """The array as a stream without document boundaries. A .bin is uint16, or uint32 if the vocabulary needs it."""
    array = _map(path, token_dtype(vocab_size))
    if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds {array.dtype.name} values of shape {list(array.shape)}, not token ids",
            "save a 1-D array (one stream) or a 2-D array (one sample per row) of integers",
        )
    if array.ndim == 2 and array.shape[1] != tokens:
        raise DataError(
            f"the rows of {path} have {array.shape[1]} tokens, but a sample has {tokens}",
            f"set the sample length to {array.shape[1]}, or save a 1-D array, which is cut to any length",
        )
    return TokenStream(array.reshape(-1), ends=None)


def _map(path: Path, raw_dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        if path.suffix.lower() == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        return np.memmap(path, raw_dtype, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read as an array ({error})", f"save token ids with numpy.save or as raw {raw_dtype.name}"
        ) from error

"""The packed token stream: all documents end to end on disk, memory-mapped, with the offsets where they end.

A finished stream is a folder that appears at once or not at all, so ranks may build the same one side by side. A
growing stream is the private spool of a source that can be read only once. Arrays of token ids that the user brings
(.npy, raw .bin) are used where they lie; their ids are checked as they are read, not all at the start.
"""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from phalanx.data.cache import scratch, writing
from phalanx.errors import DataError
from phalanx.records import read_json

_TOKENS, _ENDS, _META = "tokens.bin", "ends.npy", "meta.json"

Piece = tuple[NDArray[Any], bool]  # token ids, and whether a document ends behind them


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype that holds the vocabulary."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


@dataclass(frozen=True)
class TokenStream:
    """Tokens and the (exclusive) offsets at which documents end; `ends` is None when boundaries are not known."""

    tokens: NDArray[Any]  # 1-D
    ends: NDArray[np.int64] | None

    def windows(self, indices: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Window i holds the tokens [i * length, (i + 1) * length)."""
        return np.stack([self.tokens[i * length : (i + 1) * length] for i in indices]).astype(np.int64)

    def starts(self, indices: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
        """Where documents begin in these windows; the first token of a window always begins one."""
        assert self.ends is not None, "this stream has no document boundaries"
        out = np.zeros((len(indices), length), np.bool_)
        for row, index in zip(out, indices, strict=True):
            first, last = np.searchsorted(self.ends, [index * length, (index + 1) * length])
            row[0] = True
            row[self.ends[first:last] - index * length] = True
        return out


class _Writer:
    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self._file: BinaryIO = (folder / _TOKENS).open("wb")
        self._dtype = dtype
        self.num_tokens = 0
        self.ends: list[int] = []

    def append(self, ids: NDArray[Any], ends: bool) -> None:
        with writing(self._folder):
            self._file.write(np.ascontiguousarray(ids, self._dtype).tobytes())
        self.num_tokens += len(ids)
        if ends and self.num_tokens > (self.ends[-1] if self.ends else 0):
            self.ends.append(self.num_tokens)

    def flush(self) -> None:
        with writing(self._folder):
            self._file.flush()

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was said
            self._file.close()


def build_stream(
    cache: Path, key: str, vocab_size: int, pieces: Callable[[], Iterator[Piece]], skipped: list[str]
) -> tuple[TokenStream, list[str]]:
    """The stream cached under `key`, built from `pieces` if it is not there; and what was skipped in building it."""
    final = cache / f"stream-{key}"
    if (loaded := _load(final)) is not None:
        return loaded
    work = scratch(cache, "building-")
    try:
        _write(work, token_dtype(vocab_size), pieces(), skipped)
        with writing(cache):
            _publish(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    loaded = _load(final)
    assert loaded is not None, f"{final} was just written"
    return loaded


def _write(folder: Path, dtype: np.dtype[Any], pieces: Iterator[Piece], skipped: list[str]) -> None:
    writer = _Writer(folder, dtype)
    try:
        for ids, ends in pieces:
            writer.append(ids, ends)
        writer.flush()
    finally:
        writer.close()
    meta = {"dtype": dtype.name, "num_tokens": writer.num_tokens, "skipped": skipped}
    with writing(folder):
        np.save(folder / _ENDS, np.asarray(writer.ends, np.int64))
        (folder / _META).write_text(json.dumps(meta), encoding="utf-8")


def _publish(work: Path, final: Path) -> None:
    try:
        os.rename(work, final)
    except OSError:
        # Either another process published the same stream first, or what lies there is damaged and makes way.
        if _load(final) is None:
            shutil.rmtree(final, ignore_errors=True)
            os.rename(work, final)


def _load(folder: Path) -> tuple[TokenStream, list[str]] | None:
    try:
        meta = read_json((folder / _META).read_text(encoding="utf-8"))
        ends = np.load(folder / _ENDS, mmap_mode="r")
        tokens = _map(folder / _TOKENS, np.dtype(meta["dtype"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (TokenStream(tokens, ends), meta["skipped"]) if len(tokens) == meta["num_tokens"] else None


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


class GrowingStream:
    """A stream read from `pieces` only as far as it is asked for; its spool is removed with it."""

    def __init__(self, cache: Path, vocab_size: int, pieces: Iterator[Piece]) -> None:
        self._folder = scratch(cache, "spool-")
        self._dtype = token_dtype(vocab_size)
        self._writer = _Writer(self._folder, self._dtype)
        self._pieces = pieces
        self._read = TokenStream(np.zeros(0, self._dtype), np.zeros(0, np.int64))
        self.exhausted = False
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def read(self, num_tokens: int) -> TokenStream:
        """At least this many tokens of the stream, or all of it when the source ends before."""
        while self._writer.num_tokens < num_tokens and not self.exhausted:
            piece = next(self._pieces, None)
            if piece is None:
                self.exhausted = True
            else:
                self._writer.append(*piece)
        if len(self._read.tokens) < self._writer.num_tokens:
            self._writer.flush()
            tokens = _map(self._folder / _TOKENS, self._dtype)
            self._read = TokenStream(tokens, np.asarray(self._writer.ends, np.int64))
        return self._read


ARRAY_SUFFIXES = (".npy", ".bin")


def open_array(path: Path, *, vocab_size: int, tokens: int) -> TokenStream:
    """The array as a stream without document boundaries. A .bin is uint16, or uint32 if the vocabulary needs it."""
    array = _map_array(path, token_dtype(vocab_size))
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


def _map_array(path: Path, raw_dtype: np.dtype[Any]) -> NDArray[Any]:
    try:
        if path.suffix.lower() == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        return np.memmap(path, raw_dtype, mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read as an array ({error})", f"save token ids with numpy.save or as raw {raw_dtype.name}"
        ) from error

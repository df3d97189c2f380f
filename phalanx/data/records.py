"""Encoded records as samples: packed into rows where documents are respected, and spooled where they come as a stream.

A row depends on the records before it alone, so every rank packs alike, and a stream can be packed as it arrives.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.data.cache import scratch, writing
from phalanx.data.samples import Indices, Request, Samples
from phalanx.errors import DataError
from phalanx.tasks.base import Batch, PackedTask, Sample

Row = list[Sample]  # the samples of one row: one, unless they are packed
_OPEN_ROWS = 64  # that may still get a sample


def pack(samples: Iterable[Sample], tokens: int) -> Iterator[Row]:
    """Rows of whole samples: each sample goes into the row that it leaves the least room in. Of too many open rows the
    fullest is done."""
    opened: list[tuple[int, Row]] = []  # how much room there is, and the row
    for sample in samples:
        length = len(sample["input_ids"])
        fitting = [entry for entry in opened if entry[0] >= length]
        best = min(fitting, key=lambda entry: entry[0], default=(tokens, []))
        opened = [entry for entry in opened if entry is not best]
        opened.append((best[0] - length, [*best[1], sample]))
        if len(opened) > _OPEN_ROWS or opened[-1][0] == 0:
            done = min(opened, key=lambda entry: entry[0])
            opened = [entry for entry in opened if entry is not done]
            yield done[1]
    yield from (row for _, row in opened)


def collate_rows(rows: Sequence[Row], request: Request) -> Batch:
    task, config, tokens = request.task, request.config, request.tokens
    if request.documents:
        assert isinstance(task, PackedTask)
        return task.collate_packed(rows, config, tokens)
    return task.collate([sample for row in rows for sample in row], config, tokens)


class RecordRows(Samples):
    """Rows that are all there."""

    def __init__(self, rows: Sequence[Row], request: Request, name: str) -> None:
        self.num_samples = len(rows)
        self.documents = request.documents
        self.padding = not request.documents
        self.description = f"{name}{_packed_text(rows, request) if request.documents else ''}"
        self._rows, self._request = rows, request
        if not rows:
            raise DataError(f"{name} holds no samples", "give data with at least one")

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        return collate_rows([self._rows[index] for index in indices], self._request)


def _packed_text(rows: Sequence[Row], request: Request) -> str:
    filled = sum(len(sample["input_ids"]) for row in rows for sample in row)
    share = filled / max(1, len(rows) * request.tokens)
    return f": {sum(map(len, rows)):,} records packed into {len(rows):,} rows, {share:.0%} full"


class ArrivingRows(Samples):
    """Rows of a stream that is read as far as it is asked for. When it ends, it begins again."""

    def __init__(self, rows: Iterator[Row], request: Request, name: str) -> None:
        self.num_samples = None
        self.documents = request.documents
        self.padding = not request.documents
        self.description = f"{name}: a stream, in the order it arrives"
        self._spool, self._request = RowSpool(request.cache, rows), request
        if not self._spool.read(1):
            raise DataError(f"{name} holds no samples", "give data with at least one")

    def rows(self, indices: Indices, positions: Indices) -> Batch:
        known = self._spool.read(int(indices.max()) + 1)
        if self._spool.exhausted:
            self.num_samples = known
            indices = indices % known
        return collate_rows([self._spool[int(index)] for index in indices], self._request)


class RowSpool:
    """Rows on disk, as JSON with the places where they begin; removed with the object."""

    def __init__(self, cache: Path, rows: Iterator[Row]) -> None:
        self._folder = folder = scratch(cache, "spool-")
        self._file = (folder / "rows.jsonl").open("w+b")
        self._rows, self._begins, self._end = rows, list[int](), 0
        self.exhausted = False
        weakref.finalize(self, _removed, self._file, folder)

    def read(self, num_rows: int) -> int:
        """Reads at least this many rows, or all; how many there are."""
        while len(self._begins) < num_rows and not self.exhausted:
            row = next(self._rows, None)
            if row is None:
                self.exhausted = True
            else:
                self._append(json.dumps(row, default=_listed).encode())
        return len(self._begins)

    def _append(self, line: bytes) -> None:
        with writing(self._folder):
            self._file.seek(self._end)
            self._file.write(line + b"\n")
        self._begins.append(self._end)
        self._end = self._file.tell()

    def __getitem__(self, index: int) -> Row:
        self._file.seek(self._begins[index])
        return json.loads(self._file.readline())


def _removed(file: BinaryIO, folder: Path) -> None:
    file.close()
    shutil.rmtree(folder, ignore_errors=True)


def _listed(array: Any) -> list[Any]:
    return array.tolist()

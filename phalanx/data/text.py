"""Text and records of a source as samples: a packed token stream for plain text, encoded records for the rest.

The first record decides: records that hold what the task's records hold are encoded one by one; anything else is text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.samples import ArrivingSamples, RecordSamples, Request, Samples, WindowSamples
from phalanx.data.sources import BrokenData, Record, Source, warn_skipped
from phalanx.data.stream import GrowingStream, Piece, build_stream
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import DataError
from phalanx.tasks.base import BrokenRecord, RecordRemark, RecordTask, Sample, WindowTask

_FORMAT = 1
# Texts are tokenised together until they hold this many characters, which keeps fast tokenizers busy.
_CHUNK = 1 << 18


def text_samples(source: Source, request: Request, tokenizer: Tokenizer) -> Samples:
    """Samples of the task from a source of text or records."""
    broken = BrokenData(request.on_broken, at_once=source.identity is None)
    records = source.read(broken)
    first = next(records, None)
    records = itertools.chain([first] if first else [], records)
    if _holds_records(first, request):
        return _record_samples(records, source, request, tokenizer, broken)
    if source.identity is None:
        pieces = _pieces(records, tokenizer, broken, request.text_key)
        return ArrivingSamples(GrowingStream(request.cache, tokenizer.vocab_size, pieces), request, source.name)

    def read() -> Iterator[Piece]:
        return _pieces(records, tokenizer, broken, request.text_key)

    key = _key(source.identity, tokenizer.identity, request)
    stream, skipped = build_stream(request.cache, key, tokenizer.vocab_size, read, broken.skipped)
    warn_skipped(skipped, source.name)
    return WindowSamples(stream, request, source.name)


def _holds_records(first: Record | None, request: Request) -> bool:
    if not isinstance(request.task, WindowTask):
        return True
    fields = set(first.fields) if first else set()
    task = request.task
    return isinstance(task, RecordTask) and request.text_key not in fields and fields >= set(task.fields)


def _record_samples(
    records: Iterator[Record], source: Source, request: Request, tokenizer: Tokenizer, broken: BrokenData
) -> Samples:
    task = request.task
    assert isinstance(task, RecordTask)
    if request.documents:
        raise DataError(f"{source.name} holds one sample per record, so no documents are packed", "leave documents out")
    if source.identity is None:
        raise DataError(
            f"{source.name} is a stream, which can be learned from as plain text only",
            "load the dataset without streaming, or write it to a JSONL file",
        )
    samples: list[Sample] = []
    with _collected_remarks() as remarks:
        for record in records:
            try:
                fields = _fields(record, task, request.text_key)
                samples.append(task.encode(fields, tokenizer, request.config, request.tokens))
            except BrokenRecord as error:
                broken.report(record.place, str(error))
    for remark, count in remarks.items():
        warnings.warn(f"{count} of the {len(samples)} records of {source.name} {remark}", stacklevel=2)
    warn_skipped(broken.skipped, source.name)
    return RecordSamples(samples, lambda sample: sample, request, source.name)


@contextmanager
def _collected_remarks() -> Iterator[Counter[str]]:
    """Remarks on records, counted instead of shown one by one."""
    remarks: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RecordRemark)
        yield remarks
    for warning in said:
        if issubclass(warning.category, RecordRemark):
            remarks[str(warning.message)] += 1
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _fields(record: Record, task: RecordTask, text_key: str) -> Mapping[str, Any]:
    keys = {field: text_key if field == "text" else field for field in task.fields}
    missing = [key for key in keys.values() if key not in record.fields]
    if missing:
        wanted = ", ".join(map(repr, keys.values()))
        absent = ", ".join(map(repr, missing))
        raise BrokenRecord(f"has no {absent}; task {task.name} learns from records with {wanted}")
    return {field: record.fields[key] for field, key in keys.items()}


@dataclass
class _Chunk:
    texts: list[str]
    ends: list[bool]


def _pieces(records: Iterator[Record], tokenizer: Tokenizer, broken: BrokenData, text_key: str) -> Iterator[Piece]:
    chunk = _Chunk([], [])
    size = 0
    for record in records:
        text = record.fields.get(text_key)
        if not isinstance(text, str):
            broken.report(record.place, f"has no text in the field {text_key!r} (fields: {', '.join(record.fields)})")
            continue
        chunk.texts.append(text)
        chunk.ends.append(record.ends)
        size += len(text)
        if size >= _CHUNK:
            yield from _encode(chunk, tokenizer)
            chunk, size = _Chunk([], []), 0
    yield from _encode(chunk, tokenizer)


def _encode(chunk: _Chunk, tokenizer: Tokenizer) -> Iterator[Piece]:
    for ids, ends in zip(tokenizer.encode(chunk.texts), chunk.ends, strict=True):
        if ends and len(ids) and tokenizer.separator_id is not None:
            ids = np.append(ids, np.uint32(tokenizer.separator_id))
        yield ids, ends


def _key(source: str, tokenizer: str, request: Request) -> str:
    parts = [_FORMAT, source, tokenizer, request.text_key, request.on_broken]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

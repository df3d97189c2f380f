"""Text and records of a source as samples: a packed token stream for plain text, encoded records for the rest.

The first record decides: records that hold what the task's records hold are encoded one by one; anything else is text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.records import ArrivingRows, RecordRows, Row, pack
from phalanx.data.samples import ArrivingSamples, Request, Samples, WindowSamples
from phalanx.data.sources import BrokenData, Record, Source, warn_skipped
from phalanx.data.stream import GrowingStream, Piece, build_stream
from phalanx.data.tokenizer import Tokenizer
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
    return isinstance(task, RecordTask) and request.text_key not in fields and _kind(fields, task.kinds) is not None


def _kind(fields: Collection[str], kinds: Sequence[tuple[str, ...]]) -> tuple[str, ...] | None:
    return next((kind for kind in kinds if set(kind) <= set(fields)), None)


def kinds_text(kinds: Sequence[tuple[str, ...]]) -> str:
    """What records of these kinds hold, in words."""
    return "; or ".join(", ".join(map(repr, kind)) for kind in kinds)


def _record_samples(
    records: Iterator[Record], source: Source, request: Request, tokenizer: Tokenizer, broken: BrokenData
) -> Samples:
    if source.identity is None:
        samples = _said_at_once(_encoded_records(records, request, tokenizer, broken), source.name)
        return ArrivingRows(_rows(samples, request), request, source.name)
    with _collected_remarks() as remarks:
        samples = list(_encoded_records(records, request, tokenizer, broken))
    for remark, count in remarks.items():
        warnings.warn(f"{count} of the {len(samples)} records of {source.name} {remark}", stacklevel=2)
    warn_skipped(broken.skipped, source.name)
    return RecordRows(list(_rows((s for record in samples for s in record), request)), request, source.name)


def _rows(samples: Iterable[Sample], request: Request) -> Iterator[Row]:
    return pack(samples, request.tokens) if request.documents else ([sample] for sample in samples)


def _encoded_records(
    records: Iterator[Record], request: Request, tokenizer: Tokenizer, broken: BrokenData
) -> Iterator[list[Sample]]:
    """The samples of every record that is not broken."""
    task = request.task
    assert isinstance(task, RecordTask)
    for record in records:
        try:
            fields = _fields(record, task, request.text_key)
            yield task.encode(fields, tokenizer, request.config, request.tokens)
        except BrokenRecord as error:
            broken.report(record.place, str(error))


def _said_at_once(records: Iterator[list[Sample]], name: str) -> Iterator[Sample]:
    """A pass that may never end cannot count its remarks: each is made once."""
    said: set[str] = set()
    while True:
        with _collected_remarks() as remarks:
            record = next(records, None)
        for remark in set(remarks) - said:
            warnings.warn(f"some records of {name} {remark}", stacklevel=2)
        said.update(remarks)
        if record is None:
            return
        yield from record


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
    """The record's fields, its text under the name that tasks know."""
    kinds = [tuple(text_key if field == "text" else field for field in kind) for kind in task.kinds]
    if _kind(record.fields, kinds) is None:
        nearest = max(kinds, key=lambda kind: len(set(kind) & set(record.fields)))
        absent = ", ".join(repr(field) for field in nearest if field not in record.fields)
        raise BrokenRecord(f"has no {absent}; task {task.name} learns from records with {kinds_text(kinds)}")
    has_text = any("text" in kind for kind in task.kinds)
    return {**record.fields, "text": record.fields[text_key]} if has_text else record.fields


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
            others = f"(fields: {', '.join(record.fields) or 'none'}; text_key names another)"
            broken.report(record.place, f"has no text in the field {text_key!r} {others}")
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

"""Profiles of data in the store of measurements. One is found again by the data's files, by the model whose task and
tokenizer look at it, and by the options that say how; so data is looked at once. One that is stale or damaged is made
anew, and that is said.

Which samples were looked at depends on a run's seed as well; what data is like does not. It imports no torch where the
model is the zoo's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from phalanx.config import RunConfig
from phalanx.data.fingerprint import fingerprint, place
from phalanx.data.tokenizer import identity_of
from phalanx.model.zoo import zoo_table
from phalanx.profile.data import KIND, DataProfile, by_profile, from_rows, to_rows
from phalanx.profile.store import Row, Say, Store, matching, profiles_path

VERSION = 1  # of what is looked at in data, and how
# What may be other than it was, by the name it has in keys.
_CHANGES = {"files": "its files changed", "tokenizer": "the tokenizer changed", "config": "the model changed",
            "version": "it is of another version"}  # fmt: skip


class Known(NamedTuple):
    """rows: as it is kept."""

    profile: DataProfile
    rows: list[Row]

    @property
    def made(self) -> str:
        """When and where."""
        return self.rows[0].made


class KeptData:
    """The profile of the data that options name. say: what becomes of one that is of no use any more."""

    def __init__(self, config: RunConfig, say: Say) -> None:
        self._say, self._store = say, Store(profiles_path(), say)
        self.name = " + ".join(config.data)
        self._place, self._subject = place(config.data), _subject(config)
        self._replaced: list[Row] = []

    def get(self) -> Known | None:
        """None where there is none of just this data, also of data that is known only once it is loaded."""
        if self._subject is None or not self._store.path.is_file():
            return None
        rows = self._store.rows(KIND)
        own = self._replaced = list(matching(rows, **self._subject))
        for each in by_profile(own):
            if (found := from_rows(each)) is not None:
                return Known(found, each)
        if own:
            self._discard(own, "damaged")
        elif stale := self._of_earlier(rows, self._subject):
            changed = [words for name, words in _CHANGES.items() if stale[0].key.get(name) != self._subject[name]]
            self._discard(stale, f"stale ({', '.join(changed)})")
        return None

    def put(self, found: DataProfile) -> Known:
        """In the place of what `get` came upon."""
        about = {**self._subject, "place": self._place} if self._subject is not None else {}
        rows = to_rows(found, self.name, about)
        if self._subject is not None:
            self._store.take(rows, instead_of=self._replaced)
        return Known(found, rows)

    def _of_earlier(self, rows: list[Row], subject: Mapping[str, str | int]) -> list[Row]:
        """Of the data that lay here once, looked at in the same way."""
        same = {name: value for name, value in subject.items() if name not in _CHANGES}
        return list(matching(rows, place=self._place, **same))

    def _discard(self, rows: list[Row], why: str) -> None:
        self._replaced = rows
        self._say(f"the profile of {self.name}, made {rows[0].made}, is {why}: the data is looked at anew")


def _subject(config: RunConfig) -> dict[str, str | int] | None:
    files = fingerprint(config.data)
    if files is None:
        return None
    entry = zoo_table.lookup(config.model)
    folder = None if entry is not None or config.tiny else _folder(config.model)
    options = [config.task, config.seq_len, config.text_key, config.documents, config.on_broken, config.tiny]
    return {
        "files": files, "model": config.model if entry is None else entry.name, "config": _digest(folder),
        "tokenizer": identity_of(config.tokenizer, folder), "version": VERSION,
        "options": json.dumps([*options, config.model_options]),
    }  # fmt: skip


def _folder(model: str) -> Path | None:
    from phalanx.model.zoo.zoo import resolve

    return resolve(model).folder


def _digest(folder: Path | None) -> str:
    """Of a configuration, which says how long samples may be."""
    path = None if folder is None else folder / "config.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path is not None and path.is_file() else ""

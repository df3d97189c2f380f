"""What was measured, kept between runs: one SQLite file, a row for each measurement, keyed by all that it depends on.

A file that cannot be read is put aside and begun anew, which is said; rows of other versions or other devices are never
found, because their keys differ. The same rows can be written to one JSON file and read back.
"""

from __future__ import annotations

import json
import platform
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.config import cache_folder
from phalanx.errors import ConfigError
from phalanx.planning.rates import COLLECTIVES, SPEEDS, Points, Rates, Spread, Talk
from phalanx.records import Malformed, read_record

FORMAT = "phalanx profile"
VERSION = 1
Key = Mapping[str, str | int]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """key: what was measured, on what, with what. value: in the unit of its kind. made: when, where."""

    kind: str
    key: dict[str, str | int]
    value: float
    made: str


@dataclass(frozen=True)
class _File:
    format: str
    version: int
    rows: list[Row]


def profiles_path() -> Path:
    return cache_folder() / "profiles.sqlite"


class Store:
    """Opened by path; several processes may use one file at a time."""

    def __init__(self, path: Path, say: Say = lambda text: None) -> None:
        self.path, self._say = path, say

    def get(self, kind: str, key: Key) -> float | None:
        found = self._asked("SELECT value FROM measurements WHERE kind = ? AND key = ?", kind, _text(key))
        return next((float(value) for (value,) in found if isinstance(value, float)), None)

    def put(self, kind: str, key: Key, value: float) -> None:
        self._write([Row(kind, dict(key), value, provenance())])

    def rows(self, kind: str | None = None) -> list[Row]:
        where, given = ("WHERE kind = ?", (kind,)) if kind else ("", ())
        found = self._asked(f"SELECT kind, key, value, made FROM measurements {where}", *given)
        return [row for each in found if (row := _row(*each)) is not None]

    def forget(self, kind: str, key: Key) -> None:
        with self._opened() as database, database:
            database.execute("DELETE FROM measurements WHERE kind = ? AND key = ?", (kind, _text(key)))

    def export(self, path: Path, rows: list[Row]) -> None:
        try:
            path.write_text(json.dumps(asdict(_File(FORMAT, VERSION, rows)), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            message = f"option out = '{path}' cannot be written: {error.strerror}"
            raise ConfigError(message, "name a file in a folder that exists and may be written to") from error

    def take(self, rows: list[Row], instead_of: Sequence[Row] = ()) -> None:
        """All of them, or, where that fails, none."""
        self._write(rows, instead_of)

    def _write(self, rows: list[Row], instead_of: Sequence[Row] = ()) -> None:
        with self._opened() as database, database:
            database.executemany(
                "DELETE FROM measurements WHERE kind = ? AND key = ?",
                [(row.kind, _text(row.key)) for row in instead_of],
            )
            database.executemany(
                "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?)",
                [(row.kind, _text(row.key), row.value, row.made) for row in rows],
            )

    def _asked(self, query: str, *given: str) -> list[tuple[Any, ...]]:
        try:
            with self._opened() as database:
                return database.execute(query, given).fetchall()
        except sqlite3.OperationalError as error:
            raise self._unusable(error) from error
        except sqlite3.DatabaseError as error:  # damage that opening it did not meet
            self._put_aside(error)
            return []

    def _opened(self) -> closing[sqlite3.Connection]:
        try:
            return closing(self._connect())
        except sqlite3.OperationalError as error:
            raise self._unusable(error) from error
        except sqlite3.DatabaseError as error:
            self._put_aside(error)
            return closing(self._connect())

    def _unusable(self, error: sqlite3.Error) -> ConfigError:
        message = f"measurements cannot be kept in {self.path}: {error}"
        return ConfigError(message, "set PHALANX_CACHE to a folder that may be written to")

    def _put_aside(self, error: sqlite3.Error) -> None:
        aside = self.path.with_suffix(".broken")
        self.path.replace(aside)
        self._say(f"{self.path} cannot be read ({error}): put aside as {aside.name}, what it held is measured anew")

    def _connect(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error
        database = sqlite3.connect(self.path, timeout=30)
        database.text_factory = lambda text: text.decode(errors="replace")  # damaged text is found when it is read
        try:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                self._say(f"{self.path} is of another version: what it held is measured anew")
                database.execute("DROP TABLE IF EXISTS measurements")
            with database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS measurements "
                    "(kind TEXT, key TEXT, value REAL, made TEXT, PRIMARY KEY (kind, key))"
                )
                database.execute(f"PRAGMA user_version = {VERSION}")
            database.execute("SELECT kind, key, value, made FROM measurements LIMIT 1").fetchone()
        except sqlite3.Error:
            database.close()
            raise
        return database


def rows_here() -> list[Row]:
    """All that was measured on this machine. That a store is put aside or begun anew is said on stderr."""
    path = profiles_path()
    return Store(path, lambda text: print(text, file=sys.stderr, flush=True)).rows() if path.is_file() else []


def _row(kind: object, key: object, value: object, made: object) -> Row | None:
    """None for what only damage can have made."""
    if not (isinstance(kind, str) and isinstance(key, str) and isinstance(value, float) and isinstance(made, str)):
        return None
    try:
        return Row(kind, read_record(dict[str, str | int], key), value, made)
    except Malformed:
        return None


def read_profile(path: Path) -> list[Row]:
    """The rows of a JSON file that `export` wrote."""
    try:
        found = read_record(_File, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"profile {path} cannot be read: {error.strerror}", "give a file of `phalanx profile --out`"
        ) from None
    except (Malformed, UnicodeDecodeError) as error:
        raise ConfigError(f"profile {path} is not one: {error}", "write it with `phalanx profile --out FILE`") from None
    if (found.format, found.version) != (FORMAT, VERSION):
        message = f"profile {path} is {found.format!r}, version {found.version}"
        raise ConfigError(message, f"measure anew with this Phalanx, which writes version {VERSION}")
    return found.rows


def provenance() -> str:
    """When and where."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC on {platform.node()}"


def _text(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True)


def matching(rows: Iterable[Row], **wanted: str | int) -> Iterator[Row]:
    """Those whose keys hold all of this."""
    return (row for row in rows if all(row.key.get(name) == value for name, value in wanted.items()))


def of_one_version(rows: list[Row]) -> tuple[list[Row], str]:
    """Those that this version of torch made, or, where there are none, the newest that is among them; and which."""
    versions = {made_by for row in rows if isinstance(made_by := row.key.get("torch"), str)}
    own = torch_version()
    chosen = own if own in versions or not versions else max(versions, key=_as_numbers)
    return list(matching(rows, torch=chosen)), chosen


def torch_version() -> str:
    """Without importing it."""
    return version("torch").partition("+")[0]


def _as_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def of_newest_graphs(rows: list[Row]) -> list[Row]:
    """Of each block of a model, those of the graph that was measured last."""
    newest: dict[object, Row] = {}
    for row in rows:
        block = row.key.get("block")
        if block not in newest or row.made > newest[block].made:
            newest[block] = row
    return [row for row in rows if row.key.get("graph") == newest[row.key.get("block")].key.get("graph")]


Subject = tuple[str, frozenset[tuple[str, str | int]]]


def subject(kind: str, key: Key) -> Subject:
    """What was measured, at whatever size and by whom."""
    return kind, frozenset((name, value) for name, value in key.items() if name not in ("size", "by"))


def subjects(rows: Iterable[Row]) -> set[Subject]:
    return {subject(row.kind, row.key) for row in rows}


def careful_first(rows: list[Row], careful: str) -> list[Row]:
    """Without what others measured too, where it was measured carefully. careful: by whom."""
    known = subjects(matching(rows, by=careful))
    return [row for row in rows if row.key.get("by") == careful or subject(row.kind, row.key) not in known]


def rates_from(rows: list[Row], device: str, dtype: str, spread: Spread, far: Talk | None = None) -> Rates | None:
    """What rows say of a device with the ranks of a node spread so; None where products or memory are missing."""
    near = spread.near
    own = list(matching(rows, device=device, **asdict(near)))
    products = _points(own, "product", dtype=dtype)
    memory, host = _points(own, "memory"), _points(own, "host")
    if not products or not memory:
        return None
    made = max(row.made for row in own)
    return Rates(
        device, dtype, products, memory[-1][1], _talk(own, near), far, host[-1][1] if host else None,
        f"measured {made}",
    )  # fmt: skip


def far_from(rows: list[Row], device: str, wanted: Spread, network: str) -> Talk | None:
    """What was measured among ranks of several nodes, spread so or the most like it that was."""
    far = [row for row in matching(rows, device=device, network=network) if row.key.get("nodes") not in (None, 1)]
    spreads = {found for row in far if (found := spread_of(row)) is not None}
    if wanted.nodes == 1 or not spreads:
        return None
    nearest = min(spreads, key=lambda own: (abs(own.ranks - wanted.ranks), abs(own.nodes - wanted.nodes), str(own)))
    return _talk(list(matching(far, **asdict(nearest))), nearest)


def spread_of(row: Row) -> Spread | None:
    """How the ranks lay that measured it together; None for what is not about devices."""
    every = (row.key.get(name) for name in ("ranks", "devices", "nodes"))
    counts = [count for count in every if isinstance(count, int) and count > 0]
    return Spread(*counts) if len(counts) == 3 else None


def _talk(rows: list[Row], among: Spread) -> Talk:
    collectives = {kind: found for kind in COLLECTIVES if (found := _points(rows, kind))}
    return Talk(among, collectives, {kind: found for kind in SPEEDS if (found := _points(rows, kind))})


def _points(rows: list[Row], kind: str, **wanted: str) -> Points:
    found = matching([row for row in rows if row.kind == kind], **wanted)
    sizes = ((row.key.get("size"), row.value) for row in found)
    return tuple(sorted((float(size), value) for size, value in sizes if isinstance(size, int) and value > 0))

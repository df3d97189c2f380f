"""`phalanx plan --data` and `phalanx estimate --data`: what a batch of this data is worth, from the data itself or a
profile of it, which is kept in the store or lies in a file of `phalanx profile --data … --out`; and a range of batches,
of which the one is taken that gets through the data fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from phalanx.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from phalanx.planning.data_use import DataUse
    from phalanx.planning.search import Found
    from phalanx.profile.data import DataProfile
    from phalanx.profile.kept_data import Known


READING = ("text_key", "on_broken")
TextKey = Annotated[str | None, typer.Option(help="field of a record of --data that holds the text (default: text)")]
OnBroken = Annotated[
    str | None, typer.Option(metavar="refuse|skip", help="what to do with a file of --data that cannot be read")
]


class Range(NamedTuple):
    """Of samples of a global batch."""

    first: int
    last: int


def read_range(text: str | None) -> Range | None:
    """'64' or '64-512'."""
    if text is None:
        return None
    first, separator, last = text.partition("-")
    parts = (first, last) if separator else (first, first)
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**9 for part in parts):
        message = f"option batch_size = {text!r} is neither a number of samples nor a range of them"
        raise ConfigError(message, "write for example 64, or 64-512 for the best in between")
    found = Range(int(parts[0]), int(parts[1]))
    if found.first > found.last:
        raise ConfigError(
            f"option batch_size = {text!r} is a range that ends before it begins", f"write {last}-{first}"
        )
    return found


def require_data(data: Sequence[str] | None, reading: Mapping[str, Any]) -> None:
    """Options that say how data is read do nothing without any."""
    if not data:
        _refuse(reading, "none is given", "give --data, or ")


def _refuse(reading: Mapping[str, Any], why: str, instead: str = "") -> None:
    for name, value in reading.items():
        if value is not None:
            message = f"option {name} = {value!r} does nothing: it says how data is read, and {why}"
            raise ConfigError(message, f"{instead}leave out --{name.replace('_', '-')}")


def read_data(data: Sequence[str], seq_len: int | None, given: Mapping[str, Any]) -> DataUse:
    """Of data as `phalanx train --data` takes it, or of a profile of it. given: other options of training that say how
    it is read; None where they were not given."""
    from phalanx.planning.data_use import DataUse
    from phalanx.profile.data import length_of

    name = " + ".join(data)
    found = _stored(data[0], seq_len) if len(data) == 1 and data[0].endswith(".json") else None
    if found is not None:
        _refuse({each: given.get(each) for each in READING}, f"{name} is a profile of data that was read")
    if found is None:
        known, is_new = look_at(data, {"seq_len": seq_len, **given}, lambda text: typer.echo(text, err=True))
        found = known.profile
        if not is_new:
            typer.echo(f"{name} as looked at {known.made}; `phalanx profile --data … --fresh` looks again", err=True)
    tokens = seq_len or found.tokens
    if not found.has_padding:
        return DataUse(name, found.samples, tokens, 0.0)
    now, best = length_of(found.lengths, tokens), found.best
    return DataUse(name, found.samples, tokens, now.padding, now.cut, best.tokens, best.padding, best.cut)


def _stored(path: str, seq_len: int | None) -> DataProfile | None:
    """None where the file is data by itself."""
    from phalanx.profile.data import is_profile

    if not is_profile(Path(path)):
        return None
    found = _only_profile(path)
    if found.has_padding and seq_len is not None and seq_len > found.tokens == found.lengths[-1]:
        message = f"option seq_len = {seq_len}: '{path}' is about samples that were cut at {found.tokens} tokens"
        raise ConfigError(
            message, f"look at the data with --seq-len {seq_len} (phalanx profile --data), or plan for less"
        )
    return found


def _only_profile(path: str) -> DataProfile:
    from phalanx.profile.data import by_profile, from_rows
    from phalanx.profile.store import read_profile

    every, hint = by_profile(read_profile(Path(path))), "write one with `phalanx profile --data DATA --out FILE`"
    if not every:
        raise ConfigError(f"option data = '{path}' is a profile of devices, not of data", hint)
    if len(every) > 1:
        names = ", ".join(sorted({str(rows[0].key.get("data")) for rows in every}))
        message = f"option data = '{path}' holds {len(every)} profiles of data: {names}"
        raise ConfigError(message, f"name the data itself (`phalanx profile --import {path}` keeps all), or {hint}")
    if (found := from_rows(every[0])) is None:
        raise ConfigError(f"option data = '{path}' is damaged: what it says of lengths is not all there", hint)
    return found


def look_at(
    data: Sequence[str], given: Mapping[str, Any], say: Callable[[str], None], fresh: bool = False
) -> tuple[Known, bool]:
    """What a run would see of it, and whether that was found out now. fresh: look again."""
    from phalanx.config import AUTO, RunConfig
    from phalanx.profile.kept_data import KeptData

    known = {name: value for name, value in given.items() if value is not None}
    config = RunConfig.create(plan=AUTO, data=tuple(data), **known)
    kept = KeptData(config, say)
    before = kept.get()
    if before is not None and not fresh:
        return before, False
    from phalanx.prepare.prepare import training_data
    from phalanx.profile.data import profile_data

    return kept.put(profile_data(training_data(config))), True


class Looked(NamedTuple):
    """A batch with its best plan. rate: tokens of data that it gets through in a second, or for a dollar."""

    batch: int
    rate: float
    found: Found


def best_batch(
    between: Range, data: DataUse | None, search: Callable[[int], Found], objective: str = "time"
) -> tuple[Looked, list[Looked]]:  # fmt: skip
    """The one that is fastest, or cheapest, and all that were looked at. A PlanError where there is no plan for any."""
    from phalanx.planning.data_use import batches_between, useful_share

    looked: list[Looked] = []
    refused: PlanError | None = None
    for batch in batches_between(*between, data):
        try:
            found = search(batch)
        except PlanError as error:
            refused = error
            continue
        first = found.plans[0]
        rate = first.tokens / first.dollars if objective == "cost" else first.tokens_per_second
        looked.append(Looked(batch, useful_share(data, batch) * rate, found))
    if not looked:
        assert refused is not None
        raise refused
    return max(looked, key=lambda own: own.rate), looked

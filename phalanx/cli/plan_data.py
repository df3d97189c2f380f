"""`phalanx plan --data` and `phalanx estimate --data`: what a batch of this data is worth, from the data itself or from
a file of `phalanx profile --data … --out`; and a range of batches, of which the one is taken that gets through the data
fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from phalanx.planning.data_use import DataUse
    from phalanx.planning.search import Found
    from phalanx.profile.data import DataProfile


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


def read_data(data: Sequence[str], model: str, task: str | None, seq_len: int | None) -> DataUse:
    """Of data as `phalanx train --data` takes it, or of a profile of it."""
    from phalanx.planning.data_use import DataUse
    from phalanx.profile.data import length_of

    name = " + ".join(data)
    found = _stored(data[0], seq_len) if len(data) == 1 and data[0].endswith(".json") else None
    if found is None:
        found = look_at(data, model, task, seq_len)[1]
    tokens = seq_len or found.tokens
    if not found.has_padding:
        return DataUse(name, found.samples, tokens, 0.0)
    now, best = length_of(found.lengths, tokens), found.best
    return DataUse(name, found.samples, tokens, now.padding, now.cut, best.tokens, best.padding, best.cut)


def _stored(path: str, seq_len: int | None) -> DataProfile | None:
    """None where the file is data by itself."""
    from phalanx.profile.data import from_rows, is_profile
    from phalanx.profile.store import read_profile

    if not is_profile(Path(path)):
        return None
    found = from_rows(read_profile(Path(path)))
    if found is None:
        message = f"option data = '{path}' is a profile of devices, not of data"
        raise ConfigError(message, "write one with `phalanx profile --data DATA --out FILE`")
    if found.has_padding and seq_len is not None and seq_len > found.tokens == found.lengths[-1]:
        message = f"option seq_len = {seq_len}: '{path}' is about samples that were cut at {found.tokens} tokens"
        raise ConfigError(
            message, f"look at the data with --seq-len {seq_len} (phalanx profile --data), or plan for less"
        )
    return found


def look_at(data: Sequence[str], model: str, task: str | None, seq_len: int | None) -> tuple[str, DataProfile]:
    """What a run would see of it, in words and in lengths."""
    from phalanx.config import AUTO, RunConfig
    from phalanx.prepare.prepare import training_data
    from phalanx.profile.data import profile_data

    given: dict[str, Any] = {"model": model, "data": tuple(data), "task": task, "seq_len": seq_len}
    config = RunConfig.create(plan=AUTO, **{name: value for name, value in given.items() if value is not None})
    batches = training_data(config)
    return batches.describe(), profile_data(batches)


class Looked(NamedTuple):
    """A batch with its best plan: tokens of data that it gets through in a second."""

    batch: int
    rate: float
    found: Found


def best_batch(
    between: Range, data: DataUse | None, search: Callable[[int], Found]
) -> tuple[Looked, list[Looked]]:  # fmt: skip
    """The one that is fastest, and all that were looked at. A PlanError where no plan is for any of them."""
    from phalanx.planning.data_use import batches_between, useful_share

    looked: list[Looked] = []
    refused: PlanError | None = None
    for batch in batches_between(*between, data):
        try:
            found = search(batch)
        except PlanError as error:
            refused = error
            continue
        looked.append(Looked(batch, useful_share(data, batch) * found.plans[0].tokens_per_second, found))
    if not looked:
        assert refused is not None
        raise refused
    return max(looked, key=lambda own: own.rate), looked

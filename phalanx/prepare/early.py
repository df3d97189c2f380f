"""What is found wrong with a run within a second: before torch is imported, ranks are started or anything is prepared.

Only files are looked at, and of weights only their headers; whether all of it fits together is found out in `prepare`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from phalanx.config import RunConfig
from phalanx.data.mixture import weighted_sources
from phalanx.data.named import is_named_dataset
from phalanx.data.sources import NAMED, existing
from phalanx.errors import ConfigError, ModelError, PhalanxError
from phalanx.launch.join import Place, find_place
from phalanx.model.zoo.names import require_found
from phalanx.observe.trackers import require_trackers
from phalanx.records import read_json
from phalanx.state.folders import refuse_used
from phalanx.state.lock import read_holder, refuse_second_run
from phalanx.state.remote import is_remote

_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"


def require_usable(model: Any, data: Any, eval_data: Any, config: RunConfig) -> None:
    """What is given as objects is left to those who know it. Of ranks that a launcher started, the first speaks."""
    place = find_place(os.environ)
    try:
        if place is None:
            refuse_second_run(Path(config.out).expanduser())
        _require_usable(model, data, eval_data, config, _may_come_back(place, config))
    except PhalanxError:
        if place is not None and place.rank > 0:
            raise SystemExit(1) from None
        raise


def _may_come_back(place: Place | None, config: RunConfig) -> bool:
    """Whether this process may be that of a machine which comes back to a run, and finds what that has saved. Should
    there be no such run, its ranks refuse the folder."""
    several = place is not None and place.world > 1 and not place.one_machine
    return several and config.on_loss != "stop" and read_holder(Path(config.out).expanduser()) is not None


def _require_usable(model: Any, data: Any, eval_data: Any, config: RunConfig, may_be_used: bool) -> None:
    require_trackers(config.report_to)
    _require_out(Path(config.out).expanduser(), may_be_used or config.resume != "never")
    for source in (data, eval_data) if isinstance(model, str | Path) else ():
        for item in _paths(source):
            if item.partition(":")[0] not in NAMED and not is_named_dataset(item):
                existing(item)
    if isinstance(model, str | Path) and not is_remote(model):
        require_found(model)
        for file in _weight_files(Path(model).expanduser()) if config.init != "fresh" else ():
            _require_whole(file)


def _require_out(out: Path, may_be_used: bool) -> None:
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir():
        what = "is a file" if there == out else f"lies below {there}, which is a file"
        raise ConfigError(f"option out = '{out}' {what}", "name a folder for the run: one that is there, or a new one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"option out = '{out}': nothing can be written in {there}", "name another folder (--out)")
    if (out / "config.json").is_file():
        raise ConfigError(f"option out = '{out}' is the folder of a model", "name another folder for the run (--out)")
    if not may_be_used:
        refuse_used(out)


def _paths(source: Any) -> list[str]:
    """Data that is given by name, without weights."""
    if (mixed := weighted_sources(source)) is not None:
        return [item for each, _ in mixed for item in _paths(each)]
    items = [source] if isinstance(source, str | Path) else source
    if not isinstance(items, list | tuple):
        return []
    return [str(item) for item in cast(Sequence[Any], items) if isinstance(item, str | Path)]


def _weight_files(folder: Path) -> list[Path]:
    """Files of weights that are there; what an index names and is not there is missed by who reads it."""
    try:
        names = read_json((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()
    except FileNotFoundError:
        names = [_WEIGHTS]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder / _INDEX} is not an index of weights: {error!r}", "copy or download it again"
        ) from None
    if absent := sorted({name for name in names if not (folder / name).is_file()} - {_WEIGHTS}):
        raise ModelError(f"{folder / _INDEX} names {absent[0]}, which is not there", "copy or download it")
    return [folder / name for name in sorted(set(names)) if (folder / name).is_file()]


def _require_whole(file: Path) -> None:
    """A safetensors file begins with the length of its header, and the header says where the last tensor ends."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        try:
            header = read_json(opened.read(min(header_size, size)))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{file} is damaged: it is not safetensors", "copy or download it again") from None
    whole = 8 + header_size + max(ends, default=0)
    if size != whole:
        raise ModelError(
            f"{file} is damaged: it has {size:,} bytes, and its header speaks of {whole:,}", "copy or download it again"
        )

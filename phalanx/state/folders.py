"""The folders that checkpoints live in: their names, when one is complete, which are kept, how one takes its place.

A checkpoint appears whole or not at all, and one that was complete stays complete until a newer one is. Newer is what
was written later, whatever its step. A folder may be damaged or hostile: what it says of itself is checked before it is
used. What is in a checkpoint is `index`'s business; the files that hold tensors are `tensor_files`' work.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from phalanx.errors import ConfigError
from phalanx.records import Malformed, read_record

if TYPE_CHECKING:
    from phalanx.state.tensor_files import WrittenFile

MARKER = "COMPLETE"
STATE_FILE = "state.json"

# A name that starts with a dot is never a checkpoint, except one set aside while another takes its place.
_WRITING, _REPLACED, _DELETED = ".writing", ".replaced", ".deleted"

Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class _FileEntry:
    size: Count
    start: Count
    sha256: str


@dataclass(frozen=True)
class Marker:
    """What makes a folder a checkpoint: every file with its size and checksum, and when it was written.

    written: nanoseconds, larger than those of all checkpoints that were there then; 0 before there was such a number.
    """

    files: dict[str, _FileEntry]
    written: Count = 0


def is_inside(name: str) -> bool:
    """Whether a file that an index names lies in the folder of the index, as its name says."""
    parts = Path(name).parts
    fits = all(len(os.fsencode(part)) <= 255 for part in parts) and "\0" not in name
    return bool(parts) and not Path(name).is_absolute() and ".." not in parts and fits


def final_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def candidates(folder: Path) -> list[Path]:
    """Everything that is or was a checkpoint, good or damaged, newest first."""
    if folder.is_symlink() and not folder.exists():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link that points to nothing", str(folder))
    paths = list(folder.iterdir()) if folder.exists() else []
    return sorted((path for path in paths if _step(path) is not None), key=_age, reverse=True)


def find(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first. Looks at markers and file sizes, not at contents."""
    complete: dict[int | None, Path] = {}
    for path in candidates(folder):
        if fault(path, contents=False) is None:
            complete.setdefault(_step(path), path)
    return list(complete.values())


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(iter(find(folder)), None)


def refuse_used(run: Path) -> None:
    """A run that begins may not write among the checkpoints of another."""
    if there := candidates(run / "checkpoints"):
        raise ConfigError(
            f"the run folder {run} already holds checkpoints, the newest {there[0].name}",
            "continue it with resume=auto (--resume auto), or choose another folder (--out)",
        )


def begin(folder: Path, step: int) -> Path:
    """Clears what an interrupted save left and makes the folder to write into, which no other save ever had."""
    from phalanx.state.tensor_files import sync_folder

    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
    tidy(folder)
    partial = folder / f".{final_folder(folder, step).name}.{secrets.token_hex(4)}{_WRITING}"
    partial.mkdir()
    return partial


def mark_complete(partial: Path, files: Iterable[WrittenFile], record: dict[str, Any]) -> None:
    """Writes what the checkpoint says of itself and, last, the marker with every file's size and checksum."""
    from phalanx.state.tensor_files import checksum, sync_folder

    state = partial / STATE_FILE
    write_json(state, record)
    entries = {file.name: {"size": file.size, "start": file.start, "sha256": file.sha256} for file in files}
    entries[state.name] = {"size": state.stat().st_size, "start": 0, "sha256": checksum(state)}
    # Clocks go wrong and are set back; the order of writing is still to be told.
    newest = max((_age(path)[0] for path in candidates(partial.parent)), default=0)
    write_json(partial / MARKER, {"files": entries, "written": max(time.time_ns(), newest + 1)})
    sync_folder(partial)


def put_in_place(partial: Path, final: Path) -> None:
    """Renames a finished folder to its name. One already there steps aside first and is found there if we die."""
    from phalanx.state.tensor_files import sync_folder

    if os.path.lexists(final):
        os.rename(final, _aside(final))
    os.rename(partial, final)
    sync_folder(final.parent)


def surplus(final: Path, keep: int, spare: int | None = None) -> list[Path]:
    """What is kept no longer, now that `final` is there: all but it, the `keep` - 1 that were written last before it,
    and the one of the step `spare`; and what stood in its place."""
    others = [path for path in find(final.parent) if path != final and _step(path) != spare]
    aside = _aside(final)
    return [*([aside] if os.path.lexists(aside) else []), *(path for path in others[keep - 1 :] if path != aside)]


def prune(final: Path, keep: int, spare: int | None = None) -> None:
    # What cannot be removed now is in nobody's way: the checkpoint is there.
    for path in surplus(final, keep, spare):
        with contextlib.suppress(OSError):
            _remove(path)


def step_back(final: Path) -> None:
    """A checkpoint that turned out bad goes; one that it replaced returns."""
    _remove(final)
    if os.path.lexists(_aside(final)):
        os.rename(_aside(final), final)


def _aside(final: Path) -> Path:
    return final.parent / f".{final.name}{_REPLACED}"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a file that is on the disk, not just in its cache, when this returns."""
    with path.open("w") as file:
        file.write(json.dumps(value))  # at once: piece by piece, json takes ten times as long
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Writes a file that holds either all of its old or all of its new text, on the disk when this returns."""
    from phalanx.state.tensor_files import sync_folder

    new = path.with_name(f".{path.name}{_WRITING}")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, path)
    sync_folder(path.parent)


def fault(path: Path, contents: bool, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with a checkpoint and with which file; None when it is good.

    contents: whether files are read in full; with `share` = (rank, world) those that are this rank's to read, so that
    all ranks together read each once.
    """
    if not path.is_dir():
        return "there is no such folder"
    try:
        marker = read_record(Marker, (path / MARKER).read_bytes())
    except FileNotFoundError:
        if not (path / STATE_FILE).exists() and (path / "checkpoints").is_dir():
            return "it is the folder of a run, not a checkpoint"
        if candidates(path):
            return "it is a folder of checkpoints, not one of them"
        return f"it is incomplete (no {MARKER} file): saving it was interrupted"
    except (Malformed, OSError) as error:
        return f"its {MARKER} file is damaged ({error})"
    if outside := [name for name in marker.files if not is_inside(name)]:
        return f"its {MARKER} file names {outside[0]!r}, which is not a file of this folder"
    if STATE_FILE not in marker.files:
        return f"its {MARKER} file is damaged (it names no {STATE_FILE})"
    wrong = (_size_fault(path / name, entry) for name, entry in marker.files.items())
    return next(filter(None, wrong), None) or (_content_fault(path, marker, share) if contents else None)


def offer_instead(path: Path) -> str:
    """The next step after `path` turned out to be bad: the newest good one in it or beside it, read in full to be
    sure."""
    inside = [*find(path), *find(path / "checkpoints")] if path.is_dir() else []
    for other in (*inside, *find(path.parent)):
        if other != path and fault(other, contents=True) is None:
            return f"the newest good checkpoint is {other}; resume from that one"
    return f"there is no other good checkpoint in {path.parent}; start without resuming"


def tidy(folder: Path) -> None:
    """Clears what an interrupted save left: half-written folders go, a checkpoint that had stepped aside returns."""
    for path in folder.glob(f".step-*{_REPLACED}"):
        original = folder / path.name.strip(".").removesuffix(_REPLACED)
        if os.path.lexists(original):
            _remove(path)
        else:
            os.rename(path, original)
    for suffix in (_WRITING, _DELETED):
        for path in folder.glob(f".step-*{suffix}"):
            _delete(path)


def _remove(path: Path) -> None:
    """Deletes a folder, which stops being a checkpoint before its first file goes."""
    if os.path.lexists(path):
        doomed = path.parent / f".{path.name.strip('.').removesuffix(_REPLACED)}{_DELETED}"
        _delete(doomed)
        os.rename(path, doomed)
        _delete(doomed)


def _delete(path: Path) -> None:
    """A folder with all that is in it; of a link only the link, what it points to is the user's."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path, ignore_errors=True)


def _step(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other folder."""
    found = re.fullmatch(rf"\.?step-(\d{{1,18}})({_REPLACED})?", path.name, re.ASCII)
    return int(found[1]) if found else None


def _age(path: Path) -> tuple[int, int]:
    """When a checkpoint was written, as far as it tells, and its step; the one in place comes after one set aside."""
    try:
        written = read_record(Marker, (path / MARKER).read_bytes()).written
    except (Malformed, OSError):
        written = _touched(path)
    return written, 2 * (_step(path) or 0) + (not path.name.startswith("."))


def _touched(path: Path) -> int:
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0


def _size_fault(path: Path, expected: _FileEntry) -> str | None:
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        return f"{path.name!r} cannot be read: {error.strerror}"
    if size is None:
        return f"{path.name} is missing"
    return None if size == expected.size else f"{path.name} has {size} bytes instead of {expected.size}"


def _content_fault(path: Path, marker: Marker, share: tuple[int, int]) -> str | None:
    """Reads files in several threads where one process reads them all."""
    names = _shares({name: entry.size for name, entry in marker.files.items()}, share[1])[share[0]]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if share[1] == 1 else 1) as pool:
        faults = list(pool.map(lambda name: _checksum_fault(path / name, marker.files[name]), names))
    return next(filter(None, faults), None)


def _shares(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Files divided among ranks, so that each has about as many bytes to read: the largest first, to who has least."""
    shares: list[list[str]] = [[] for _ in range(world)]
    loads = [0] * world
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        shares[rank].append(name)
        loads[rank] += sizes[name]
    return shares


def _checksum_fault(path: Path, expected: _FileEntry) -> str | None:
    from phalanx.state.tensor_files import checksum

    try:
        found = checksum(path, expected.start)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None if found == expected.sha256 else f"{path.name} is corrupt (its checksum does not match)"

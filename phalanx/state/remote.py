"""Remote storage through fsspec: a run's checkpoints and export copied there while it trains, and fetched from there.

Everything is written to the local run folder first and copied behind training's back, the file that makes a checkpoint
complete last; so what lies there is whole or not a checkpoint. A copy that fails is said and tried again with the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import secrets
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from phalanx.config import cache_folder
from phalanx.errors import CheckpointError, ConfigError
from phalanx.records import Malformed, read_record
from phalanx.state.folders import MARKER, STATE_FILE, Marker, fault, find, is_inside, latest, put_in_place, tidy
from phalanx.state.index import Record

CHECKPOINTS = "checkpoints"
_HELD = ".copying"


def is_remote(text: object) -> bool:
    """Whether this names a place of remote storage, such as s3://bucket/run."""
    return isinstance(text, str) and "://" in text


def open_remote(url: str) -> tuple[Any, str]:
    """The file system that a URL is of, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise ConfigError(
            f"{url!r} is remote storage, and the package 'fsspec' is missing", "pip install fsspec"
        ) from None
    with _reaching(url):
        return fsspec.core.url_to_fs(url)


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every file system raises its own kinds
        known = "give a URL that fsspec knows, such as s3://, gs://, hf:// or file://, with the package that it names"
        unknown = isinstance(error, ImportError | ValueError)
        message = str(error) if unknown else f"{type(error).__name__}: {error}"
        hint = known if unknown else "see that it can be reached from here, and that you may read it"
        raise ConfigError(f"{url!r} cannot be reached: {message}", hint) from None


def fetch_folder(url: str, folder: Path) -> Path:
    """Copies a folder from there; it appears whole or not at all."""
    with _fetched_beside(url, folder) as partial:
        os.rename(partial, folder)
    return folder


def fetch_checkpoint(url: str, final: Path) -> str | None:
    """Copies a checkpoint from there, in place of one that may be here; what is wrong with it, if it is no good one."""
    with _fetched_beside(url, final) as partial:
        found = fault(partial, contents=True)
        if found is None:
            put_in_place(partial, final)
            tidy(final.parent)
    return found


def is_here(url: str, final: Path, contents: bool = True) -> bool:
    """Whether this is the checkpoint that lies there, byte for byte with `contents`."""
    system, path = open_remote(url)
    with _blaming(url):
        there = system.cat_file(f"{path.rstrip('/')}/{MARKER}")
    marker = final / MARKER
    return marker.is_file() and marker.read_bytes() == there and fault(final, contents) is None


def index_of(url: str) -> Record:
    """What a checkpoint there says of itself."""
    system, path = open_remote(url)
    with _blaming(url):
        return read_record(Record, system.cat_file(f"{path.rstrip('/')}/{STATE_FILE}"))


@contextlib.contextmanager
def _fetched_beside(url: str, folder: Path) -> Iterator[Path]:
    """What lies there, in a folder that is gone afterwards unless it was given its place."""
    system, path = open_remote(url)
    partial = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.writing"
    try:
        with _blaming(url):
            if not system.isdir(path):
                raise FileNotFoundError("there is no such folder")
            partial.mkdir(parents=True)
            for file in system.find(path):
                inside = os.path.relpath(file, path)
                if not is_inside(inside):
                    raise ValueError(f"{file!r} is not a file of this folder")
                target = partial / inside
                target.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(file, str(target))
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _blaming(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # every file system raises its own kinds
        raise CheckpointError(
            f"{url} cannot be fetched: {type(error).__name__}: {error}", "check the name, and that you may read it"
        ) from error


def local_copy(url: str) -> str:
    """A folder of this machine that holds what lies there, fetched once."""
    name = url.rstrip("/").rpartition("/")[2]
    folder = cache_folder() / "remote" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{name}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        try:
            fetch_folder(url, folder)
        except (CheckpointError, OSError):
            if not folder.is_dir():  # else another process was quicker
                raise
    return str(folder)


def refuse_used(url: str) -> None:
    """A run that begins may not write among the checkpoints of another, nor prune them."""
    system, path = open_remote(url)
    with _reaching(url):
        there = next(_remote_checkpoints(system, path.rstrip("/")), None)
    if there is not None:
        raise ConfigError(
            f"option remote = {url!r} already holds checkpoints of a run, such as {there}",
            "continue that run with resume=auto (--resume auto), or name another place",
        )


def refuse_itself(url: str, folder: Path) -> None:
    """A run's folder is no copy of itself."""
    system, path = open_remote(url)
    if "file" in system.protocol and Path(path).resolve() == folder.resolve():
        raise ConfigError(f"option remote = {url!r} is the run folder itself", "name another place (--remote)")


class Remote:
    """Copies of a run's folder. say: is told what could not be copied. own: names of checkpoints that lie there and,
    like those copied since, go when they are not here any more; others stay."""

    def __init__(self, url: str, folder: Path, say: Callable[[str], None], own: Iterable[str] = ()) -> None:
        self._own = set(own)
        self._copied: bytes | None = None  # the marker of the checkpoint that was copied last
        self._system, path = open_remote(url)
        self.url, self._path, self._folder, self._say = url.rstrip("/"), path.rstrip("/"), folder, say
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="remote", daemon=True)
        self._thread.start()

    def checkpoint(self, path: Path) -> None:
        """Copies the newest, unless a newer one is told of first, and removes there those of this run that are not here
        any more."""
        self._told = path
        self._waiting.put(lambda: self._copy_newest() if path is self._told else None)

    def copy(self, *names: str) -> None:
        """Files and folders of the run's folder, as far as they are there."""
        self._waiting.put(lambda: self._copy_all(names))

    def close(self) -> None:
        """Waits until all is there."""
        self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            try:
                task()
            except Exception as error:  # every file system raises its own kinds
                self._say(f"not copied to {self.url}: {type(error).__name__}: {error}; what is here is complete")

    def _copy_newest(self) -> None:
        newest = latest(self._folder / CHECKPOINTS)
        marker = None if newest is None else (newest / MARKER).read_bytes()
        if newest is None or marker == self._copied:
            return
        self._own.add(newest.name)
        self._unmark(newest.name)
        with self._held(newest) as files:
            self._put(files, f"{CHECKPOINTS}/{newest.name}")
        self._copied = marker
        # One that is whole lies there: only then may those go that were pruned here.
        gone = self._own - {path.name for path in find(self._folder / CHECKPOINTS)} - {newest.name}
        for name in gone.intersection(self._there()):
            self._unmark(name)
            self._system.rm(f"{self._path}/{CHECKPOINTS}/{name}", recursive=True)

    @contextlib.contextmanager
    def _held(self, path: Path) -> Iterator[Path]:
        """The files of a checkpoint, which stay while it is pruned or written again; where the disk has no hard links,
        the checkpoint itself."""
        held = self._folder / _HELD
        shutil.rmtree(held, ignore_errors=True)
        try:
            shutil.copytree(path, held, copy_function=os.link)
            files = held
        except shutil.Error:
            files = path
        try:
            yield files
        finally:
            shutil.rmtree(held, ignore_errors=True)

    def _unmark(self, name: str) -> None:
        """What lies there stops being a checkpoint, before its first file goes or is written again."""
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._path}/{CHECKPOINTS}/{name}/{MARKER}")

    def _there(self) -> list[str]:
        return list(_remote_checkpoints(self._system, self._path))

    def _copy_all(self, names: tuple[str, ...]) -> None:
        for name in names:
            if (self._folder / name).exists():
                self._put(self._folder / name, name)

    def _put(self, source: Path, name: str) -> None:
        files = [source] if source.is_file() else sorted(file for file in source.rglob("*") if file.is_file())
        # What makes a checkpoint complete goes last.
        for file in sorted(files, key=lambda file: file.name == MARKER):
            inside = "" if file == source else f"/{file.relative_to(source).as_posix()}"
            target = f"{self._path}/{name}{inside}"
            self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._system.put_file(str(file), target)


def _remote_checkpoints(system: Any, path: str) -> Iterator[str]:
    folder = f"{path}/{CHECKPOINTS}"
    if system.isdir(folder):
        yield from (entry.rstrip("/").rpartition("/")[2] for entry in system.ls(folder, detail=False))


def fetch_newest(url: str, folder: Path, say: Callable[[str], None] = lambda _: None) -> str | None:
    """Of a run that was copied there, the good checkpoint that was written last, if later than all that are here; its
    name. `say` is told of those that were passed over."""
    newest = latest(folder / CHECKPOINTS)
    here = -1 if newest is None else read_record(Marker, (newest / MARKER).read_bytes()).written
    found = {name: marker.written for name, marker in complete(url).items() if marker.written > here}
    faults: list[str] = []
    for name in sorted(found, key=lambda name: found[name], reverse=True):
        place = f"{url.rstrip('/')}/{CHECKPOINTS}/{name}"
        fault_there = fetch_checkpoint(place, folder / CHECKPOINTS / name)
        if fault_there is None:
            return name
        faults.append(f"{place} cannot be used: {fault_there}")
        say(faults[-1])
    if faults and newest is None:
        raise CheckpointError(
            "the run has checkpoints, but none can be used:\n  " + "\n  ".join(faults),
            "name another place (--remote) to train from the beginning",
        )
    return None


def complete(url: str) -> dict[str, Marker]:
    """The checkpoints of a run that were copied there to the end, by name."""
    system, path = open_remote(url)
    found: dict[str, Marker] = {}
    with _reaching(url):
        names = list(_remote_checkpoints(system, path.rstrip("/")))
    for name in names:
        with _blaming(url), contextlib.suppress(FileNotFoundError, Malformed):  # its copy was interrupted
            marker = system.cat_file(f"{path.rstrip('/')}/{CHECKPOINTS}/{name}/{MARKER}")
            found[name] = read_record(Marker, marker)
    return found

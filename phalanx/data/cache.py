"""Where data is kept that was read: in the cache folder, of which is said what cannot be written there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.errors import DataError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"what is read of the data cannot be kept in {folder}: {error.strerror or error}",
            "make room there, or set PHALANX_CACHE to a folder that can be written",
        ) from error


def scratch(cache: Path, prefix: str) -> Path:
    """A new folder in the cache."""
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=cache))

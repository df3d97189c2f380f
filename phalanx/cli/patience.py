"""Says on stderr what takes long, and nothing about what does not."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_SECONDS = 2.0


@contextlib.contextmanager
def patiently(what: str, seconds: float = _SECONDS) -> Iterator[None]:
    """Names what is being done once it has taken `seconds`."""
    timer = threading.Timer(seconds, lambda: print(f"{what} …", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

"""Values that are known to be asked for soon, made ahead by threads.

A random draw of a CPU runs on one thread, so that a large model's initial values would take minutes; each tensor's
values depend on its name alone, so that many can be drawn at once and are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

_WAITING_BYTES = 1 << 30  # of values that were made and not taken yet, besides what each thread is at


class Ahead:
    """names: with the bytes of their values, in the order in which they will be asked for. make: gives those of one, in
    memory that nobody else uses."""

    def __init__(self, make: Callable[[str], Tensor], names: Sequence[tuple[str, int]], threads: int) -> None:
        self._make, self._sizes = make, dict(names)
        self._queue = deque(self._sizes)
        self._made: dict[str, Future[Tensor]] = {}
        self._most = max(1, threads)
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="values")
        self._begin_more()

    def take(self, name: str) -> Tensor:
        """Whatever the order; what was not foreseen, or was taken before, is made now."""
        found = self._made.pop(name, None)
        if found is None and name in self._queue:
            self._queue.remove(name)
        values = self._make(name) if found is None else found.result()
        self._begin_more()
        return values

    def _begin_more(self) -> None:
        waiting = sum(self._sizes[name] for name in self._made)
        while self._queue and (len(self._made) < self._most or waiting < _WAITING_BYTES):
            name = self._queue.popleft()
            self._made[name] = self._threads.submit(self._make, name)
            waiting += self._sizes[name]
        if not self._queue:
            self._threads.shutdown(wait=False)

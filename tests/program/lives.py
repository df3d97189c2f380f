"""How many bytes a table says are there, row by row."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.predict.memory import changes_in_order
from phalanx.program.values import Table, Value


def live_bytes(table: Table, size: Callable[[Value], int], *, on_host: bool = False) -> list[int]:
    """Bytes of the values that exist on the device, or on the host, after each row, each piece of memory once."""
    now, found = 0, list[int]()

    def here(value: Value) -> int:
        return size(value) if value.is_on_host == on_host else 0

    for changes in changes_in_order(table, here, here):
        now += sum(change for _, _, change in changes)
        found.append(now)
    return found

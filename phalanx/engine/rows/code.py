"""The call of a row as a function that is written out: no loop over arguments or results and no call but the row's own,
which would take as long as all else that an instruction does.

Rows that do the same with other values are the same text, which Python compiles once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any

from phalanx.engine.linked import Argument, Run


class Code:
    """Lines about `values` and `step`, the arguments of a `Run`."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._bound: list[Any] = []

    def bind(self, value: Any) -> str:
        """What stands for it in a line."""
        self._bound.append(value)
        return f"b{len(self._bound) - 1}"

    def line(self, text: str) -> None:
        self._lines.append(text)

    def taken(self, arguments: Sequence[Argument]) -> str:
        """Arguments from where they lie: those that follow each other in one place all at once, because a backward
        takes dozens of tensors that its forward saved together."""
        found: list[str] = []
        for place, run in groupby(arguments, key=itemgetter(0)):
            keys, value = [key for _, key in run], f"values[{self.bind(place)}]"
            if len(keys) > 1 and None not in keys:
                found.append(f"*{self.bind(itemgetter(*keys))}({value})")
            else:
                found += [value if key is None else f"{value}[{self.bind(key)}]" for key in keys]
        return ", ".join(found)

    def run(self) -> Run:
        return _made(len(self._bound), "\n        ".join(self._lines or ["pass"]))(*self._bound)


@cache
def _made(bound: int, body: str) -> Any:
    names = ", ".join(f"b{i}" for i in range(bound))
    scope: dict[str, Any] = {}
    exec(f"def make({names}):\n    def run(values, step):\n        {body}\n    return run", scope)
    return scope["make"]

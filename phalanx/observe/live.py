"""The live display on a terminal: a bar, the numbers of the newest step below it, messages scrolling above.

It draws when a step arrives (at most ten times a second) and starts no thread of its own.
"""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from phalanx.observe.format import field_texts
from phalanx.observe.progress import Record, SmoothedLoss, step_texts

_SECONDS_BETWEEN_DRAWS = 0.1


class LiveProgress:
    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        self._bar = Bar(
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            console=self._console,
            auto_refresh=False,
            expand=True,
        )
        self._live: Live | None = None
        self._smooth = SmoothedLoss()
        self._numbers = Text("waiting for the first step", style="dim")
        self._drawn = 0.0

    def start(self, header: Record, total_steps: int, first_step: int = 0) -> None:
        self._console.print(_table(header))
        self._bar.add_task("training", total=total_steps, completed=first_step)
        self._live = Live(self._view(), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def step(self, record: Record) -> None:
        assert self._live is not None, "start() comes before step()"
        task = self._bar.tasks[0]
        self._bar.update(task.id, completed=record["step"])
        parts = step_texts(record, self._smooth.add(record))
        self._numbers = Text(" · ").join(Text(part) for part in parts)
        if record.get("skipped") or record.get("eval_loss") is not None:
            self.message(f"step {record['step']}  " + "  ".join(parts))
        if time.monotonic() - self._drawn >= _SECONDS_BETWEEN_DRAWS or record["step"] == task.total:
            self._drawn = time.monotonic()
            self._live.update(self._view(), refresh=True)

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def finish(self, summary: Record) -> None:
        self.close()
        self._console.print(_table(summary))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _view(self) -> Group:
        return Group(self._bar, self._numbers)


def _table(values: Record) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in values.items():
        label, text = field_texts(name, value)
        table.add_row(Text(label, style="bold"), Text(text))
    return table

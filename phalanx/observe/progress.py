"""What a run prints while it trains: a live display, plain lines, JSON lines or nothing.

Progress only shows records; it measures nothing and keeps nothing. The live display draws when a step arrives (at most
ten times a second) and starts no thread of its own.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from phalanx.observe.format import bytes_text, field_texts, number_text, seconds_text
from phalanx.observe.runlog import json_line

Record = Mapping[str, Any]


class Progress(Protocol):
    """How a run reports. `close` restores the terminal and may be called at any time, also after an error."""

    def start(self, header: Record, total_steps: int, first_step: int = 0) -> None:
        """Show what is trained. `first_step` steps are done already when a run is resumed."""
        ...

    def step(self, record: Record) -> None:
        """Show one finished step; record["step"] counts finished steps, so the first one is 1."""
        ...

    def message(self, text: str) -> None: ...

    def finish(self, summary: Record) -> None: ...

    def close(self) -> None: ...


def make_progress(mode: str, json: bool = False, log_every: int = 10, stream: TextIO | None = None) -> Progress:
    """The display for the options progress, json_output and log_every; "auto" is live on a terminal, else plain."""
    out = cast(TextIO, LastingStream(sys.stdout if stream is None else stream))
    if json:
        return JsonProgress(out)
    if mode == "auto":
        mode = "rich" if out.isatty() and os.environ.get("TERM") != "dumb" else "plain"
    if mode == "rich":
        return LiveProgress(out)
    assert mode in ("plain", "off"), mode
    return PlainProgress(out, log_every) if mode == "plain" else SilentProgress()


class LastingStream:
    """A stream whose reader may leave: a terminal that is closed or a pipe that nobody reads ends the display, and not
    the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._let_go()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _let_go(self) -> None:
        """What is still in the stream's buffer, and what others write there, goes nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


class SilentProgress:
    def start(self, header: Record, total_steps: int, first_step: int = 0) -> None: ...
    def step(self, record: Record) -> None: ...
    def message(self, text: str) -> None: ...
    def finish(self, summary: Record) -> None: ...
    def close(self) -> None: ...


class JsonProgress:
    """One JSON object per line: kinds start, step (every one of them), message, finish."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def start(self, header: Record, total_steps: int, first_step: int = 0) -> None:
        self._write("start", {**header, "total_steps": total_steps, "first_step": first_step})

    def step(self, record: Record) -> None:
        self._write("step", record)

    def message(self, text: str) -> None:
        self._write("message", {"text": text})

    def finish(self, summary: Record) -> None:
        self._write("finish", summary)

    def close(self) -> None: ...

    def _write(self, kind: str, record: Record) -> None:
        print(json_line({"kind": kind, **record}), file=self._stream, flush=True)


class PlainProgress:
    """A line for the first, the last and every `log_every`-th step, and for each step that evaluated or was skipped."""

    def __init__(self, stream: TextIO, log_every: int) -> None:
        self._stream = stream
        self._log_every = log_every
        self._smooth = SmoothedLoss()
        self._total = 0
        self._first = 0

    def start(self, header: Record, total_steps: int, first_step: int = 0) -> None:
        self._total, self._first = total_steps, first_step
        self._write_table(header)

    def step(self, record: Record) -> None:
        smoothed = self._smooth.add(record)
        step = record["step"]
        due = step % self._log_every == 0 or step in (self._first + 1, self._total)
        if due or record.get("skipped") or record.get("eval_loss") is not None:
            self.message("  ".join([f"step {step}/{self._total}", *step_texts(record, smoothed)]))

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def finish(self, summary: Record) -> None:
        self._write_table(summary)

    def close(self) -> None: ...

    def _write_table(self, values: Record) -> None:
        rows = table_rows(values)
        width = max((len(name) for name, _ in rows), default=0)
        for name, text in rows:
            self.message(f"{name:<{width}}  {text}")


def table_rows(values: Record) -> list[tuple[str, str]]:
    """(label, text) of every value; one with a prediction is followed by it: 258ms, predicted 251ms."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        label, text = field_texts(name, value)
        predicted = values.get(f"predicted_{name}")
        if predicted is not None:
            text += f", predicted {field_texts(name, predicted)[1]}"
        if not (name.startswith("predicted_") and name.removeprefix("predicted_") in values):
            rows.append((label, text))
    return rows


class SmoothedLoss:
    """Exponential average without the usual pull towards its starting value; skipped steps do not count."""

    def __init__(self, decay: float = 0.9) -> None:
        self._decay = decay
        self._sum = 0.0
        self._weight = 0.0

    def add(self, record: Record) -> float:
        """Take in a step's loss and return the average (nan before the first finite one)."""
        loss = record["loss"]
        if not record.get("skipped") and math.isfinite(loss):
            self._sum = self._decay * self._sum + (1 - self._decay) * loss
            self._weight = self._decay * self._weight + (1 - self._decay)
        return self._sum / self._weight if self._weight else math.nan


def step_texts(record: Record, smoothed: float) -> list[str]:
    """The parts of a step's line, in reading order."""
    parts = [f"loss {record['loss']:.4f} (smoothed {smoothed:.4f})"]
    if record.get("eval_loss") is not None:
        parts.append(f"eval {record['eval_loss']:.4f}")
        parts += [f"{name.removeprefix('eval_')} {record[name]:.4g}" for name in record if _is_metric(name)]
    parts.append(f"lr {record['lr']:.2e}")
    if record.get("grad_norm") is not None:
        parts.append(f"grad {record['grad_norm']:.3g}")
    parts += [f"{number_text(record['tokens_per_second'])} {record.get('unit', 'tokens')}/s", speed_text(record)]
    parts += [bytes_text(record["memory_bytes"]), f"eta {seconds_text(record['eta_seconds'])}"]
    if record.get("skipped"):
        parts.append("SKIPPED: a spike" if record.get("spike") else "SKIPPED: gradients are not finite")
    return parts


def _is_metric(name: str) -> bool:
    """Whether it was asked for; perplexity says of the loss what the loss says."""
    return name.startswith("eval_") and name not in ("eval_loss", "eval_perplexity")


def speed_text(record: Record) -> str:
    """MFU where the device's peak is known, else FLOP/s."""
    if record.get("mfu") is not None:
        return f"MFU {record['mfu']:.1%}"
    return number_text(record["flops_per_second"], "FLOP/s")


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
    for label, text in table_rows(values):
        table.add_row(Text(label, style="bold"), Text(text))
    return table

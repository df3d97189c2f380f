"""Saves checkpoints behind training's back: a snapshot now, the writing in a thread.

One save runs at a time. An error of the background thread is raised by the next call, never lost. What a checkpoint
is and how it is written is `checkpoint`'s work.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.state import checkpoint

if TYPE_CHECKING:
    from torch import Tensor


class AsyncSaver:
    """Saves into one folder, keeping the `keep` newest checkpoints. `last` is the newest one this saver completed."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last: Path | None = None

    def save(self, step: int, tensors: Iterable[tuple[str, Tensor]], state: dict[str, Any]) -> None:
        """Copies everything to the CPU, after which the caller may change it, and starts writing.

        Waits for the save before, whose error it raises.
        """
        self.wait()
        snapshot = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors]
        # Not a daemon: a program that ends normally finishes its last checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(step, snapshot, copy.deepcopy(state)), name=f"checkpoint-{step}"
        )
        self._thread.start()

    def wait(self) -> Path | None:
        """Returns the newest completed checkpoint once nothing is being written; raises what went wrong since."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.last

    def _write(self, step: int, snapshot: list[tuple[str, Tensor]], state: dict[str, Any]) -> None:
        try:
            self.last = checkpoint.save(self._folder, step, snapshot, state, self._keep)
        except BaseException as error:
            self._error = error

"""Saves checkpoints behind training's back: a snapshot now, the writing in a thread.

One save runs at a time. An error of the background thread, on this rank or another, is raised by the next call, never
lost. What a checkpoint is and how it is written is `saving`'s work.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.state import saving
from phalanx.state.layout import Holding
from phalanx.state.meeting import TIMEOUT, Meeting
from phalanx.state.rendezvous import LocalRendezvous, Rendezvous

if TYPE_CHECKING:
    from torch import Tensor


class AsyncSaver:
    """Saves into one folder, keeping the `keep` newest checkpoints. `last` is the newest one this saver completed.

    With several ranks each has a saver, all save the same steps in the same order, and `rendezvous` joins them.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        rank: int = 0,
        world: int = 1,
        rendezvous: Rendezvous | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        assert world == 1 or rendezvous is not None, "several ranks need a rendezvous"
        self._folder, self._keep = folder, keep
        self._rank, self._world = rank, world
        self._rendezvous = rendezvous or LocalRendezvous(rank)
        self._timeout = timeout
        self._meetings: list[Meeting] = []
        self._num_saves = 0
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.last: Path | None = None

    def save(self, step: int, pieces: saving.Pieces, state: dict[str, Any]) -> None:
        """Copies what this rank owns to the CPU, after which the caller may change it, and starts writing.

        Waits for the save before, whose error it raises.
        """
        self.wait()
        meeting = self._next_meeting()
        try:
            snapshot = _snapshot(pieces)
            kept = copy.deepcopy(state)
        except BaseException as error:
            for phase in saving.PHASES:
                meeting.fail(phase, error)
            raise
        # Not a daemon: a program that ends normally finishes its last checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(step, snapshot, kept, meeting), name=f"checkpoint-{step}"
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

    def give_up(self) -> None:
        """Stops waiting for other ranks, because they are known to be gone; `wait` then raises soon."""
        self._given_up.set()

    def _next_meeting(self) -> Meeting:
        key = f"checkpoint/{self._num_saves}"
        self._num_saves += 1
        meeting = Meeting(self._rank, self._world, self._rendezvous, self._timeout, key, self._given_up)
        self._meetings.append(meeting)
        # Whoever takes part in the save before this one has ended those before it.
        for old in self._meetings[:-2]:
            for phase in saving.PHASES:
                old.forget(phase)
        del self._meetings[:-2]
        return meeting

    def _write(
        self, step: int, snapshot: list[tuple[Holding, Tensor]], state: dict[str, Any], meeting: Meeting
    ) -> None:
        try:
            self.last = saving.save(self._folder, step, snapshot, state, self._keep, meeting=meeting)
        except BaseException as error:
            self._error = error


def _snapshot(pieces: saving.Pieces) -> list[tuple[Holding, Tensor]]:
    """Copies in memory of their own; from a GPU through pinned memory, all copies in flight together."""
    import torch

    copies: list[tuple[Holding, Tensor]] = []
    devices: set[torch.device] = set()
    for holding, data in saving.owned_pieces(pieces):
        if data.is_cuda:
            devices.add(data.device)
            target = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            copies.append((holding, target.copy_(data.detach(), non_blocking=True)))
        else:
            copies.append((holding, data.detach().to("cpu", copy=True)))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies

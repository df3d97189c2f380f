"""Checkpoints behind training's back: what a rank owns is copied to the memory of its host, and written from there in a
thread while training goes on. What is written how is `saving`'s work.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.state.host_copies import HostCopies, memory_like
from phalanx.state.rendezvous import TIMEOUT, LocalRendezvous, Meeting, Rendezvous
from phalanx.state.saving import PHASES, Pieces, StorageError, owned_pieces, save

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class SaveFacts:
    """What one save cost this rank: how long training stood still, and how long writing took, verifying included where
    older ones were deleted."""

    copied_bytes: int = 0
    in_background: bool = True
    stall_seconds: float = 0.0
    write_seconds: float | None = None


class AsyncSaver:
    """Saves into one folder, keeping the `keep` newest checkpoints. `last` is the newest one this saver completed.

    With several ranks each has a saver, all save the same steps in the same order, and `rendezvous` joins them. room:
    says how many bytes of the host this rank may take for copies, where there is a limit.
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
        still_ours: Callable[[], None] = lambda: None,
        room: Callable[[], int | None] = lambda: None,
    ) -> None:
        assert world == 1 or rendezvous is not None, "several ranks need a rendezvous"
        self._folder, self._keep = folder, keep
        self._rank, self._world = rank, world
        self._rendezvous = rendezvous or LocalRendezvous(rank)
        self._timeout, self._still_ours, self._room = timeout, still_ours, room
        self._copies = HostCopies()
        self._preparing: threading.Thread | None = None
        self._meetings: list[Meeting] = []
        self._num_saves = 0
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._refused: StorageError | None = None
        self.last: Path | None = None
        self.facts = SaveFacts()  # of the newest save, as far as it has come
        self.is_saving = False  # whether a checkpoint was begun that is neither complete nor refused by the disk

    def prepare(self, pieces: Pieces) -> None:
        """Begins to make the memory for copies, in a thread."""
        memory, room, on_gpu = list[tuple[str, "Tensor"]](), self._room(), False
        for shard, data in owned_pieces(pieces):
            memory.append((shard.name, memory_like(data)))
            on_gpu = on_gpu or data.is_cuda
        if room is None or sum(own.nbytes for _, own in memory) <= room:
            self._preparing = threading.Thread(
                target=self._copies.prepare, args=(memory, on_gpu), name="host-memory", daemon=True
            )
            self._preparing.start()

    def save(self, step: int, pieces: Pieces, state: dict[str, Any], spare: int | None = None) -> None:
        """Copies what this rank owns to the memory of the host, after which the caller may change it, and starts
        writing. Where there is no room for copies, the caller waits until it is written.

        Waits for the save before, whose error it raises, except for a refusal of the disk.
        """
        began = time.perf_counter()
        self.wait()
        meeting, self.is_saving = self._next_meeting(), True
        try:
            copies, rest = self._copies.take(owned_pieces(pieces), self._room())
            kept = copy.deepcopy(state)
        except BaseException as error:
            for phase in PHASES:
                meeting.fail(phase, error)
            raise
        self.facts = SaveFacts(sum(data.nbytes for _, data in copies), in_background=rest is None)
        whole = copies if rest is None else itertools.chain(copies, rest)
        # Not a daemon: a program that ends normally finishes its last checkpoint.
        self._thread = threading.Thread(
            target=self._write, args=(step, whole, kept, meeting, spare), name=f"checkpoint-{step}"
        )
        self._thread.start()
        if rest is not None:
            self._thread.join()
        self.facts.stall_seconds = time.perf_counter() - began

    def take_refusal(self) -> StorageError | None:
        """Why the disk refused a save since this was last asked: no reason to end a run whose values are in memory."""
        refused, self._refused = self._refused, None
        return refused

    def wait(self) -> Path | None:
        """Returns the newest completed checkpoint once nothing is being written; raises what went wrong since, except
        what `take_refusal` tells."""
        for thread in (self._preparing, self._thread):
            if thread is not None:
                thread.join()
        self._preparing = self._thread = None
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
            for phase in PHASES:
                old.forget(phase)
        del self._meetings[:-2]
        return meeting

    def _write(self, step: int, pieces: Pieces, state: dict[str, Any], meeting: Meeting, spare: int | None) -> None:
        began, facts = time.perf_counter(), self.facts
        try:
            saved = save(
                self._folder, step, pieces, state, self._keep, meeting=meeting, still_ours=self._still_ours,
                spare=spare, held=True,
            )  # fmt: skip
            facts.write_seconds = time.perf_counter() - began
            self.last, self.is_saving = saved, False
        except StorageError as error:
            error.step = step
            self._refused, self.is_saving = error, False
        except BaseException as error:
            self._error = error

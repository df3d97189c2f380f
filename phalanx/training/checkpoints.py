"""The checkpoints of a run under way: what was written or refused is told, and the last is tried until it is there."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from phalanx.errors import CheckpointError, PhalanxError
from phalanx.launch.context import RankContext
from phalanx.launch.signals import StopRequest
from phalanx.observe.phases import Phases
from phalanx.session.spare import Member
from phalanx.state.saving import StorageError
from phalanx.state.snapshot import Snapshot
from phalanx.training.folder import RunFolder
from phalanx.training.reporting import Reporter

# A last checkpoint that the disk refuses is tried for an hour, in which somebody may make room.
_TRY_AGAIN_SECONDS, _TRIES = 10.0, 360


class Checkpoints:
    """resumed: the one that the run went on from."""

    def __init__(
        self, folder: RunFolder, context: RankContext, reporter: Reporter, phases: Phases, resumed: Path | None
    ) -> None:
        self._folder, self._context, self._reporter, self._phases = folder, context, reporter, phases
        self._saver, self._resumed = folder.saver(), resumed

    @property
    def last(self) -> Path | None:
        """The newest that this run wrote."""
        return self._saver.last

    def newest(self) -> Path | None:
        """Waits for what is on its way."""
        return self._saver.wait() or self._resumed

    def break_off(self) -> bool:
        """Other ranks were lost: what is on its way to the disk is given up. Whether something was."""
        self._saver.give_up()
        self.settle()
        return self._saver.is_saving

    def enter(self, context: RankContext) -> None:
        """From now on with the ranks of another generation."""
        last = self._saver.last
        self._context, self._saver = context, self._folder.saver()
        self._saver.last = last

    def prepare(self, member: Member) -> None:
        """Makes memory for copies while training goes on. Only for GPUs: beside them the host has memory to spare."""
        if self._context.device != "cpu":
            self._saver.prepare(member.state.shards())

    def save(self, snapshot: Snapshot, member: Member, keeps_best: bool = False) -> None:
        """keeps_best: besides the newest."""
        self._reporter.flush()
        with self._reporter.paused(), self._phases.phase("checkpoint"), self._context.slot.within("save"):
            began = time.perf_counter()
            self._saver.wait()
            self.tell()
            snapshot.optimizer, snapshot.loss_scale = member.state.scalars()
            spare = snapshot.best_step if keeps_best else None
            self._saver.save(snapshot.step, member.state.shards(), snapshot.to_json(), spare)
            self._saver.facts.stall_seconds = time.perf_counter() - began  # the one before may have been on its way

    def save_at_last(self, snapshot: Snapshot, member: Member, stop: StopRequest, keeps_best: bool = False) -> None:
        """Waits for the last checkpoint; while the disk refuses it, tries again: the values are in memory only.

        All ranks see every refusal alike, and so try equally often.
        """
        signalled = stop.signal
        for _ in range(_TRIES):
            self._saver.wait()
            refused = self.tell(last=True)
            if refused is None:
                return
            time.sleep(_TRY_AGAIN_SECONDS)
            if self._context.abort.reason is not None or stop.signal is not signalled:
                raise refused
            self.save(snapshot, member, keeps_best)
        raise CheckpointError(
            f"the last checkpoint could not be saved for {_TRIES * _TRY_AGAIN_SECONDS / 60:.0f} minutes",
            f"the newest is {self._saver.last or self._resumed or 'none'}; make room and go on with --resume auto",
        )

    def tell(self, last: bool = False) -> StorageError | None:
        """Reports what became of saves since it was last asked; the refusal, if the newest was refused."""
        saver, remote = self._saver, self._folder.remote
        if self._reporter.saved(saver.last, saver.facts) and remote is not None and saver.last is not None:
            remote.checkpoint(saver.last)
        refused = saver.take_refusal()
        if refused is not None:
            self._reporter.refused(refused, saver.last or self._resumed, last)
        return refused

    def settle(self) -> None:
        """After an error a checkpoint may still be on its way to the disk; the error is what the user must see."""
        with contextlib.suppress(PhalanxError):
            self._saver.wait()

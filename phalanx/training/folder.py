"""The folder of a run, as one rank has it: locked by rank 0 for as long as the run lasts, cleared of what killed runs
left, with a copy of it in remote storage where that was asked for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.config import RunConfig
from phalanx.errors import CheckpointError, ConfigError, LinkError
from phalanx.launch.context import RankContext
from phalanx.launch.store import forget_secrets
from phalanx.plan.plan import Plan
from phalanx.prepare.budget import free_main_memory
from phalanx.state.background import AsyncSaver
from phalanx.state.checkpoint import Checkpoint
from phalanx.state.folders import find, replace_text
from phalanx.state.folders import tidy as tidy_checkpoints
from phalanx.state.huggingface import tidy as tidy_export
from phalanx.state.lock import RunLock
from phalanx.state.remote import Remote, fetch_checkpoint, fetch_newest, is_here, is_remote, refuse_itself, refuse_used
from phalanx.state.remote_runs import gone_on_from, own_checkpoints
from phalanx.state.rendezvous import LocalRendezvous, Meeting, MissingRanks, RankFailed, StoreRendezvous
from phalanx.state.snapshot import checkpoint_to_resume
from phalanx.training.job import stop_file

_FOR_COPIES = 0.9  # of what is free on the host
Say = Callable[[str], None]


class RunFolder:
    """`remote` is rank 0's, if there is one."""

    remote: Remote | None = None

    def __init__(self, path: Path, config: RunConfig, context: RankContext) -> None:
        self.path, self.config, self.context = path, config, context
        self.checkpoints = path / "checkpoints"
        self._own_remotely = set[str]()  # on rank 0: checkpoints in remote storage that this run may remove
        self._still_ours: Callable[[], None] = lambda: None  # on rank 0: whether the lock holds

    def take(self, stack: contextlib.ExitStack, say: Say) -> None:
        """Rank 0 locks the run folder and clears what killed runs left in it; the others wait until it has."""
        context = self.context
        self._meeting = self.meeting(context)
        lock = RunLock(self.path, say)

        def take() -> None:
            stack.enter_context(lock)
            tidy_checkpoints(self.checkpoints)
            tidy_export(self.path / "export")
            stop_file(self.path).unlink(missing_ok=True)
            self._fetch(say)

        with blaming_others():
            self._meeting.agree("lock", 1, take)
            self._meeting.agree("there", context.world, lambda: None)
        if context.rank == 0:
            self._still_ours = lock.still_ours
            forget_secrets(self.path)
            self._open_remote(stack, say)

    def meeting(self, context: RankContext) -> Meeting:
        """Of the ranks of a generation."""
        given_up = threading.Event()
        context.abort.listen(given_up.set)
        rendezvous = StoreRendezvous(context.store, context.rank) if context.world > 1 else LocalRendezvous()
        return Meeting(context.rank, context.world, rendezvous, key="start", given_up=given_up)

    def enter(self, context: RankContext) -> None:
        """From now on as a rank of another generation."""
        self.context = context

    def take_over(self, stack: contextlib.ExitStack, say: Say) -> None:
        """Rank 0's part where the rank 0 that had the folder was lost."""
        lock = stack.enter_context(RunLock(self.path, say))
        self._still_ours = lock.still_ours
        if self.config.remote is not None:
            with contextlib.suppress(Exception):  # of any file system; then what lies there already stays
                self._own_remotely = own_checkpoints(self.config.remote, self.checkpoints, None)
        self._open_remote(stack, say)

    def tidy(self) -> None:
        """Rank 0 clears what a lost rank left half written."""
        if self.context.rank == 0:
            tidy_checkpoints(self.checkpoints)

    @property
    def named(self) -> Path | None:
        """The checkpoint that the option `resume` names, if it names one."""
        resume = self.config.resume
        if is_remote(resume):
            return self.checkpoints / resume.rstrip("/").rpartition("/")[2]
        return None if resume in ("never", "auto") else Path(resume).expanduser()

    def to_resume(self, say: Say) -> Checkpoint | None:
        """The checkpoint to go on from."""
        return self._open(self.config.resume if self.named is None else str(self.named), self._meeting, say)

    def to_go_back_to(self, has_saved: bool, meeting: Meeting, say: Say) -> Checkpoint | None:
        """After a loss. has_saved: whether this run has written a checkpoint itself; until then it goes back to the one
        that it was told to go on from."""
        return self._open("auto" if has_saved or self.named is None else str(self.named), meeting, say)

    def _open(self, resume: str, meeting: Meeting, say: Say) -> Checkpoint | None:
        with blaming_others():
            return checkpoint_to_resume(resume, self.checkpoints, meeting, say)

    def write_settings(self, plan: Plan) -> None:
        """By rank 0."""
        if self.context.rank > 0:
            return
        try:
            replace_text(self.path / "config.yaml", self.config.to_yaml())
            replace_text(self.path / "plan.json", plan.to_json() + "\n")
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.path} cannot be written: {error.strerror}", "choose another folder (--out)"
            ) from None

    def saver(self) -> AsyncSaver:
        context = self.context
        meeting = StoreRendezvous(context.store, context.rank) if context.world > 1 else None
        saver = AsyncSaver(
            self.checkpoints, self.config.keep_checkpoints, rank=context.rank, world=context.world, rendezvous=meeting,
            still_ours=self._still_ours, room=self._room,
        )  # fmt: skip
        context.abort.listen(saver.give_up)
        return saver

    def _room(self) -> int | None:
        """For copies of state, on a host that ranks of this run share."""
        free = free_main_memory()
        return None if free is None else int(_FOR_COPIES * free) // self.context.local_world

    def _open_remote(self, stack: contextlib.ExitStack, say: Say) -> None:
        """At the end of the run what is to be copied has been, or somebody was told."""
        if self.config.remote is None:
            return
        remote = self.remote = Remote(self.config.remote, self.path, say, self._own_remotely)
        stack.callback(remote.close)
        stack.callback(remote.copy, "config.yaml", "plan.json", "log-rank0.jsonl", "export", "export-dcp")

    def _fetch(self, say: Say) -> None:
        """What is to be gone on from and lies in remote storage is brought here."""
        config, named = self.config, self.named
        if config.remote is not None:
            refuse_itself(config.remote, self.path)
        if is_remote(config.resume):
            assert named is not None
            if not is_here(config.resume, named):
                if found := fetch_checkpoint(config.resume, named):
                    raise CheckpointError(f"the checkpoint {config.resume} cannot be used: {found}", "name another one")
                say(f"fetched {config.resume}")
        if config.remote is not None and config.resume == "never":
            refuse_used(config.remote)
        elif config.remote is not None:
            self._own_remotely = self._owned_at(config.remote)
            if config.resume == "auto" and (newest := fetch_newest(config.remote, self.path, say)):
                say(f"fetched {newest} from {config.remote}")
                self._own_remotely = self._owned_at(config.remote)

    def _owned_at(self, url: str) -> set[str]:
        origin = gone_on_from(find(self.checkpoints) if self.named is None else [self.named])
        return own_checkpoints(url, self.checkpoints, origin)


@contextlib.contextmanager
def blaming_others() -> Iterator[None]:
    """Around what ranks do together: who only heard that another failed leaves it to that one to say why."""
    try:
        yield
    except (RankFailed, MissingRanks) as error:
        raise LinkError(str(error)) from error

"""What a run must remember to go on as if it had never stopped, and whether a checkpoint can be gone on from.

A snapshot is the part of a checkpoint that is not tensors: counters, the options that shape the trajectory, and marks
by which model and data are recognised. Files are `checkpoint`'s work.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.config import RunConfig
from phalanx.errors import CheckpointError, ConfigError, counted
from phalanx.state import checkpoint
from phalanx.state.folders import refuse_used
from phalanx.state.rendezvous import Meeting

# Changing one of these would change what comes next. The plan, the device and all that is shown or saved may change,
# and so may the number of steps; model and data are recognised by what they are, not by what they are called.
TRAJECTORY = (
    "task", "tiny", "model_options", "dropout", "freeze", "lora", "documents", "shuffle", "seq_len", "batch_size",
    "seq_len_at", "batch_size_at", "dtype", "master_weights", "seed", "clip", "optimizer", "optimizer_options", "lr",
    "betas", "eps", "weight_decay", "groups", "lr_schedule", "warmup_steps", "min_lr_ratio", "lr_steps", "spike_factor",
    "on_spike", "deterministic", "slot_size",
)  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """Something that must be the same when a run goes on: how people call it, and a digest of what it is."""

    name: str
    digest: str


@dataclass
class Snapshot:
    """Counters and marks of a run after `step` steps."""

    config: dict[str, Any]
    model: Mark
    data: Mark
    total_steps: int
    step: int = 0
    samples: int = 0  # consumed since the beginning
    passed_over: int = 0  # of them, those of steps that were gone back from
    loss: float = math.nan
    eval_loss: float | None = None
    best_loss: float | None = None  # the lowest eval loss so far
    best_step: int | None = None
    best_before: tuple[float | None, int | None] = (None, None)  # these two as they were before
    worse_in_a_row: int = 0  # evaluations since then
    skipped: int = 0  # steps, in all
    skipped_in_a_row: int = 0
    recent: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])  # steps that updated, and losses
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    optimizer: dict[str, Any] = field(default_factory=dict)  # scalars of the optimizer's state, by name
    loss_scale: dict[str, float] | None = None  # in float16
    plans: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])  # from which step on which one, and why
    own_lr: float | None = None  # of the last step, where a function of the user's own says it

    def judge(self, step: int, eval_loss: float) -> bool:
        """Takes note of an evaluation; whether it is the best so far."""
        if not (self.best_loss is None or eval_loss < self.best_loss) or math.isnan(eval_loss):
            self.worse_in_a_row += 1
            return False
        self.best_before = self.best_loss, self.best_step
        self.best_loss, self.best_step, self.worse_in_a_row = eval_loss, step, 0
        return True

    def not_saved(self, step: int) -> None:
        """Of this step there is no checkpoint, and nothing to keep as the best."""
        if step == self.best_step:
            self.best_loss, self.best_step = self.best_before

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Snapshot:
        marks = {name: Mark(**record[name]) for name in ("model", "data")}
        return cls(**{**record, **marks})


def digest(*parts: Any) -> str:
    """A short fingerprint of JSON values and bytes."""
    found = hashlib.blake2b(digest_size=12)
    for part in parts:
        found.update(part if isinstance(part, bytes) else json.dumps(part).encode())
    return found.hexdigest()


def checkpoint_to_resume(
    resume: str, folder: Path, meeting: Meeting, say: Callable[[str], None]
) -> checkpoint.Checkpoint | None:
    """The checkpoint that the option `resume` asks for, every byte of it read by one of the ranks; None to start
    afresh. `say` is told of checkpoints that were passed over."""
    try:
        if resume not in ("never", "auto"):
            return checkpoint.open_together(Path(resume).expanduser(), meeting)
        if resume == "auto":
            return checkpoint.open_newest(folder, meeting, say)
        refuse_used(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {folder} cannot be read: {error.strerror or error}",
            "make the folder accessible; to train from the beginning, choose another run folder (--out)",
        ) from None
    return None


def restore(found: checkpoint.Checkpoint, fresh: Snapshot) -> Snapshot:
    """The snapshot in a checkpoint, if the run that begins as `fresh` goes on exactly where that one stopped."""
    try:
        stored = Snapshot.from_json(found.state)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint {found.path} was not written by a training run: {error!r}", "give another one"
        ) from None
    usual = RunConfig().model_dump(mode="json")  # what an option was before there was one
    changed = [
        (name, stored.config.get(name, usual[name]), fresh.config[name])
        for name in TRAJECTORY
        if stored.config.get(name, usual[name]) != fresh.config[name]
    ]
    if not changed:
        # Only then do differing marks mean another model or other data, not another view of the same.
        marks = (("model", stored.model, fresh.model), ("data", stored.data, fresh.data))
        changed = [(name, old.name, new.name) for name, old, new in marks if old.digest != new.digest]
    if changed:
        raise ConfigError(
            f"the run cannot go on from {found.path} exactly, because something changed:\n  "
            + "\n  ".join(_change_text(*change) for change in changed),
            "set them back; or train on from the exported model as a new run (--model EXPORT --out OTHER)",
        )
    if stored.step > fresh.total_steps:
        raise ConfigError(
            f"{found.path} has already trained {counted(stored.step, 'step')}, more than the {fresh.total_steps} asked "
            "for",
            f"set steps to {stored.step} or more",
        )
    # What is still free to change is taken from the run that begins.
    return replace(stored, config=fresh.config, total_steps=fresh.total_steps, model=fresh.model, data=fresh.data)


def _change_text(name: str, old: Any, new: Any) -> str:
    if old != new:
        return f"{name}: was {old!r}, now {new!r}"
    what = "its first sample is another" if name == "data" else "its parameters have other names or shapes"
    return f"{name}: still called {old!r}, but {what} than then"


def resumed_text(found: checkpoint.Checkpoint, total_steps: int) -> str:
    """Where a resumed run comes from, and that it was to have another length, if that is so."""
    before = found.state["total_steps"]
    text = f"from {found.path}, after step {found.step}"
    return text if before == total_steps else f"{text}; the run was to have {counted(before, 'step')} then"

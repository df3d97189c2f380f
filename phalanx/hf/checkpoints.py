"""Checkpoints of a Trainer, `checkpoint-N` in its output folder: the model as a HuggingFace folder, the state of
training as any plan can go on from it, and what transformers keeps of a Trainer as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from phalanx.errors import CheckpointError
from phalanx.own_loop.session import OwnSession

STATE, TRAINER_STATE = "phalanx", "trainer_state.json"
_REST = "trainer_rest.json"  # the schedule's and the random numbers' state


def save(
    folder: Path, session: OwnSession, state: TrainerState, rest: Mapping[str, Any], only_model: bool
) -> None:  # fmt: skip
    """Beside the model, which is there. All ranks call it."""
    if not only_model:
        session.save(folder / STATE)
    if session.is_main:
        state.save_to_json(str(folder / TRAINER_STATE))
        (folder / _REST).write_text(json.dumps(rest), "utf-8")


def load(folder: Path, session: OwnSession) -> tuple[TrainerState, dict[str, Any]]:
    session.load(folder / STATE)
    return TrainerState.load_from_json(str(folder / TRAINER_STATE)), json.loads((folder / _REST).read_text("utf-8"))


def find(wanted: str | Path | bool, args: transformers.TrainingArguments) -> Path:
    """wanted: a checkpoint's folder, or True for the newest one in the output folder."""
    folder: str | Path | None = wanted if not isinstance(wanted, bool) else None
    if folder is None:
        output = Path(args.output_dir or ".")
        folder = get_last_checkpoint(output) if output.is_dir() else None
        if folder is None:
            raise CheckpointError(
                f"resume_from_checkpoint = True: {output} holds no checkpoint", "give the path of one, or leave it out"
            )
    path = Path(folder).expanduser()
    if not (path / STATE).is_dir() or not (path / TRAINER_STATE).is_file():
        others = (path / "optimizer.pt").is_file()
        what = "was written by transformers' own Trainer" if others else "is no checkpoint of phalanx.hf.Trainer"
        raise CheckpointError(
            f"resume_from_checkpoint: {path} {what}",
            "start from its weights with from_pretrained(folder); a checkpoint to resume from holds a folder "
            f"{STATE!r}, which save_only_model=True leaves out",
        )
    return path


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """What of it is plain numbers; functions are made again from the arguments."""
    return {name: value for name, value in scheduler.state_dict().items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True

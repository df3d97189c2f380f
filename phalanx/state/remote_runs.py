"""Whose the checkpoints are that lie in remote storage: a run may not write among those of another, nor prune them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from phalanx.config import RunConfig
from phalanx.errors import CheckpointError, ConfigError, PhalanxError
from phalanx.state import checkpoint
from phalanx.state.remote import CHECKPOINTS, complete, index_of, is_here
from phalanx.state.snapshot import Snapshot, restore


def gone_on_from(paths: Iterable[Path]) -> Snapshot | None:
    """What the first checkpoint says that can be opened and is of a training run."""
    for path in paths:
        with contextlib.suppress(CheckpointError, KeyError, TypeError):
            found = Snapshot.from_json(checkpoint.open(path, verify=False).state)
            # What was no option when it was written; and another run may have more steps.
            config = {**RunConfig().model_dump(mode="json"), **found.config}
            return replace(found, config=config, total_steps=sys.maxsize)
    return None


def own_checkpoints(url: str, here: Path, origin: Snapshot | None) -> set[str]:
    """Names of those there that are also here, or are what the run that goes on from `origin` has behind it. Refuses a
    place that holds those of another run."""
    places = {name: f"{url.rstrip('/')}/{CHECKPOINTS}/{name}" for name in complete(url)}
    own = {name for name, place in places.items() if is_here(place, here / name, contents=False)}
    if origin is None:
        return own
    return own | {name for name, place in places.items() if name not in own and _is_past(url, place, origin)}


def _is_past(url: str, place: str, origin: Snapshot) -> bool:
    """Whether a checkpoint there, of the same run, is of no later step. Refuses one of another run."""
    found = index_of(place)
    try:
        restore(checkpoint.Checkpoint(Path(place), found.step, found.state, {}), origin)
    except PhalanxError as error:
        changes = error.message.partition("\n")[2] or error.message
        raise ConfigError(
            f"option remote = {url!r} already holds checkpoints of another run, such as {place}:\n{changes}",
            "name another place (--remote)",
        ) from None
    return found.step <= origin.step

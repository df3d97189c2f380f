"""A run that fails, as those tell of it who outlive its ranks: in the run's log, where rank 0 knows only what followed
for itself, or is the one that is lost; and with the way on where there is a checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from phalanx.errors import PhalanxError, RankError
from phalanx.launch.context import RankContext
from phalanx.observe.runlog import RunLog, read_log
from phalanx.state.folders import latest
from phalanx.state.lock import Holder, read_holder
from phalanx.training.spikes import RollBack


@contextlib.contextmanager
def failure_told(folder: Path) -> Iterator[None]:
    """Around a job that trains in this folder, of which nothing runs any more when it has failed."""
    began = round(time.time(), 3)
    try:
        yield
    except PhalanxError as error:
        if not error.again and not isinstance(error, RollBack):
            for tell in (_say_how_to_go_on, partial(_log, began=began)):
                with contextlib.suppress(PhalanxError, OSError):  # the folder may be why it failed
                    tell(error, folder)
        raise


@contextlib.contextmanager
def failure_told_by_one(context: RankContext, folder: Path) -> Iterator[None]:
    """The same around a rank among others that nobody supervises: rank 0 raises what ended them all, or rank 1 where
    rank 0 is what was lost."""
    with failure_told(folder) if context.rank < 2 else contextlib.nullcontext():
        yield


def _say_how_to_go_on(error: PhalanxError, folder: Path) -> None:
    """Where nothing better is known to be done."""
    saved = latest(folder / "checkpoints")
    if isinstance(error, RankError) and not error.hint and saved is not None:
        error.hint = f"go on from {saved.name} with --resume auto"
        error.args = (f"{error.message}\n  → {error.hint}",)


def _log(error: PhalanxError, folder: Path, began: float) -> None:
    """Of a run that had begun, unless its log says so already: one line behind the last that rank 0 wrote."""
    path = folder / "log-rank0.jsonl"
    newest = read_log(path)[-1:] if path.is_file() and _is_free(folder) else []
    if newest and newest[0]["time"] >= began and newest[0].get("message") != str(error):
        with RunLog(folder, rank=0) as log:
            log.write("error", error=type(error).__name__, message=str(error), of_run=True)


def _is_free(folder: Path) -> bool:
    """Whether nobody who may still write has the folder: it may be another run's, in which this one was refused."""
    holder = read_holder(folder)
    return holder is None or holder.is_gone(Holder.here())

"""What happened to a rank, and how it is told: as the one error that ends a job, or in the words of a loss."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import LateError, LinkError, PhalanxError, RankError, counted
from phalanx.launch.abort import calls
from phalanx.launch.process import Process
from phalanx.launch.rank_main import Failed
from phalanx.launch.status_board import StatusView

_MOST_SHOWN, _LAST_SHOWN = 16, 8  # ranks, and instructions of each


@dataclass(frozen=True)
class Trouble:
    """One rank's: `failed` if it could still say so itself, else `cause`. `view` is what it was doing."""

    rank: int
    view: StatusView
    cause: str = ""
    hint: str = ""
    failed: Failed | None = None
    output: Sequence[str] = ()  # the last lines it wrote that nobody has seen
    stack: Sequence[str] = ()  # where its main thread stands

    @property
    def is_consequence(self) -> bool:
        return self.failed is not None and isinstance(self.failed.error, LinkError)


def loss_words(trouble: Trouble, rank: int, is_unready: bool) -> str:
    """'rank 1 (stage 1) was killed by signal SIGKILL in step 7 at F1.0'. is_unready: it held nothing yet."""
    view, failed = trouble.view, trouble.failed
    name = f"rank {rank} ({view.place})" if view.place else f"rank {rank}"
    name = f"the process that was to be rank {rank}" if is_unready else name
    said = f"{name} {f'failed ({failed.message})' if failed is not None else trouble.cause} {view.where()}"
    return f"{said}; it stands in {calls(trouble.stack)}" if trouble.stack else said


def stalled(process: Process, view: StatusView, seconds: float, output: Sequence[str], stack: Sequence[str]) -> Trouble:
    cause = f"stopped answering for {seconds:.0f} s"
    if process.stopped:
        hint = f"its process was stopped by a signal (kill -CONT {process.pid} would have let it go on)"
    else:
        hint = "a call keeps all its threads waiting, or the machine is overloaded; a larger silence waits longer"
    return Trouble(process.rank, view, cause, hint, output=output, stack=stack)


def verdict(troubles: Sequence[Trouble], views: Mapping[int, StatusView], not_renewed: str = "") -> PhalanxError:
    """The error to raise. `troubles` are in the order in which they were noticed. not_renewed: why the others did not
    go on although they were to."""
    silent = [trouble for trouble in troubles if trouble.failed is None]
    spoken = [trouble for trouble in troubles if trouble.failed is not None and not trouble.is_consequence]
    if not silent and spoken:
        first = min(spoken, key=lambda trouble: trouble.rank)
        assert first.failed is not None
        if first.failed.error is not None and not isinstance(first.failed.error, RankError):
            return _users_mistake(first, first.failed)
    # Whoever was silent did not fail because of others; a consequence counts only where nothing else is known, and the
    # first of those is who waited too long, since that made the others lose their connections.
    late = [trouble for trouble in troubles if trouble.failed and isinstance(trouble.failed.error, LateError)]
    return _rank_error((silent or spoken or late or troubles)[0], views, not_renewed)


def _users_mistake(trouble: Trouble, failed: Failed) -> PhalanxError:
    """The same error that this process would have raised had it looked itself."""
    assert failed.error is not None
    error = copy.copy(failed.error)
    if trouble.rank > 0:
        error.message = f"rank {trouble.rank}: {error.message}"
        error.args = (f"{error.message}\n  → {error.hint}" if error.hint else error.message,)
    if _debug():
        error.add_note(failed.traceback)
    return error


def _rank_error(trouble: Trouble, views: Mapping[int, StatusView], not_renewed: str = "") -> RankError:
    view = trouble.view
    name = f"rank {trouble.rank} ({view.place})" if view.place else f"rank {trouble.rank}"
    hint, text = trouble.hint, f"{name} {trouble.cause} {view.where()}"
    if trouble.failed is not None:
        error = trouble.failed.error
        hint = error.hint if error else "" if _debug() else "PHALANX_DEBUG=1 shows the traceback"
        text = error.message if trouble.is_consequence and error else (
            f"{name} failed {view.where()}: {trouble.failed.message}"
        )  # fmt: skip
    lines = [text, *([f"  the others did not go on without it: {not_renewed}"] if not_renewed else [])]
    if trouble.is_consequence:
        others = (f"rank {rank} was {other.where()}" for rank, other in views.items() if rank != trouble.rank)
        lines += [f"  meanwhile {other}" for other in others]
    elif trouble.output:
        lines += [f"  the last it wrote (rank {trouble.rank}):", *(f"    {line}" for line in trouble.output)]
    if trouble.failed is None or trouble.is_consequence:
        lines += _flight_record(views)
    if trouble.stack:
        lines += ["  where it stands, the innermost call first:", *(f"    {line}" for line in trouble.stack)]
    if trouble.failed is not None and _debug():
        lines.append(trouble.failed.traceback.rstrip())
    return RankError("\n".join(lines), hint)


def _flight_record(views: Mapping[int, StatusView]) -> list[str]:
    """The last instructions of every rank when the trouble was noticed, of the first few ranks where there are many."""
    known = {rank: view for rank, view in views.items() if view.recent}
    shown = list(known.items())[:_MOST_SHOWN]
    lines = [f"    rank {rank}, step {view.step}: {' '.join(view.recent[-_LAST_SHOWN:])}" for rank, view in shown]
    more = [f"    … and {counted(len(known) - len(shown), 'other rank')}"] if len(known) > len(shown) else []
    return ["  the last instructions of every rank, the newest last:", *lines, *more] if lines else []


def _debug() -> bool:
    return os.environ.get("PHALANX_DEBUG", "0") not in ("", "0")

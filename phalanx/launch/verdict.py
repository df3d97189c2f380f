"""From what went wrong on several ranks to one error that names the one it began with.

When one rank fails, the others fail too a moment later because they waited for it; only the first cause is worth a
user's attention.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import LinkError, PhalanxError, RankError
from phalanx.launch.board import Sight
from phalanx.launch.rank_main import Failed


@dataclass(frozen=True)
class Trouble:
    """One rank's: `failed` if it could still say so itself, else `cause`. `sight` is what it was doing."""

    rank: int
    sight: Sight
    cause: str = ""
    hint: str = ""
    failed: Failed | None = None
    output: Sequence[str] = ()  # the last lines it wrote that nobody has seen

    @property
    def is_consequence(self) -> bool:
        return self.failed is not None and isinstance(self.failed.error, LinkError)


def died(rank: int, sight: Sight, code: int, output: Sequence[str]) -> Trouble:
    """A rank whose process ended in the middle of a job."""
    if code >= 0:
        return Trouble(rank, sight, f"left with exit code {code}", output=output)
    name = signal.Signals(-code).name
    hint = "the kernel does that when memory runs out (dmesg says so)" if name == "SIGKILL" else ""
    return Trouble(rank, sight, f"was killed by signal {name}", hint, output=output)


def stalled(rank: int, sight: Sight, seconds: float, output: Sequence[str]) -> Trouble:
    hint = "it was stopped, or a call keeps all its threads waiting"
    return Trouble(rank, sight, f"stopped answering for {seconds:.0f} s", hint, output=output)


def verdict(troubles: Sequence[Trouble], sights: Mapping[int, Sight]) -> PhalanxError:
    """The error to raise. `troubles` are in the order in which they were noticed."""
    silent = [trouble for trouble in troubles if trouble.failed is None]
    spoken = [trouble for trouble in troubles if trouble.failed is not None and not trouble.is_consequence]
    if not silent and spoken:
        first = min(spoken, key=lambda trouble: trouble.rank)
        assert first.failed is not None
        if first.failed.error is not None and not isinstance(first.failed.error, RankError):
            return _users_mistake(first, first.failed)
    # Whoever was silent did not fail because of others; a consequence counts only where nothing else is known.
    return _rank_error((silent or spoken or troubles)[0], sights)


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


def _rank_error(trouble: Trouble, sights: Mapping[int, Sight]) -> RankError:
    sight = trouble.sight
    name = f"rank {trouble.rank} ({sight.place})" if sight.place else f"rank {trouble.rank}"
    hint, text = trouble.hint, f"{name} {trouble.cause} {sight.where()}"
    if trouble.failed is not None:
        error = trouble.failed.error
        hint = error.hint if error else "" if _debug() else "PHALANX_DEBUG=1 shows the traceback"
        text = error.message if trouble.is_consequence and error else (
            f"{name} failed {sight.where()}: {error.message if error else trouble.failed.text}"
        )  # fmt: skip
    lines = [text]
    if trouble.is_consequence:
        others = (f"rank {rank} was {other.where()}" for rank, other in sights.items() if rank != trouble.rank)
        lines += [f"  meanwhile {other}" for other in others]
    elif trouble.output:
        lines += [f"  the last it wrote (rank {trouble.rank}):", *(f"    {line}" for line in trouble.output)]
    if trouble.failed is not None and _debug():
        lines.append(trouble.failed.traceback.rstrip())
    return RankError("\n".join(lines), hint)


def _debug() -> bool:
    return os.environ.get("PHALANX_DEBUG", "0") not in ("", "0")

"""Errors a user can cause or must know about, and phrases of their messages.

Every message names the object, the place, the allowed values and the next step (invariant 6). Our own bugs are
`assert`s, never these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PhalanxError(Exception):
    """Something the user can act on. `hint` is the next step, printed on a line of its own."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message}\n  → {hint}" if hint else message)
        self.message = message
        self.hint = hint

    @property
    def again(self) -> str:
        """Where all ranks may begin anew after it: what each of them has to know of it. "" where the job is over."""
        return ""


class ConfigError(PhalanxError):
    """An option is unknown, malformed or contradicts another."""


class ModelError(PhalanxError):
    """A model cannot be found, built or loaded."""


class CaptureError(PhalanxError):
    """A model cannot be read as a graph, or its graph disagrees with the model."""


class DataError(PhalanxError):
    """Data cannot be read or does not fit the task."""


class PlanError(PhalanxError):
    """A plan is malformed, or cannot be run on this model and these ranks."""


class CheckpointError(PhalanxError):
    """A checkpoint is missing, incomplete or corrupt."""


class RankError(PhalanxError):
    """A rank failed, died or stopped answering, and the job it belonged to is over."""


class LinkError(RankError):
    """This rank is sound, but what it waited for did not come: the cause usually lies with another rank."""


class StoreError(LinkError, RuntimeError):
    """The store of the job does not answer: the process that has it is gone, or cannot be reached."""


class LateError(LinkError):
    """This rank is sound and waited as long as it may; those that it leaves then only lose the connection."""


class BeginAnew(PhalanxError):
    """Something went wrong on another rank after which all may begin anew; `again` is what it said of that."""

    def __init__(self, message: str, hint: str = "", again: str = "") -> None:
        super().__init__(message, hint)
        self._again = again

    @property
    def again(self) -> str:
        return self._again


class VerifyError(PhalanxError):
    """A verification could not be carried out (a failed comparison is a report, not an error)."""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A phrase that suggests what `name` may have meant: 'did you mean X?' or the allowed values."""
    allowed = list(allowed)
    close = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "allowed: " + ", ".join(sorted(allowed))


def counted(number: int, noun: str, several: str = "") -> str:
    """'1 step', '2 steps'. several: of more than one, where that is not the noun with an s."""
    return f"{number} {noun if number == 1 else several or f'{noun}s'}"

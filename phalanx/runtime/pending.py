"""Communication that was started and not yet awaited: the one place where a rank waits for others.

A wait knows what it waits for and from whom, ends at a deadline, and lets go when the alarm rings.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from phalanx.errors import RankError

if TYPE_CHECKING:
    from phalanx.launch.seat import Seat


class LinkError(RankError):
    """This rank is sound, but what it waited for did not come: the cause usually lies with another rank."""


class Pending:
    """Started communication. Its tensors live, and must not be touched, until `wait` returns."""

    def __init__(
        self,
        seat: Seat,
        work: Any,
        tensors: tuple[Tensor, ...],
        *,
        timeout: timedelta,
        subject: str,
        partners: str,
        finish: Callable[[], None] | None = None,
        ended: Callable[[Pending], None] | None = None,
    ) -> None:
        self._seat, self._work, self._timeout = seat, work, timeout
        self._tensors, self._on_cuda = tensors, any(tensor.is_cuda for tensor in tensors)
        self._subject, self._partners, self._finish, self._ended = subject, partners, finish, ended

    def wait(self, what: str = "") -> None:
        """Block until the result is there; on CUDA, until the current stream will see it. `what` is for messages."""
        work = self._work
        if work is None:
            return
        began = time.monotonic()
        try:
            if self._on_cuda:
                work.wait()  # orders streams, does not block; a timeout here would make the host wait
            else:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise self._explained(what, time.monotonic() - began, error) from error
        if self._seat.alarm.reason is not None:
            raise LinkError(f"{self._seat.name} stopped at {what or self._subject}: {self._seat.alarm.reason}")
        if self._finish is not None:
            self._finish()
        if self._ended is not None:
            self._ended(self)
        self._work, self._tensors, self._finish, self._ended = None, (), None, None

    def done(self) -> bool:
        """Whether `wait` would return at once. Messages between CPU ranks say so only after they were awaited."""
        return self._work is None or self._work.is_completed()

    def _explained(self, what: str, seconds: float, error: RuntimeError) -> LinkError:
        name, subject = self._seat.name, what or self._subject
        if self._seat.alarm.reason is not None:
            return LinkError(f"{name} stopped waiting for {subject}: {self._seat.alarm.reason}")
        if seconds >= 0.95 * self._timeout.total_seconds():
            return LinkError(
                f"{name} waited {seconds:.0f} s for {subject} {self._partners}",
                "find out what the other side did in the meantime; a slow one needs a longer timeout",
            )
        return LinkError(f"{name} lost the connection while waiting for {subject} {self._partners} ({cause(error)})")


def cause(error: BaseException) -> str:
    """The first line of a library's error, without the place in its sources and its advice."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", text).partition(". This is typically")[0]


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error of starting an operation says that the other side is gone, and not that we did wrong."""
    return any(sign in str(error) for sign in ("gloo/transport", "onnection", "Broken pipe", "remote process exited"))

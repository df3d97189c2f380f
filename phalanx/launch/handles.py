"""A process itself and not its number, which may come to mean another once the process is gone.

Where the system has no such thing (pidfds, of Linux) or does not allow it, the number has to do.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

_LOOK_SECONDS = 0.002


class Handle:
    """Of a process that need not be a child of this one. descriptor: of another's handle of it, which is given up."""

    def __init__(self, pid: int, descriptor: int | None = None) -> None:
        self.pid, self.descriptor, self._was_gone = pid, descriptor, False
        if descriptor is None and hasattr(os, "pidfd_open"):
            try:
                self.descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._was_gone = True
            except OSError:
                pass  # an old kernel, or a container that does not allow it

    @property
    def gone(self) -> bool:
        """Whether it has ended; its parent may not have learned so."""
        return self._was_gone or self.ends_within(0.0)

    def ends_within(self, seconds: float) -> bool:
        if self.descriptor is None:
            until = time.monotonic() + seconds
            while (is_there := _is_there(self.pid)) and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
            return not is_there
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.descriptor is not None:
                signal.pidfd_send_signal(self.descriptor, number)
            elif not self._was_gone:
                os.kill(self.pid, number)

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor, self._was_gone = None, True


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

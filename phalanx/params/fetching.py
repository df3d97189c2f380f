"""Parameters on their way from the host to the device, for the blocks that use them next.

A device takes what several streams bring from whichever has more to bring, so that a stream which never runs dry keeps
all others waiting: state that comes to be updated lets parameters pass.
"""

from __future__ import annotations

from collections import deque
from threading import Lock

import torch
from torch import Tensor

from phalanx.params.host_memory import Copying, copy_on, event_on


class Fetching:
    """To one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, Lock()  # threads that update ask, too
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._passing: deque[tuple[torch.cuda.Event, Copying]] = deque()  # when there is room for it, and its copies

    def bring(self, target: Tensor, source: Tensor) -> Copying:
        """Starts to copy to a tensor of the device from one of the host."""
        room = None if self._stream is None else event_on(torch.cuda.current_stream(self._device))
        return self.pass_by(room, copy_on(self._stream, [target], [source]))

    def pass_by(self, room: torch.cuda.Event | None, copying: Copying) -> Copying:
        """Parameters that are on their way. room: passes when the device has room for them."""
        if room is not None:
            with self._lock:
                self._forget_arrived()
                self._passing.append((room, copying))
        return copying

    def let_pass(self) -> None:
        """What comes on the current stream next comes behind all parameters for which there is room by now."""
        with self._lock:
            self._forget_arrived()
            for room, copying in self._passing:
                if room.query():
                    copying.wait()

    def _forget_arrived(self) -> None:
        while self._passing and self._passing[0][1].is_done:
            self._passing.popleft()

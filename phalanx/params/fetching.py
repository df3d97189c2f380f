"""Parameters on their way from the host to the device, for the blocks that use them next.

A bucket that is still being updated when it is asked for comes as soon as that is done: a thread waits for it, so that
the blocks before are computed meanwhile. A device takes what several streams bring from whichever has more to bring, so
a stream that never runs dry would keep all others waiting: state that comes to be updated lets parameters pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from phalanx.params.host_memory import Copying, copy_on, event_on


class Behind(Copying):
    """Copies that a thread is to start."""

    def __init__(self, started: Future[Copying]) -> None:
        super().__init__()
        self._started = started

    def wait(self, what: str = "") -> None:
        self._started.result().wait(what)

    def wait_here(self) -> None:
        self._started.result().wait_here()


class Fetching:
    """To one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: ThreadPoolExecutor | None = None
        self._passing: deque[tuple[torch.cuda.Event, Copying]] = deque()  # when there is room for it, and its copies

    def bring(self, target: Tensor, source: Tensor, updates: Sequence[Future[Copying]] = ()) -> Copying:
        """Starts to copy to a tensor of the device from one of the host, once its updates are done."""
        room = None if self._stream is None else event_on(torch.cuda.current_stream(self._device))
        if not updates:
            return self._copy(target, source, room)
        self._thread = self._thread or ThreadPoolExecutor(1, "phalanx-fetch")
        return Behind(self._thread.submit(self._copy_updated, target, source, room, updates))

    def _copy_updated(
        self, target: Tensor, source: Tensor, room: torch.cuda.Event | None, updates: Sequence[Future[Copying]]
    ) -> Copying:  # fmt: skip
        for updated in updates:
            updated.result().wait_here()
        return self._copy(target, source, room)

    def _copy(self, target: Tensor, source: Tensor, room: torch.cuda.Event | None) -> Copying:
        if self._stream is None or room is None:
            return copy_on(None, [target], [source])
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(room)
            target.copy_(source, non_blocking=True)
        return self.pass_by(room, Copying(event_on(self._stream)))

    def pass_by(self, room: torch.cuda.Event | None, copying: Copying) -> Copying:
        """Parameters that come on another stream. room: passes when the device has room for them."""
        if room is not None:
            self._passing.append((room, copying))
        return copying

    def let_pass(self) -> None:
        """What comes on the current stream next comes behind all parameters for which there is room by now."""
        while self._passing and self._passing[0][1].is_done:
            self._passing.popleft()
        for room, copying in tuple(self._passing):
            if room.query():
                copying.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

"""Operations that were under way when their links were given up, kept until nothing can touch them any more.

Such an operation may still write its tensors, and a group that is destroyed waits for its operations. Between CPU ranks
they fail as soon as their sockets are shut, all but those of which a message was half sent or half received: gloo never
ends these. NCCL's end when their communicators were given up.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from phalanx.comm import nccl
from phalanx.comm.pending import Pending
from phalanx.launch.abort import background_thread

_FAILING_SECONDS = 0.05  # for operations whose sockets were shut
_LOOKS = 5  # each twice as long after the one before
_LATER_LOOKS = 6  # after those, which do not hold up the process's end; the rest is left to whoever makes links

_kept: list[Pending] = []
_lock = threading.Lock()  # of `_kept`


def keep_for_ever(thing: Any) -> None:
    """Beyond the end of the interpreter, too, which could wait for ever as well."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


class _Closed:
    """In the place of a communicator that was let go of."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection closed: these links were given up")


def keep_until_over(pendings: Iterable[Pending], ends: Iterable[Any]) -> None:
    """Of links that were given up. ends: their groups and channels that are to lose their communicators: who still
    knows those may hang together in circles with all else, and keep it until Python looks for such."""
    found = list(pendings)
    for pending in found:
        keep_for_ever(pending)  # and with it its communicator
    with _lock:
        _kept.extend(found)
    background_thread(partial(_let_go, list(ends)), "phalanx-drop").start()


def let_go_of_ended() -> int:
    """Lets go of all that are over, and of their communicators with the last of each; how many are not."""
    over, left = list[Pending](), list[Pending]()
    with _lock:
        for pending in _kept:
            (over if _is_over(pending) else left).append(pending)
        _kept[:] = left
    for pending in over:
        pending.forget()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(pending))
    return len(left)


def _is_over(pending: Pending) -> bool:
    if pending.on_cuda and not nccl.until_given_up(0.0):
        return False
    try:
        return pending.done()
    except RuntimeError:  # of a device that can no longer be asked
        return False


def _let_go(ends: list[Any]) -> None:
    """Of communicators without operations at once, of others once those are over."""
    for look in range(_LOOKS):
        time.sleep(_FAILING_SECONDS * 2**look)
        while ends:
            ends.pop().backend = _Closed()
        if let_go_of_ended() == 0:
            return
    _look_later(_LOOKS)


def _look_later(look: int) -> None:
    """On a busy machine operations take their time to fail. A thread in the background would hold up the process's end
    for as long as it sleeps; a timer does not."""
    if look == _LOOKS + _LATER_LOOKS:
        return

    def again() -> None:
        if let_go_of_ended() > 0:
            _look_later(look + 1)

    timer = threading.Timer(_FAILING_SECONDS * 2**look, lambda: background_thread(again, "phalanx-drop").start())
    timer.daemon = True
    timer.start()

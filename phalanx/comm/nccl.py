"""NCCL's communicators: how they are made and given up, and what is left of a call of theirs that failed."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from phalanx.launch.abort import background_thread

_ABORT_SECONDS = 2.0  # that NCCL has to give up what is under way
_MOST_GROUPS = 8  # of calls, one in the other

_giving_up: list[threading.Thread] = []
_lock = threading.Lock()  # of `_giving_up`


def connect(
    store: Any, index: int, ranks: tuple[int, ...], name: str, timeout: timedelta, device: torch.device, one_way: bool
) -> Any:
    """A communicator. one_way: messages from the first of two ranks to the second; NCCL connects those at the first of
    them and makes both ranks wait for it, which a receive posted ahead must not."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout, options.global_ranks_in_group, options.group_name = timeout, list(ranks), name
    options.is_high_priority_stream = True  # else its kernels wait for processors until a whole product is computed
    with torch.cuda.device(device):
        backend: Any = dist.ProcessGroupNCCL(store, index, len(ranks), options)
        backend.eager_connect_single_device(device)  # else the first use connects, without a deadline
        if one_way:
            token = torch.zeros(1, device=device)
            first = backend.send([token], 1, 0) if index == 0 else backend.recv([token], 0, 0)
            first.wait()
            torch.cuda.current_stream(device).synchronize()
    return backend


def give_up(backends: Sequence[Any]) -> None:
    """Ends everything that these communicators have under way, in the background. All at once: each frees
    memory, for which the device waits until no kernel runs, those of the others included. (torch aborts on threads of
    its own, so that a group of NCCL's, which belongs to a thread, does not hold them together.)"""

    def abort(backend: Any) -> None:
        with suppress(RuntimeError):
            backend.abort()

    threads = [background_thread(partial(abort, backend), "phalanx-abort") for backend in backends]
    with _lock:
        _giving_up.extend(threads)
        for thread in threads:
            thread.start()


def until_given_up(seconds: float = _ABORT_SECONDS) -> bool:
    """Whether nothing of old communicators is left, after waiting for that at most so long. Ranks can meet before. But
    what frees memory waits for all kernels, and what starts kernels waits for what frees: ranks that wait for each
    other in several communicators, as in a step, would then wait for ever."""
    deadline = time.monotonic() + seconds
    with _lock:
        threads = list(_giving_up)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with _lock:
        _giving_up[:] = [thread for thread in _giving_up if thread.is_alive()]
        return not _giving_up


def end_open_group(name: str = "libnccl.so.2") -> None:
    """After a call failed on this thread. torch begins a group of calls for every message and, where the message fails,
    does not end it: all later calls on the thread would be kept for the group's end, and would seem to have
    succeeded."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(name)
        for _ in range(_MOST_GROUPS):
            if library.ncclGroupEnd() != 0:  # what failed in the group, or that there is none
                return

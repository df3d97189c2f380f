"""What happens within a rank in the soak, when it is told so (`soak_job.Samples`)."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from phalanx.comm.pending import open_sockets, shut
from phalanx.launch.context import RankContext
from phalanx.launch.membership import Generation
from phalanx.params.mirrored import Mirrored
from phalanx.session.mirror import Copy

STORE_PORT = "SOAK_STORE_PORT"
slow_samples: list[float] = []  # seconds that each of the next ones takes this rank


def _raise() -> None:
    raise RuntimeError("something that nobody expected")


def _exit() -> None:
    os._exit(7)


def _hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(30)  # a call through PyDLL keeps the lock


def _flip() -> None:
    """A bit of every copy on this rank."""
    for copy in [it for it in gc.get_objects() if isinstance(it, Copy)]:
        for tensor in copy.data.values():
            tensor.view(torch.uint8)[:1] ^= 1
    for mirror in [it for it in gc.get_objects() if isinstance(it, Mirrored)]:
        for weight in mirror.weights.values():
            weight.exact.view(-1).view(torch.uint8)[:1] ^= 1


def _fill_disk() -> None:
    """No file may get large for a second."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    threading.Timer(1.0, resource.setrlimit, (resource.RLIMIT_FSIZE, (most, most))).start()


def _run_out_of_memory() -> None:
    """More is asked for than can be had."""
    now, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, most))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (now, most))


def _grow() -> None:
    """Takes memory until somebody ends this process."""
    taken: list[bytes] = []
    while len(taken) < 100:
        taken.append(b"x" * (16 << 20))
        time.sleep(1e-3)


def _cut_links() -> None:
    """All connections of this rank end; nobody is lost. A connection to the store can be had again: it stays."""
    store = int(os.environ[STORE_PORT])
    shut(open_sockets(), spare_port=store)


def _be_slow() -> None:
    """The next samples take this rank so long that steps take some three times as long."""
    slow_samples.extend([0.05] * 16)


def _speak_of_the_past() -> None:
    """Links are cut, so that ranks meet anew; meanwhile, and for a second more, this one writes what belonged to the
    generation before."""
    (context,) = [it for it in gc.get_objects() if isinstance(it, RankContext)][:1]

    def speak() -> None:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            context.store.set("plan", json.dumps([1, "pp=9"]))
            context.job_store.set("generation/0", Generation(0, (7,)).to_json())
            time.sleep(0.002)

    threading.Thread(target=speak, daemon=True).start()
    _cut_links()


HAPPENS: dict[str, Callable[[], None]] = {
    "raise": _raise, "exit": _exit, "interpreter lock": _hold_interpreter, "slow": _be_slow, "corrupt copy": _flip,
    "disk full": _fill_disk, "out of memory": _run_out_of_memory, "memory limit": _grow, "links broken": _cut_links,
    "stale messages": _speak_of_the_past,
}  # fmt: skip

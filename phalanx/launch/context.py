"""A rank's context: what it knows of its place among the others, and the ways it has to reach them.

Whoever starts ranks hands out contexts; nothing else in a rank reads the environment to find out where it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from phalanx.errors import ConfigError
from phalanx.launch.abort import AbortEvent
from phalanx.launch.membership import Membership
from phalanx.launch.status_board import StatusBoard, StatusSlot


@dataclass(frozen=True)
class RankContext:
    """`store` is the `JobStore` of this generation of the job (None when there is one rank). membership: where others
    may be lost and this rank goes on; `job_store` is the store of all generations then. local_world: how many of the
    `world` ranks are on this machine."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    node: int
    device: str  # "cpu" or "cuda:<index>"
    store: Any
    store_port: int
    generation: int
    board: StatusBoard
    slot: StatusSlot
    abort: AbortEvent = field(default_factory=AbortEvent)
    address: str = "127.0.0.1"  # where CPU links listen; "" leaves it to GLOO_SOCKET_IFNAME or the host's name
    on_event: Callable[[str, Any], None] | None = None
    membership: Membership | None = None
    job_store: Any = None

    @classmethod
    def alone(cls, device: str = "cpu", on_event: Callable[[str, Any], None] | None = None) -> RankContext:
        """The only rank of a world of one, in this process."""
        board = StatusBoard.private(1)
        board.reset()
        return cls(0, 1, 0, 1, 0, device, None, 0, 0, board, board.slots[0], on_event=on_event)

    def renewed(self, seconds: float) -> RankContext | None:
        """This rank in the job's next generation; None where there is none, or none in so many seconds."""
        if self.membership is None:
            return None
        store = self.membership.follow(self.job_store, seconds)
        if store is None:
            return None
        now = self.membership.generation
        return replace(
            self, rank=self.membership.rank, world=len(now.members), local_world=self.membership.local_world,
            abort=self.membership.abort, job_store=store,
            store_port=store.address[1] if store.address else self.store_port,
            store=store.part(f"generation{now.number}", self.membership.abort),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """'rank 2 (stage 1)'."""
        place = self.slot.read().place
        return f"rank {self.rank} ({place})" if place else f"rank {self.rank}"

    def emit(self, name: str, payload: Any = None) -> None:
        """Hand an event to whoever started the job. Only rank 0 speaks for the job."""
        assert self.rank == 0, "events come from rank 0"
        if self.on_event is not None:
            self.on_event(name, payload)


# Kernels are loaded before any rank waits for another: loading waits for all that the GPU does, and a message that has
# not come yet is such a thing. Each channel is a communicator of its own, so that nothing is serialised, on a stream of
# its own: with only the usual 8 hardware queues a message that waits could hold up the computation behind it.
_LOADING, _EAGER = "CUDA_MODULE_LOADING", "EAGER"  # whatever was set: images of GPU machines often ask for LAZY
_QUEUES, _MANY, _FEWEST = "CUDA_DEVICE_MAX_CONNECTIONS", 32, 8  # fewer are not kept: other frameworks ask for 1
_QUIET = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
# torch's own watchers of NCCL keep a process whose partner is gone waiting for a minute, in which they write down what
# it did, and then end it. Here a supervisor sees who is gone, and the others go on. (torchrun asks for such an end, so
# these are not only defaults.)
_WATCHERS = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
    "TORCH_NCCL_ENABLE_MONITORING",
)  # fmt: skip


def local_device(choice: str, local_rank: int, world: int = 1) -> str:
    """The device of a rank: 'cpu', or the GPU that its number on this machine points at (ranks may share one)."""
    import torch

    if choice != "cpu" and world > 1:
        if not _loads_eagerly():
            raise ConfigError(
                "CUDA was used before the ranks were joined, and loads its kernels lazily: ranks that wait for each "
                "other could then wait for ever",
                f"export {_LOADING}={_EAGER} before the program starts, or use CUDA after Phalanx only",
            )
        os.environ.setdefault(_QUIET, "false")
        os.environ.update(dict.fromkeys(_WATCHERS, "0"))
        given = os.environ.get(_QUEUES, "")
        if not given.isdecimal() or int(given) < _FEWEST:
            os.environ[_QUEUES] = str(_MANY)
    assert choice in ("auto", "cpu", "cuda"), choice
    count = torch.cuda.device_count() if choice != "cpu" and torch.cuda.is_available() else 0
    if count:
        index = local_rank % count
        torch.cuda.set_device(index)
        return f"cuda:{index}"
    if choice == "cuda":
        raise ConfigError(
            "option device = 'cuda', but no CUDA device can be used", "use device=cpu; phalanx env shows what there is"
        )
    return "cpu"


@cache
def _loads_eagerly() -> bool:
    """Decided once for a process: what is set after CUDA has started comes too late. A rank's environment may change
    from job to job."""
    import torch

    if torch.cuda.is_initialized():
        return os.environ.get(_LOADING) == _EAGER
    os.environ[_LOADING] = _EAGER
    return True

"""How a communicator of some ranks is made from a store, for CPU and for CUDA. Used by links.py only."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def make_gloo(store: Any, index: int, size: int, timeout: timedelta, address: str) -> Any:
    """A gloo communicator that listens on `address`."""
    if not address:
        return dist.ProcessGroupGloo(store, index, size, timeout)
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs name it otherwise
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, index, size, options)


def make_nccl(
    store: Any, index: int, ranks: tuple[int, ...], name: str, timeout: timedelta, device: torch.device, one_way: bool
) -> Any:
    """An NCCL communicator, connected. one_way: messages from the first of two ranks to the second; NCCL connects those
    at the first of them and makes both ranks wait for it, which a receive posted ahead must not."""
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


def abort_nccl(backends: list[Any]) -> None:
    """Give up everything these communicators have under way."""
    if not backends:
        return
    backends[0]._group_start()  # one at a time, each would wait for the others' kernels
    for backend in backends:
        backend.abort()
    backends[0]._group_end()

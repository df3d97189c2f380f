"""Several ranks of a worker pool on one GPU, as a lab would have them (`phalanx/lab/gpu.py`).

Communication then goes through the host and behaves like a network of 25-40 Gbit/s.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from phalanx.lab import gpu, owned
from phalanx.launch.worker_pool import WorkerPool


@contextmanager
def shared_gpu(num_ranks: int) -> Iterator[None]:
    """Processes started inside, and what they start, share the GPU in `num_ranks` equal parts."""
    with gpu.shared_gpu(owned.new_name(), 100 // num_ranks) as added:
        before = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def rank_environment(rank: int) -> Mapping[str, str]:
    """What each rank needs before NCCL starts. Its threads are named, so that their time can be told from others'."""
    return {**gpu.rank_variables(rank, "lo"), "NCCL_SET_THREAD_NAME": "1"}


@contextmanager
def pool_of(num_ranks: int, device: str) -> Iterator[WorkerPool]:
    """CPU ranks with a thread each, or ranks that share the GPU."""
    if device == "cpu":
        with WorkerPool(num_ranks, threads_per_rank=1, device="cpu") as pool:
            yield pool
        return
    with shared_gpu(num_ranks), WorkerPool(num_ranks, device="cuda", environment=rank_environment) as pool:
        yield pool

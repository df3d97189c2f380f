"""Several ranks on one GPU: the multi-process service gives each its share, and NCCL takes them for different hosts.

Communication then goes through the host and behaves like a network of 25-40 Gbit/s. The GPU's clocks and modes are left
alone; the service is ended with the `with` block.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def shared_gpu(num_ranks: int) -> Iterator[None]:
    """Processes started inside, and what they start, share the GPU in `num_ranks` equal parts."""
    folders = {name: tempfile.mkdtemp(prefix="mps-") for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
    added = {**folders, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // num_ranks)}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        subprocess.run([_CONTROL, "-d"], check=True)
        yield
    finally:
        subprocess.run([_CONTROL], input="quit\n", text=True, check=False)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)


def rank_environment(rank: int) -> Mapping[str, str]:
    """What each rank needs before NCCL starts."""
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

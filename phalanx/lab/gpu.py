"""Several ranks on one GPU: the multi-process service gives each its share, and NCCL takes them for different hosts.

Communication then goes through the host and behaves like a network of 25-40 Gbit/s. The GPU's clocks and modes are left
alone, and a service that others run is not touched: this one has folders of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.errors import ConfigError
from phalanx.lab.owned import PREFIX, is_abandoned

_CONTROL = "nvidia-cuda-mps-control"
_SUFFIX = ".mps"
_CLIENTS_SECONDS, _CONTROL_SECONDS = 10, 30  # that clients have left to go, and in which the service answers
# Percent at which half-precision products were compared and found right on an H200; at 16, 22, 30, 33, 40 they are not.
PROVEN = (5, 6, 7, 8, 9, 10, 12, 13, 15, 18, 20, 25, 50, 100)
_QUEUES, _LEAST_QUEUES = 32, 8  # of the hardware, for all ranks and for each: with more, starting runs out of memory


@contextmanager
def shared_gpu(name: str, percent: int) -> Iterator[Mapping[str, str]]:
    """Runs the service; gives the variables with which a process gets `percent` of the first GPU."""
    if shutil.which(_CONTROL) is None:
        raise ConfigError(
            f"lab: gpu_share needs the multi-process service, but {_CONTROL} is not installed",
            "use device=cpu, or install it (it comes with NVIDIA's driver)",
        )
    folder = Path(tempfile.gettempdir()) / f"{name}{_SUFFIX}"
    folder.mkdir(mode=0o700)
    for part in _folders(folder).values():
        Path(part).mkdir()
    try:
        # The service sees one GPU only, which its clients then know as number 0.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        _control(folder, ["-d"], CUDA_VISIBLE_DEVICES=first)
        yield {
            **_folders(folder), "CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
            "CUDA_DEVICE_MAX_CONNECTIONS": str(max(_QUEUES * percent // 100, _LEAST_QUEUES)),
        }  # fmt: skip
    finally:
        _end(folder)


def rank_variables(rank: int, interface: str) -> Mapping[str, str]:
    """What each rank needs before NCCL starts. It sees one GPU, and scripts take the one with their local number."""
    return {
        "NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": interface, "NCCL_IB_DISABLE": "1", "LOCAL_RANK": "0",
    }  # fmt: skip


def sweep() -> None:
    """End the services of labs whose process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}.*{_SUFFIX}"):
        if is_abandoned(folder.name):
            _end(folder)


def _end(folder: Path) -> None:
    with suppress(ConfigError):  # it may not have come up, or have died
        _control(folder, [], input=f"quit -t {_CLIENTS_SECONDS}\n")
    shutil.rmtree(folder, ignore_errors=True)


def _control(folder: Path, arguments: list[str], input: str = "", **variables: str) -> None:
    # To a file, not a pipe: the service keeps what it was started with open.
    with (folder / "control.txt").open("w+") as output:
        try:
            done = subprocess.run(
                [_CONTROL, *arguments], env={**os.environ, **_folders(folder), **variables}, input=input, text=True,
                stdout=output, stderr=output, check=False, timeout=_CONTROL_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"lab: {_CONTROL} does not answer", "see whether processes still use the GPU (nvidia-smi)"
            ) from None
        output.seek(0)
        said = [*output.read().strip().splitlines(), f"exit code {done.returncode}"]
    if done.returncode:
        raise ConfigError(f"lab: {_CONTROL} failed: {said[0]}", "nvidia-smi shows whether there is a GPU")


def _folders(folder: Path) -> Mapping[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}

"""Ranks that share a GPU, with a stand-in for the multi-process service: what is started, told to ranks, and ended."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from phalanx.errors import ConfigError
from phalanx.lab import gpu, owned
from phalanx.lab.run import Lab
from tests.lab.labs import python

# Notes how it was called, as the real one is: with -d it starts the service, else it reads commands.
SERVICE = """#!/bin/sh
if [ "$1" = -d ]; then said=start; else read said rest; fi
echo "$said $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES" >> "$CALLS"
"""
TELL = "import json; json.dump(dict(os.environ), open(f'{sys.argv[1]}/{rank}', 'w'))"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the stand-in notes its calls."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(SERVICE)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "calls"


def test_ranks_get_a_share_of_one_gpu_and_are_hosts_of_their_own(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with Lab("ranks=4,gpu_share=25%") as lab:
        assert lab.run(python(TELL, tmp_path)) == 0
        assert not lab.notes
    started, ended = (line.split() for line in service.read_text().splitlines())
    assert started[::2] == ["start", "3"] and ended[:2] == ["quit", started[1]]
    assert not Path(started[1]).parent.exists()
    shared = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25", "CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "lo"}
    shared |= {"NCCL_IB_DISABLE": "1", "CUDA_MPS_PIPE_DIRECTORY": started[1], "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    for rank in range(4):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert {**shared, "NCCL_HOSTID": f"rank{rank}", "LOCAL_RANK": "0"}.items() <= found.items()


def test_the_service_ends_when_the_lab_fails(service: Path):
    with pytest.raises(ConfigError, match="no program"), Lab("ranks=2,gpu_share=50%") as lab:
        lab.run(["no-such-program"])
    assert [line.split()[0] for line in service.read_text().splitlines()] == ["start", "quit"]


def test_the_service_of_a_dead_lab_is_ended_by_the_next(service: Path, tmp_path: Path):
    alive = tmp_path / f"{owned.new_name()}.mps"
    dead = tmp_path / alive.name.replace(f".{os.getpid()}.", ".4194305.")  # above the largest number a process can have
    alive.mkdir()
    dead.mkdir()
    gpu.sweep()
    assert service.read_text().split()[:2] == ["quit", str(dead / "pipe")]
    assert alive.exists() and not dead.exists()


def test_shares_beyond_the_whole_gpu_are_noted(service: Path):
    with Lab("ranks=3,gpu_share=50%") as lab:
        assert lab.notes == ["3 × 50% is more than one GPU: ranks compete for it"]


def test_a_service_that_does_not_start_is_reported(service: Path, tmp_path: Path):
    (tmp_path / "bin" / "nvidia-cuda-mps-control").write_text("#!/bin/sh\necho 'no device found'; exit 1\n")
    with pytest.raises(ConfigError, match="nvidia-cuda-mps-control failed: no device found"), Lab("gpu_share=50%"):
        pass


def test_a_service_that_does_not_answer_is_reported(service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "_CONTROL_SECONDS", 0.1)
    (tmp_path / "bin" / "nvidia-cuda-mps-control").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ConfigError, match="nvidia-cuda-mps-control does not answer"), Lab("gpu_share=50%"):
        pass


def test_without_the_service_a_gpu_lab_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nvidia-cuda-mps-control is not installed"), Lab("ranks=2,gpu_share=50%"):
        pass

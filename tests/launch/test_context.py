"""A rank's context: what must be so before CUDA starts."""

from __future__ import annotations

import os

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.launch import context
from phalanx.launch.context import local_device


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nobody has asked yet."""
    context._loads_eagerly.cache_clear()
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_ranks_are_refused_where_cuda_already_loads_kernels_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="CUDA was used before the ranks were joined") as refused:
        local_device("auto", 0, world=2)
    assert "export CUDA_MODULE_LOADING=EAGER" in refused.value.hint
    assert local_device("auto", 0, world=1) == "cpu", "alone nobody waits"


def test_cuda_that_was_started_eagerly_is_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    assert local_device("auto", 0, world=2) == "cpu"


def test_a_rank_loads_eagerly_whatever_was_asked_and_takes_more_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # as images of GPU machines have it
    local_device("auto", 0, world=2)
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # the environment of the next job
    assert local_device("auto", 0, world=2) == "cpu"


def test_a_lost_partner_ends_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun asks torch to end a process whose connection breaks."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    local_device("auto", 0, world=2)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"


@pytest.mark.parametrize(("given", "kept"), [(None, "32"), ("1", "32"), ("8", "8"), ("none", "32")])
def test_hardware_queues_are_enough_for_messages_under_way(
    given: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other frameworks ask for one, which would hold up a computation behind a message."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given or "")
    local_device("auto", 0, world=2)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == kept

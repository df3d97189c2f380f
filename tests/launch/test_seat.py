"""Where a rank sits: what must be so before CUDA starts."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import ConfigError
from phalanx.launch.seat import local_device


def test_ranks_are_refused_where_cuda_already_loads_kernels_lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    with pytest.raises(ConfigError, match="CUDA was used before the ranks were joined") as refused:
        local_device("auto", 0, world=2)
    assert "export CUDA_MODULE_LOADING=EAGER" in refused.value.hint
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert local_device("auto", 0, world=2) == "cpu"
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    assert local_device("auto", 0, world=1) == "cpu", "alone nobody waits"

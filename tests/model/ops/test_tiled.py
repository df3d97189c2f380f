"""Attention in tiles says what the chunked kernel says, in Triton's interpreter; and is chosen where it can be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.model.ops import choice
from phalanx.model.ops.kernels import Attention, CuDnn, Flash
from tests.model.ops import tiled_on_cpu

# `make` installs Triton beside the environment: every other test is as fast, and as it is for users, without it.
_TRITON = Path(sys.prefix) / "triton"


@pytest.mark.skipif(not _TRITON.exists() and find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("name", ["CASES", pytest.param("MORE_CASES", marks=pytest.mark.long)])
def test_tiles_equal_the_chunked_kernel(name: str) -> None:
    cases = getattr(tiled_on_cpu, name)
    paths = [str(Path.cwd()), str(_TRITON), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    script = [sys.executable, "-W", "ignore", tiled_on_cpu.__file__, name]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip("the interpreter of this Triton does not run a loop with this numpy")
    assert done.returncode == 0, done.stderr
    apart = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(found) for found in apart] == [6 if case.bias else 5 for case in cases]  # output, lse, gradients
    assert not [(case, found) for case, found in zip(cases, apart, strict=True) if max(found) > 5e-6]


def _candidates(
    monkeypatch: pytest.MonkeyPatch, spec: Attention, capability: tuple[int, int] = (9, 0), **of: Any
) -> list[str]:
    """What would be tried for tensors on a GPU, by name."""

    class Tiled: ...

    module = SimpleNamespace(Tiled=Tiled, fits=lambda dim, dtype: dim <= 256 and dtype != torch.float64)
    monkeypatch.setattr(choice, "_tiled", lambda: module if of.get("triton", True) else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    shape, dtype = (2, 4, of.get("queries", 16), of.get("dim", 64)), of.get("dtype", torch.bfloat16)
    q = SimpleNamespace(shape=shape, dtype=dtype, device=torch.device("cuda"))
    k = SimpleNamespace(shape=(2, 4, 16, shape[3]))
    return [kernel.__name__ for kernel in choice._candidates(q, k, k, spec)]  # type: ignore[arg-type]


def _spec(**given: Any) -> Attention:
    plain: dict[str, Any] = {"causal": True, "scale": 1.0, "window": 0, "softcap": 0.0, "dropout": 0.0}
    masks = ("q_segments", "k_segments", "bias", "dropout_keys")
    return Attention(**{name: None for name in masks} | plain | given)


_CUDNN, _FLASH = CuDnn.__name__, Flash.__name__


def test_which_kernels_are_tried_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(spec: Attention, **of: Any) -> list[str]:
        return _candidates(monkeypatch, spec, **of)

    assert tried(_spec()) == [_CUDNN, _FLASH, "Tiled"]
    assert tried(_spec(), capability=(8, 0)) == [_FLASH, "Tiled"]
    assert tried(_spec(), dim=256) == [_FLASH, "Tiled"]
    assert tried(_spec(window=4)) == [_FLASH, "Tiled"]
    assert tried(_spec(window=4, causal=False)) == ["Tiled"]
    assert tried(_spec(softcap=2.0)) == tried(_spec(dropout=0.1)) == ["Tiled"]
    assert tried(_spec(k_segments=torch.ones(2, 16))) == tried(_spec(bias=torch.ones(1, 1, 16, 16))) == ["Tiled"]
    assert tried(_spec(), dtype=torch.float32) == tried(_spec(), queries=8) == ["Tiled"]
    assert tried(_spec(bias=torch.ones(1, 1, 16, 1))) == []
    assert tried(_spec(), dtype=torch.float64) == tried(_spec(), capability=(7, 0), dtype=torch.float32) == []
    assert tried(_spec(dropout=0.1), triton=False) == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("bias", [0, 1, 2])
def test_an_example_is_of_the_kind_it_stands_for(causal: bool, windowed: bool, bias: int) -> None:
    kind = choice.Kind(causal, windowed, True, not windowed, bias, windowed, causal)
    assert choice.Kind.of(kind.example(40, torch.device("cpu"), torch.float32, 0.5)) == kind

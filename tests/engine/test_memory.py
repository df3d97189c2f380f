"""Memory that runs out is recognised, whoever says so and however it is wrapped, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from phalanx.engine.out_of_memory import explain_out_of_memory
from phalanx.errors import PhalanxError


def wrapped(message: str) -> RuntimeError:
    error = RuntimeError("the compiler failed")
    error.__cause__ = RuntimeError(message)
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA ran out"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
        wrapped("CUDA error: out of memory"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_memory_that_ran_out_is_explained(error: RuntimeError) -> None:
    with (
        pytest.raises(PhalanxError, match="a micro-batch does not fit in the memory of cpu") as raised,
        explain_out_of_memory("a micro-batch does not fit", ["use less", "buy more"], torch.device("cpu")),
    ):
        raise error
    assert raised.value.hint == "use less; or buy more"


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), wrapped("shapes differ")], ids=str)
def test_other_errors_are_left_as_they_are(error: RuntimeError) -> None:
    with pytest.raises(RuntimeError) as raised, explain_out_of_memory("it", [], torch.device("cpu")):
        raise error
    assert raised.value is error

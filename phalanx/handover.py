"""Handing a job over to ranks in other processes: everything by value, a module's tensors through shared memory.

A module's values are written once, as safetensors in memory that all processes of the machine can map; no rank copies
what it does not use.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from phalanx.launch.main_script import MainScript, explained_pickling, unpickle
from phalanx.loop import Job

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Parcel:
    """A job without its module's values, which lie in a file. `main` is where the classes of the script are found."""

    job: bytes
    values: Path | None
    main: MainScript


@contextlib.contextmanager
def pack(job: Job) -> Iterator[Parcel]:
    """Within it the parcel can be opened by other processes."""
    main = MainScript.of_this_process()
    if not isinstance(job.model, nn.Module):
        yield Parcel(_pickled(job), None, main)
        return
    folder = Path(tempfile.mkdtemp(prefix="phalanx-module-", dir=_place_for(job.model)))
    try:
        file = folder / "values.safetensors"
        save_file(_tensors(job.model), file)
        yield Parcel(_pickled(replace(job, model=_hollow(job.model))), file, main)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpack(parcel: Parcel) -> Job:
    job: Job = unpickle(io.BytesIO(parcel.job), parcel.main)
    if parcel.values is not None:
        assert isinstance(job.model, nn.Module)
        _restore(job.model, load_file(parcel.values))
    return job


def _place_for(module: nn.Module) -> str | None:
    """Shared memory if the module fits in it, else where temporary files go."""
    needed = sum(tensor.nbytes for tensor in _tensors(module).values())
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    return str(_SHARED_MEMORY) if usable and shutil.disk_usage(_SHARED_MEMORY).free > needed else None


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once, contiguous, by its first name."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().cpu().contiguous() for name, tensor in named}


def _hollow(module: nn.Module) -> nn.Module:
    """A copy whose tensors have shapes but no values; the module itself is not touched."""
    owned = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    memo: dict[int, object] = {}
    for key, tensor in owned.items():
        empty = tensor.detach().to("meta")
        memo[key] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, memo)


def _restore(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Puts values in the place of every tensor, tied ones in all of theirs."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    filled = {
        id(tensor): nn.Parameter(values[name], tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else values[name]
        for name, tensor in named.items()
    }
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = filled[id(tensor)]  # pyright: ignore[reportArgumentType]


def _pickled(job: Job) -> bytes:
    with explained_pickling():
        return pickle.dumps(job)

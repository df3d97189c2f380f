"""A job and what comes of it; and the job's payload for ranks in other processes.

A payload is everything by value, a module's tensors through shared memory: they are written once, as safetensors in
memory that all processes of the machine can map, and no rank copies what it does not use.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from phalanx.config import RunConfig
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.main_script import MainScript, explained_pickling, unpickle
from phalanx.model.lora import Lora, merged
from phalanx.model.selfcheck import refuse_lost_hooks
from phalanx.model.zoo.meta import require_readable
from phalanx.model.zoo.zoo import Model, ModelSpec, build
from phalanx.params.groups import ParameterGroup
from phalanx.params.lr_schedule import LrFunction
from phalanx.prepare.auto import Choice
from phalanx.prepare.did_not_fit import NONE_TRIED, Tried
from phalanx.prepare.prepare import Collate
from phalanx.state import checkpoint
from phalanx.training.metrics import Metric

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Job:
    """What a run is about: options, and what was given as objects, which stands before what the options name. began:
    when it was asked for."""

    model: Model
    data: Any
    eval_data: Any
    config: RunConfig
    collate: Collate | None = None
    optimizer_class: type[Any] | None = None
    groups: tuple[ParameterGroup, ...] = ()
    lr_function: LrFunction | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    passed_over: int = 0  # samples that a run which goes on leaves out, in all; 0: as its checkpoint says
    began: float = field(default_factory=time.time, compare=False)
    choice: Choice | None = None  # of the plan, where it was measured
    tried: Tried = NONE_TRIED  # plans that the search found and that did not fit

    @property
    def folder(self) -> Path:
        return Path(self.config.out).expanduser()

    @property
    def is_named(self) -> bool:
        """Whether model and data are what the options name, no objects of the caller's."""
        items = self.data if isinstance(self.data, list | tuple) else [self.data]
        return all(isinstance(item, str | Path) for item in (self.model, *items))


def stop_file(folder: Path) -> Path:
    """While it is there, the run in this folder ends after the step that it is at."""
    return folder / "stop"


@dataclass(frozen=True)
class JobPayload:
    """A job without its module's values, which lie in a file. `main` is where the classes of the script are found."""

    job: bytes
    values: Path | None
    main: MainScript


@contextlib.contextmanager
def pack(job: Job) -> Iterator[JobPayload]:
    """Within it the payload can be opened by other processes."""
    main = MainScript.of_this_process()
    if not isinstance(job.model, nn.Module):
        yield JobPayload(_pickled(job), None, main)
        return
    require_readable(job.model, type(job.model).__name__)
    refuse_lost_hooks(job.model, type(job.model).__name__)  # the copies that ranks get would not have them
    folder = Path(tempfile.mkdtemp(prefix="phalanx-module-", dir=_place_for(job.model)))
    try:
        file = folder / "values.safetensors"
        save_file(_tensors(job.model), file)
        yield JobPayload(_without_values(job, job.model), file, main)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _without_values(job: Job, module: nn.Module) -> bytes:
    try:
        return _pickled(replace(job, model=_hollow(module)))
    except RuntimeError as error:  # torch's words for modules whose weights are computed from others
        raise ConfigError(
            f"module {type(module).__name__!r} cannot be handed to other processes: {str(error).splitlines()[0]}",
            "train on one rank (ranks=1), or remove what computes weights from others (weight_norm, spectral_norm and "
            "other parametrizations)",
        ) from error


def unpack(payload: JobPayload) -> Job:
    job: Job = unpickle(io.BytesIO(payload.job), payload.main)
    if payload.values is not None:
        assert isinstance(job.model, nn.Module)
        _restore(job.model, load_file(payload.values))
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


@dataclass(frozen=True)
class Summary:
    """What came of a run. `losses` are those of the steps made this time, one per step."""

    steps: int
    loss: float
    eval_loss: float | None
    losses: tuple[float, ...]
    skipped: int
    folder: Path
    checkpoint: Path | None  # the newest; None where none was to be written
    export: Path | None
    spec: ModelSpec | None = field(repr=False)  # None where the model is the user's own module
    best: Path | None = None  # the checkpoint with the lowest eval loss, where keep_best was asked for


@dataclass(frozen=True)
class Result(Summary):
    """A summary, and the trained model."""

    model: Model = field(repr=False, kw_only=True)
    config: RunConfig = field(repr=False, kw_only=True)

    def module(self) -> nn.Module:
        """The trained model: the user's own module, or a new one of the model's class, on the CPU in eval mode."""
        if isinstance(self.model, nn.Module):
            return self.model
        assert self.spec is not None
        if self.checkpoint is None:
            where = f"load {self.export} with from_pretrained" if self.export else "set export or checkpoint_every"
            raise PhalanxError("the run wrote no checkpoint (checkpoint_every = never)", where)
        module = build(self.spec, dtype=getattr(torch, self.config.dtype), dropout=self.config.dropout)
        config: Any = getattr(module, "config", None)
        if config is not None and self.spec.config is not None:
            config.use_cache = getattr(self.spec.config, "use_cache", False)  # training is built without one
        fill(module, self.checkpoint)
        return module.eval()


@torch.no_grad()
def fill(module: nn.Module, path: Path, lora: str | None = None) -> None:
    """Copies the values of parameters, in the highest precision there is, from a checkpoint into a module. lora: of the
    run, whose adapters a module of the user's own gets merged in."""
    found = checkpoint.open(path, verify=False)
    stored = set(found.names())
    parameters = dict(module.named_parameters())

    def read(name: str) -> Tensor:
        return found.read(f"master/{name}" if f"master/{name}" in stored else f"model/{name}")

    names = [key.partition("/")[2] for key in found.names() if key.startswith(("master/", "model/"))]
    layers = {name.removesuffix(".lora_A.weight"): False for name in names if name.endswith(".lora_A.weight")}
    if lora is None or f"{next(iter(layers))}.lora_A.weight" in parameters:
        values = ((name, read(name)) for name in parameters)
    else:
        layers = {path: isinstance(module.get_submodule(path), Conv1D) for path in layers}
        values = merged(((name, read(name)) for name in names), layers, Lora.read(lora))
    for name, value in values:
        parameters[name].copy_(value)

"""Weights from torch.distributed.checkpoint folders and into them, as a model names them.

Reads one box of one parameter at a time: at most the stored chunks that hold it are in memory, never the whole model.
Only parameters and buffers are taken; optimizer state in the folder belongs to another trainer and is left alone.

The folder's index is a pickle, which could run any code. It is read by an unpickler that runs none: every class is a
stand-in, and what those of an index hold is checked before it is used.

To write, torch's writer takes all tensors at once, so rank 0 has the whole model in main memory for it. The folder
appears whole or not at all.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, LoadPlan, LoadPlanner, ReadItem, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.errors import ModelError
from phalanx.model.weights.weights import Weights, has_weight_files, tied_names
from phalanx.state.folders import is_inside
from phalanx.state.huggingface import save_tokenizer
from phalanx.state.layout import Box
from phalanx.state.tensor_files import sync_folder

METADATA_FILE = ".metadata"

_WRAPPERS = ("state_dict.", "model.", "module.", "_orig_mod.")
"""What trainers put before a model's own names; several may follow each other."""


def is_dcp(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this folder. One with weights as HuggingFace writes them is not."""
    return (folder / METADATA_FILE).is_file() and not has_weight_files(folder)


class DcpWeights(Weights):
    """The values that a torch.distributed.checkpoint folder holds for `model` (on any device, meta too)."""

    def __init__(self, folder: Path | str, model: nn.Module) -> None:
        self._folder = Path(folder)
        self._reader = FileSystemReader(self._folder)
        metadata = _read_metadata(self._folder)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata
        self._stored = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._names = tuple(name for name, _ in model.named_parameters())
        aliases = tied_names(model)
        self.prefix = self._find_prefix({*self._names, *aliases})
        self._keys = self._find_keys(aliases)
        self._check(model, aliases)

    def names(self) -> tuple[str, ...]:
        return self._names

    def buffer_names(self) -> tuple[str, ...]:
        parameters = set(self._names)
        return tuple(name for name in self._keys if name not in parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def _values(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        return [self._read(self._keys[name], box) for box in boxes]

    def _read(self, key: str, box: Box) -> Tensor:
        entry = self._stored[key]
        target = torch.empty(box.shape, dtype=entry.properties.dtype)
        wanted = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
        items = create_read_items_for_chunk_list(key, entry, [wanted])
        covered = sum(item.lengths.numel() for item in items)
        try:
            if covered != box.numel:
                raise ValueError(f"its chunks hold {covered} of {box.numel} elements")
            self._reader.read_data(LoadPlan(items), _IntoOneTensor(target)).wait()
        except Exception as error:  # torch raises whatever a damaged file makes its unpickler raise
            raise ModelError(
                f"{self._folder} holds no usable values of {key}: {error}", "the folder is damaged; copy it again"
            ) from error
        return target

    def _find_prefix(self, names: set[str]) -> str:
        """The wrapping under which most of the model's names are found; the shortest of several."""
        chains = ("".join(chain) for depth in range(4) for chain in itertools.product(_WRAPPERS, repeat=depth))
        found = {prefix: sum(prefix + name in self._stored for name in names) for prefix in chains}
        return max(found, key=lambda prefix: (found[prefix], -len(prefix)))

    def _find_keys(self, aliases: dict[str, str]) -> dict[str, str]:
        """Canonical name → stored key, for every parameter and persistent buffer that is there."""
        keys: dict[str, str] = {}
        for name in [*(n for n in self._shapes if n not in aliases), *aliases]:
            key = self.prefix + name
            if key in self._stored:
                keys.setdefault(aliases.get(name, name), key)
        return keys

    def _check(self, model: nn.Module, aliases: dict[str, str]) -> None:
        kind = type(model).__name__
        if missing := [name for name in self._names if name not in self._keys]:
            there = "it holds " + _some(self._stored) if self._stored else "it holds no tensors"
            raise ModelError(
                f"{self._folder} lacks {len(missing)} of the parameters of {kind}: {_some(missing)}",
                f"{there}; give the model and task that it was saved from",
            )
        known = {*self._shapes, *(name for name, _ in model.named_buffers())}
        if unexpected := self._unexpected(known):
            raise ModelError(
                f"{self._folder} holds {len(unexpected)} tensors that {kind} does not have: {_some(unexpected)}",
                "the configuration and the weights belong to different models; give the config.json of the weights",
            )
        wrong = [
            f"{name}: stored {list(self._stored[key].size)}, model {list(self._shapes[name])}"
            for name, key in self._keys.items()
            if tuple(self._stored[key].size) != self._shapes[name]
        ]
        if wrong:
            raise ModelError(
                f"{self._folder} holds tensors of other shapes than the model: {_some(wrong)}",
                "the configuration and the weights belong to different models; give the config.json of the weights",
            )
        self._check_ties(aliases)

    def _check_ties(self, aliases: dict[str, str]) -> None:
        """Compares the first rows: tied weights that were trained apart differ everywhere."""
        for alias, canonical in aliases.items():
            one, other = self._keys[canonical], self.prefix + alias
            if other == one or other not in self._stored:
                continue
            shape = self._shapes[canonical]
            box = Box.whole((*(min(size, 8) for size in shape[:1]), *shape[1:]))
            same = self._stored[one].size == self._stored[other].size
            if not same or not torch.equal(self._read(one, box), self._read(other, box)):
                raise ModelError(
                    f"{self._folder} holds different values for {canonical} and {alias}, which this model ties",
                    "set tie_word_embeddings to false in its config.json",
                )

    def _unexpected(self, known: set[str]) -> list[str]:
        """Stored tensors that stand among the model's own names. Others (an optimizer's) are none of its business."""
        roots = {name.partition(".")[0] for name in self._shapes}
        inside = [key.removeprefix(self.prefix) for key in self._stored if key.startswith(self.prefix)]
        return [name for name in inside if name not in known and name.partition(".")[0] in roots]


class _IntoOneTensor(LoadPlanner):
    """Puts what a reader reads into one tensor; torch's own planners load whole state dicts."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        sizes = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._target[tuple(slice(offset, offset + length) for offset, length in sizes)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass  # it was read into place

    def set_up_planner(self, *arguments: Any, **options: Any) -> None:
        raise AssertionError("the plan is made already")

    def create_local_plan(self) -> LoadPlan:
        raise AssertionError("the plan is made already")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise AssertionError("the plan is made already")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise AssertionError("the plan is made already")

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item} is not a tensor")


class _Part:
    """What stands for an object while an index is unpickled: its state."""

    state: Any = None

    def __init__(self, *made_from: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


_PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", str(kind).removeprefix("torch.")): kind for kind in vars(torch).values() if type(kind) is torch.dtype},
}


class _IndexUnpickler(pickle._Unpickler):  # in Python: the one in C takes memory as a few bytes of a file tell it to
    """Imports and runs nothing: whatever a pickle asks for, it gets a stand-in of that name."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        return _PLAIN.get((module_name, global_name)) or type(global_name, (_Part,), {})


def _read_metadata(folder: Path) -> Metadata:
    file = folder / METADATA_FILE
    if not file.is_file():
        raise ModelError(
            f"{folder} has no {METADATA_FILE} file, so torch.distributed.checkpoint did not write or finish it",
            "give a folder that torch.distributed.checkpoint.save() has finished",
        )
    try:
        root = _IndexUnpickler(io.BytesIO(file.read_bytes())).load()
        tensors = _items(_require(root, "Metadata").get("state_dict_metadata"))
        places = _items(root.get("storage_data"))
        return Metadata(
            {_text(key): _tensor(entry) for key, entry in tensors if type(entry).__name__ == "TensorStorageMetadata"},
            storage_data=dict(_place(key, info) for key, info in places),
        )
    except Exception as error:  # an unpickler raises whatever a damaged or hostile file makes it raise
        raise ModelError(
            f"{file} cannot be read: {error}",
            "the file is damaged, or torch.distributed.checkpoint.save() did not write it; copy the folder again",
        ) from error


def _tensor(entry: _Part) -> TensorStorageMetadata:
    dtype = _require(entry.get("properties"), "TensorProperties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} is not a dtype")
    size, chunks = _size(entry.get("size")), entry.get("chunks")
    boxes = [_require(chunk, "ChunkStorageMetadata") for chunk in chunks]
    stored = [ChunkStorageMetadata(_size(box.get("offsets"), size), _size(box.get("sizes"), size)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, stored)


def _place(key: Any, info: Any) -> tuple[MetadataIndex, _StorageInfo]:
    """Where a chunk lies, in a file of the folder."""
    index, place = _require(key, "MetadataIndex"), _require(info, "_StorageInfo")
    path = _text(place.get("relative_path"))
    if not is_inside(path):
        raise ValueError(f"it names {path!r}, which is not a file of this folder")
    if place.get("transform_descriptors"):
        raise ValueError(f"{path} is stored in a form that needs extensions of torch's")
    start, length = torch.Size((place.get("offset"), place.get("length")))
    offset = index.get("offset")
    return MetadataIndex(_text(index.get("fqn")), None if offset is None else _size(offset)), _StorageInfo(
        path, start, length
    )


def _require(part: Any, name: str) -> _Part:
    if not (isinstance(part, _Part) and type(part).__name__ == name):
        raise ValueError(f"it holds a {type(part).__name__} where an index has {name}")
    return part


def _items(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, dict):
        raise ValueError("it does not hold an index of tensors")
    return list(value.items())


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a name")
    return value


def _size(value: Any, like: torch.Size | None = None) -> torch.Size:
    if not isinstance(value, torch.Size) or min(value, default=0) < 0 or (like and len(like) != len(value)):
        raise ValueError(f"{value!r} is not the size of a tensor")
    return value


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def write_dcp(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], config: Any = None, tokenizer: Any = None
) -> Path:  # fmt: skip
    """config, tokenizer: of a HuggingFace model, stored beside the tensors so that it can be trained on from."""
    partial = folder.parent / f".{folder.name}.writing"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        whole = {name: tensor.detach().cpu() for name, tensor in tensors}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group, which is as it should be
            save(whole, storage_writer=FileSystemWriter(partial), no_dist=True)
        if config is not None:
            config.save_pretrained(partial)
        save_tokenizer(tokenizer, partial)
        sync_folder(partial)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder

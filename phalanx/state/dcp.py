"""Weights from a torch.distributed.checkpoint folder, as a model names them.

Reads one box of one parameter at a time: at most the stored chunks that hold it are in memory, never the whole model.
Only parameters and buffers are taken; optimizer state in the folder belongs to another trainer and is left alone.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from phalanx.errors import ModelError
from phalanx.model.weights.weights import Weights, tied_names
from phalanx.state.layout import Box

METADATA_FILE = ".metadata"

_WRAPPERS = ("state_dict.", "model.", "module.", "_orig_mod.")
"""What trainers put before a model's own names; several may follow each other."""


def is_dcp(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this folder."""
    return (folder / METADATA_FILE).is_file()


class DcpWeights(Weights):
    """The values that a torch.distributed.checkpoint folder holds for `model` (on any device, meta too)."""

    def __init__(self, folder: Path | str, model: nn.Module) -> None:
        self._folder = Path(folder)
        self._reader = FileSystemReader(self._folder)
        metadata = _read_metadata(self._folder, self._reader)
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


def _read_metadata(folder: Path, reader: FileSystemReader) -> Metadata:
    if not is_dcp(folder):
        raise ModelError(
            f"{folder} has no {METADATA_FILE} file, so torch.distributed.checkpoint did not write or finish it",
            "give a folder that torch.distributed.checkpoint.save() has finished",
        )
    try:
        return reader.read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
        raise ModelError(
            f"{folder / METADATA_FILE} cannot be read: {error}", "the file is damaged; copy the folder again"
        ) from error


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

"""Writes a trained model as an ordinary HuggingFace folder that `from_pretrained` loads.

Tensors are streamed: only one (or one group that is stored together) is in memory at a time, and the folder appears
whole or not at all. Reading such folders is `model/weights/weights.py`'s work.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from phalanx.errors import ConfigError
from phalanx.model.weights.weights import INDEX_FILE, WEIGHTS_FILE, tied_names
from phalanx.state.tensor_files import ShardWriter, WrittenFile, header_room, sync_files, sync_folder

SHARD_BYTES = 5_000_000_000
GENERATION_FILE = "generation_config.json"

Shapes = Mapping[str, tuple[int, ...]]
Group = tuple[str, ...]


def export(
    folder: Path | str,
    *,
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig | None = None,
    tokenizer: Any = None,
    base_folder: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes `tensors` (every parameter once, by its canonical name; buffers come from `model` when not given).

    `model` says names, ties and class, and may be on the meta device. `config` is what to write where it differs from
    the model's own, `base_folder` the folder that training began with, whose generation settings are kept. A plain
    module, and one whose layers were exchanged for others, gets a weights file alone, by its own names.
    """
    folder = Path(folder)
    is_huggingface = isinstance(model, PreTrainedModel) and not changed_tensors(model)
    _require_replaceable(folder)
    partial = folder.parent / f".{folder.name}.writing"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        dtype = _write_weights(partial, model, tensors, shard_bytes, is_huggingface)
        if is_huggingface:
            assert isinstance(model, PreTrainedModel)
            _write_settings(partial, model, config or model.config, dtype, base_folder)
        save_tokenizer(tokenizer, partial)
        sync_files(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _put_in_place(partial, folder)
    return folder


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """What the model's text was read with, where there is one."""
    if tokenizer is not None:
        save = tokenizer.save_pretrained if hasattr(tokenizer, "save_pretrained") else tokenizer.save
        save(folder)


def changed_tensors(model: PreTrainedModel) -> list[str]:
    """Names that the model has and its class, made from its configuration, has not, or in another shape; and the other
    way round. `from_pretrained` would not find its values."""
    try:
        with torch.device("meta"):
            usual = type(model)(copy.deepcopy(model.config))
    except Exception:  # a class may need more than a configuration, or values that meta tensors do not have
        return []
    ours, theirs = ({name: t.shape for name, t in m.state_dict().items()} for m in (model, usual))
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _write_weights(
    folder: Path, model: nn.Module, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, is_huggingface: bool
) -> str:
    """Writes every tensor and returns the dtype of the first parameter, which is the model's."""
    renamed = _names_to_keep(model)
    buffers = _buffers(model)
    shapes = {renamed[name]: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    dtypes: list[str] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        seen: set[str] = set()
        for name, tensor in itertools.chain(tensors, buffers.items()):
            if name in seen:
                continue
            seen.add(name)
            kept = renamed.get(name, name)
            assert shapes.get(kept) == tuple(tensor.shape), f"{name} of shape {tuple(tensor.shape)} is not the model's"
            if tensor.is_floating_point():
                dtypes.append(str(tensor.dtype).removeprefix("torch."))
            yield kept, tensor
        assert set(renamed) <= seen, f"parameters never came: {sorted(set(renamed) - seen)}"

    names = DiskNames(cast(PreTrainedModel, model), shapes) if is_huggingface else None
    room = header_room(names.stored if names else shapes)
    with ShardWriter(folder, shard_bytes, metadata={"format": "pt"}, header_bytes=room) as writer:
        for key, tensor in names.convert(stream()) if names else stream():
            writer.add(key, tensor)
        _name_shards(folder, writer.close())
    return dtypes[0]


def _names_to_keep(model: nn.Module) -> dict[str, str]:
    """Canonical name → the name to store: of tied names the one that transformers takes as the source of the others."""
    targets = set(getattr(model, "all_tied_weights_keys", None) or {})
    known_as = {name: [name] for name, _ in model.named_parameters()}
    for alias, canonical in tied_names(model).items():
        known_as[canonical].append(alias)
    return {
        canonical: next((name for name in names if name not in targets), canonical)
        for canonical, names in known_as.items()
    }


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers, which the files of a model hold besides its parameters."""
    stored = set(model.state_dict()) - set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def _name_shards(folder: Path, files: list[WrittenFile]) -> None:
    """Gives the files the names that transformers looks for, with an index when there are several."""
    if len(files) == 1:
        os.rename(folder / files[0].name, folder / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        os.rename(folder / file.name, folder / name)
        weight_map |= dict.fromkeys(file.keys, name)
    total = sum(file.size - file.start for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_settings(
    folder: Path, model: PreTrainedModel, config: PretrainedConfig, dtype: str, base_folder: Path | None
) -> None:
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    if not model.can_generate():
        return
    if base_folder is not None and (base_folder / GENERATION_FILE).is_file():
        shutil.copyfile(base_folder / GENERATION_FILE, folder / GENERATION_FILE)
    else:
        GenerationConfig.from_model_config(config).save_pretrained(folder)


def _require_replaceable(folder: Path) -> None:
    """An earlier export may be replaced; anything else in the way is the user's."""
    if folder.is_file():
        raise ConfigError(f"cannot export to {folder}: it is a file", "give a folder that does not exist yet")
    earlier_export = any(folder.glob("model*.safetensors*"))
    if folder.is_dir() and any(folder.iterdir()) and not earlier_export:
        raise ConfigError(
            f"cannot export to {folder}: it holds files that are not an exported model",
            "give a folder that does not exist yet",
        )


def tidy(folder: Path) -> None:
    """Clears what an export that was killed left beside `folder`; an earlier export that had stepped aside returns."""
    shutil.rmtree(folder.parent / f".{folder.name}.writing", ignore_errors=True)
    aside = folder.parent / f".{folder.name}.replaced"
    if aside.exists() and not folder.exists():
        os.rename(aside, folder)
    shutil.rmtree(aside, ignore_errors=True)


def _put_in_place(partial: Path, folder: Path) -> None:
    aside = folder.parent / f".{folder.name}.replaced"
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        os.rename(folder, aside)
    os.rename(partial, folder)
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


class DiskNames:
    """Turns a stream of a model's tensors into a stream of tensors as they are called and shaped on disk.

    transformers stores some architectures in another form than it holds them (experts apart, older names) and undoes
    that when loading. It converts whole state dicts; here the smallest groups of tensors that convert alike are found,
    without their values, so that an export can stream.
    """

    def __init__(self, model: PreTrainedModel, shapes: Shapes) -> None:
        self._model = model
        self._shapes = shapes
        self.stored = self._converted_shapes(tuple(shapes))
        self._group_of = {name: group for group in self._groups() for name in group}

    def convert(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields stored tensors as soon as the tensors they are made from have come by."""
        waiting: dict[Group, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors:
            group = self._group_of[name]
            waiting[group][name] = tensor
            if len(waiting[group]) == len(group):
                yield from revert_weight_conversion(self._model, waiting.pop(group)).items()
        assert not waiting, f"tensors never came: {sorted(set().union(*waiting) - set().union(*waiting.values()))}"

    def _groups(self) -> list[Group]:
        """One tensor alone where that converts as the whole model does, else a layer, else all that is left."""
        names = tuple(self._shapes)
        if self.stored == dict(self._shapes):
            return [(name,) for name in names]
        groups: list[Group] = []
        left = names
        for part_of in (str, _layer, lambda name: ""):
            for group in _grouped(left, part_of):
                if self._converts_alike(group):
                    groups.append(group)
            settled = set().union(*groups)
            left = tuple(name for name in names if name not in settled)
        return groups if not left else [names]

    def _converts_alike(self, group: Group) -> bool:
        try:
            converted = self._converted_shapes(group)
        except Exception:
            return False  # a conversion that misses its other tensors may fail in any way
        return all(self.stored.get(key) == shape for key, shape in converted.items())

    def _converted_shapes(self, group: Group) -> dict[str, tuple[int, ...]]:
        on_meta = {name: torch.empty(self._shapes[name], device="meta") for name in group}
        return {key: tuple(tensor.shape) for key, tensor in revert_weight_conversion(self._model, on_meta).items()}


def _layer(name: str) -> str:
    """The part of a name up to its first number: `model.layers.3`."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""


def _grouped(names: Group, part_of: Callable[[str], str]) -> list[Group]:
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parts[part_of(name)].append(name)
    return [tuple(group) for group in parts.values()]

"""Where parameter values come from: seeded initialisation, a safetensors folder or a module in memory.

Every source answers the same question, one box of one parameter at a time, so no rank ever holds the whole model.
Names are the model's own; a parameter that has several names (tied weights) goes by the first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from phalanx.errors import ModelError
from phalanx.model.weights.ahead import Ahead
from phalanx.model.weights.init_recipe import Recipe
from phalanx.model.weights.key_map import Assembly, Source, match
from phalanx.records import Malformed, read_record
from phalanx.state.folders import is_inside
from phalanx.state.layout import Box
from phalanx.state.tensor_files import TensorFile

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


def tied_names(model: nn.Module) -> dict[str, str]:
    """Alias → canonical name, for every parameter that is known by several names. The canonical one comes first."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(id(parameter), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


class Weights(ABC):
    """A source of parameter values."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Every parameter once, by its canonical name, in the model's order."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def _values(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        """The values of each box, in memory that nobody else uses."""

    def buffer_names(self) -> tuple[str, ...]:
        """Persistent buffers that this source has values for; `read` takes these names too."""
        return ()

    def expect(self, names: Sequence[str]) -> None:
        """What will be read, in this order: a source that computes values may begin to."""
        return

    def read(
        self,
        name: str,
        box: Box | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """One box of a parameter (all of it without `box`), contiguous; `dtype` None keeps the source's own."""
        box = Box.whole(self.shape(name)) if box is None else box
        (values,) = self._inside(name, (box,))
        return values.to(device=device, dtype=dtype).contiguous()

    def read_flat(self, name: str, boxes: Sequence[Box]) -> Tensor:
        """The elements of several boxes one after the other, each row by row: the data of a state shard."""
        parts = [values.reshape(-1) for values in self._inside(name, boxes)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _inside(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        whole = Box.whole(self.shape(name))
        assert all(map(whole.contains, boxes)), f"{boxes} are not inside {name} of shape {whole.shape}"
        return self._values(name, boxes)


class SeededWeights(Weights):
    """Initial values by the model's own rules; each tensor depends only on (seed, name)."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self._recipe = recipe
        self._seed = seed
        self._ahead: Ahead | None = None

    def expect(self, names: Sequence[str]) -> None:
        sizes = [(name, 4 * math.prod(self.shape(name))) for name in names]
        self._ahead = Ahead(self._made, sizes, torch.get_num_threads())

    def names(self) -> tuple[str, ...]:
        return self._recipe.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._recipe.shape(name)

    def _values(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        values = self._made(name) if self._ahead is None else self._ahead.take(name)
        return [values if box.shape == values.shape else values[box.slices()].clone() for box in boxes]

    def _made(self, name: str) -> Tensor:
        return self._recipe.values(name, self._seed)


class ModuleWeights(Weights):
    """The values that a module in memory has now."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        on_meta = [name for name, parameter in self._parameters.items() if parameter.is_meta]
        if on_meta:
            raise ModelError(
                f"the module's parameters are on the meta device and have no values: {_some(on_meta)}",
                "build the module on a real device, or give a factory so that it is initialised from a seed",
            )
        self._buffers = _persistent_buffers(module)

    def names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def buffer_names(self) -> tuple[str, ...]:
        return tuple(self._buffers)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def _values(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        return [self._tensor(name).detach()[box.slices()].clone() for box in boxes]

    def _tensor(self, name: str) -> Tensor:
        return self._parameters[name] if name in self._parameters else self._buffers[name]


class SafetensorsWeights(Weights):
    """A HuggingFace folder's weights, as `model` (on any device, meta too) names them.

    Parameters that the files lack come from `missing_from` and are listed in `missing`; without it they are an error.
    `unexpected` lists stored tensors that the model has no use for.
    """

    def __init__(self, folder: Path | str, model: nn.Module, *, missing_from: Weights | None = None) -> None:
        self._folder = Path(folder)
        self._files = _StoredTensors(self._folder)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._names = tuple(name for name, _ in model.named_parameters())
        key_map = match(model, self._files.shapes)
        self.unexpected = key_map.unexpected
        self._sources = self._by_canonical_name(key_map.sources, tied_names(model))
        self._check_shapes()
        self._missing_from = missing_from
        self.missing = tuple(name for name in self._names if name not in self._sources)
        if self.missing and missing_from is None:
            raise ModelError(
                f"{self._folder} lacks {len(self.missing)} of the parameters of {type(model).__name__}: "
                f"{_some(self.missing)}",
                "choose the task the weights were trained for, or allow new parameters to be initialised from the seed",
            )

    def names(self) -> tuple[str, ...]:
        return self._names

    def buffer_names(self) -> tuple[str, ...]:
        parameters = set(self._names)
        return tuple(name for name in self._sources if name not in parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def _values(self, name: str, boxes: Sequence[Box]) -> list[Tensor]:
        if name not in self._sources:
            assert self._missing_from is not None, f"{name} is neither stored nor initialised"
            return self._missing_from._values(name, boxes)
        return self._read_source(self._sources[name], boxes)

    def _read_source(self, source: Source, boxes: Sequence[Box]) -> list[Tensor]:
        if isinstance(source, Assembly):
            return [source.part(box).read(self._files.read) for box in boxes]
        return [values.clone() for values in source.read(self._files.read, boxes)]

    def _by_canonical_name(self, sources: dict[str, Source], aliases: dict[str, str]) -> dict[str, Source]:
        """Takes a tied parameter from whichever of its names is stored; stored twice, both must be the same."""
        found: dict[str, Source] = {}
        for name in [*(n for n in sources if n not in aliases), *(n for n in sources if n in aliases)]:
            canonical = aliases.get(name, name)
            if canonical not in found:
                found[canonical] = sources[name]
            elif not self._same(found[canonical], sources[name]):
                raise ModelError(
                    f"{self._folder} holds different values for {canonical} and {name}, which this model ties together",
                    "set tie_word_embeddings to false in its config.json",
                )
        return found

    def _same(self, one: Source, other: Source) -> bool:
        """Compares the first rows: tied weights that were trained apart differ everywhere."""
        if one.shape != other.shape:
            return False
        box = Box.whole((*map(lambda size: min(size, 8), one.shape[:1]), *one.shape[1:]))
        return torch.equal(*self._read_source(one, (box,)), *self._read_source(other, (box,)))

    def _check_shapes(self) -> None:
        wrong = [
            f"{name}: stored {list(source.shape)}, model {list(self._shapes[name])}"
            for name, source in self._sources.items()
            if source.shape != self._shapes[name]
        ]
        if wrong:
            raise ModelError(
                f"{self._folder} holds tensors of other shapes than the model: {_some(wrong)}",
                "the configuration and the weights belong to different models; give the config.json of the weights",
            )


@dataclass(frozen=True)
class _Index:
    """What is used of an index: which file holds which tensor."""

    weight_map: dict[str, str]


class _StoredTensors:
    """The tensors in a folder's safetensors files, read box by box."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, TensorFile] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(folder):
            try:
                file = TensorFile(path)
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} cannot be read as safetensors: {error}", "the file is damaged; copy or download it again"
                ) from error
            self.shapes |= file.shapes
            self._file_of |= dict.fromkeys(file.shapes, file)

    def read(self, key: str, box: Box) -> Tensor:
        return self._file_of[key].read(key, box)


def has_weight_files(folder: Path) -> bool:
    """Whether a folder holds weights as HuggingFace writes them."""
    return (folder / INDEX_FILE).is_file() or (folder / WEIGHTS_FILE).is_file()


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, through its index where it has one."""
    index, single = folder / INDEX_FILE, folder / WEIGHTS_FILE
    if index.is_file():
        try:
            names = sorted(set(read_record(_Index, index.read_bytes()).weight_map.values()))
        except (Malformed, OSError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error}", "copy or download it again") from error
        if outside := [name for name in names if not is_inside(name)]:
            raise ModelError(
                f"{index} names files outside of its folder: {_some(outside)}",
                "do not use this folder unless you know why; a model's weights lie beside their index",
            )
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(f"{index} names files that are not there: {_some(absent)}", "copy or download them")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    pickled = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    raise ModelError(
        f"{folder} has no {WEIGHTS_FILE} and no {INDEX_FILE}" + (f" (only {_some(pickled)})" if pickled else ""),
        "load the model once with transformers and save_pretrained() it, which writes safetensors"
        if pickled
        else "give a folder written by save_pretrained(), or leave the weights out to start from a seed",
    )


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    stored = set(module.state_dict())
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def _some(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")

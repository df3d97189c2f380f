"""Seeded initial values that follow the model's own rules, one parameter at a time.

A recipe keeps, for each parameter, the operations its constructor and initialiser applied to it; replaying them gives
values that depend only on (seed, name): not on the order of reading, nor on which parameters are read. It never holds
parameter values.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from phalanx.errors import ModelError
from phalanx.model.weights.init_trace import Event, Recorder, Storage, Trace, View

# Constructors branch on small tensors (schedules, frequencies), so those keep values; weights need not.
REAL_LIMIT = 1 << 14
DRAWN_TOGETHER = 1 << 24  # elements at most


@dataclass(frozen=True)
class _Slice:
    """The events that one parameter's values depend on, and the storages that must start as zeros."""

    events: tuple[int, ...]
    blank: frozenset[int]


class Recipe:
    """How every parameter of a model gets its initial values. Made by `record`."""

    def __init__(self, trace: Trace, parameters: dict[str, View]) -> None:
        self._trace = trace
        self._parameters = parameters
        self._slices = {name: _slice(trace, view.storage) for name, view in parameters.items()}
        self._labels = self._label_draws()

    def names(self) -> tuple[str, ...]:
        """Parameter names in the model's order, tied ones once."""
        return tuple(self._parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parameters[name].size

    def untouched(self) -> list[str]:
        """Parameters that were allocated and never given a value."""
        return [
            name
            for name, view in self._parameters.items()
            if not self._slices[name].events and self._trace.storages[view.storage].constant is None
        ]

    def values(self, name: str, seed: int) -> Tensor:
        """The parameter's whole initial value on the CPU, in the dtype the model was constructed in."""
        memory = _Memory(self._trace.storages, self._slices[name].blank)
        for index in self._slices[name].events:
            _replay(self._trace.events[index], memory, seed, self._labels.get(index, ""))
        return memory.tensor(self._parameters[name])

    def _label_draws(self) -> dict[int, str]:
        """Names each random draw after the first parameter that uses it, so that parameters made from one draw
        (a weight and its norm) agree."""
        labels: dict[int, str] = {}
        for name in self._parameters:
            draws = [i for i in self._slices[name].events if self._trace.events[i].random]
            for count, index in enumerate(draws):
                labels.setdefault(index, f"{name}#{count}")
        return labels


def record(factory: Callable[[], nn.Module]) -> Recipe:
    """Runs `factory` (an ordinary constructor on the CPU) and records how it initialises parameters.

    Large tensors take no memory. Where the constructor needs their values, it is run again for real.
    """
    try:
        recipe = _attempt(factory, REAL_LIMIT)
        if not recipe.untouched():
            return recipe
    except Exception:
        pass  # the constructor may have asked for values that are not there; the real run below decides
    recipe = _attempt(factory, None)
    if missing := recipe.untouched():
        raise ModelError(
            f"{len(missing)} parameters are allocated but nothing initialises them: {', '.join(missing[:8])}"
            + (", …" if len(missing) > 8 else ""),
            "give them values in the module's constructor (torch.nn.init), or start from a folder with weights",
        )
    return recipe


def _attempt(factory: Callable[[], nn.Module], real_limit: int | None) -> Recipe:
    recorder = Recorder(real_limit)
    with recorder.recording():
        model = factory()
    return Recipe(recorder.trace, {name: recorder.view(p) for name, p in model.named_parameters()})


def _slice(trace: Trace, storage: int) -> _Slice:
    """Walks back from a storage through everything that its final values were computed from."""
    picked: set[int] = set()
    blank: set[int] = set()
    pending = [(storage, len(trace.events))]
    asked: set[tuple[int, int]] = set()
    while pending:
        wanted, before = pending.pop()
        if (wanted, before) in asked:
            continue
        asked.add((wanted, before))
        for index in reversed([i for i in trace.writers.get(wanted, ()) if i < before]):
            event = trace.events[index]
            picked.add(index)
            pending.extend((read, index) for read in event.reads if read != wanted)
            defines = event.sets_every_element or any(out and out.storage == wanted for out in event.outputs)
            if defines and wanted not in event.reads:
                break
        else:
            blank.add(wanted)
    return _Slice(tuple(sorted(picked)), frozenset(blank))


class _Memory:
    """Real memory for the storages that one replay touches."""

    def __init__(self, storages: list[Storage], blank: frozenset[int]) -> None:
        self._storages = storages
        self._blank = blank
        self._flat: dict[int, Tensor] = {}

    def tensor(self, view: View) -> Tensor:
        flat = self._flat.get(view.storage)
        if flat is None:
            flat = self._flat[view.storage] = self._allocate(view.storage)
        return flat.view(view.dtype).as_strided(view.size, view.stride, view.offset)

    def put(self, view: View, value: Tensor) -> None:
        """Takes an operation's result as the storage's content."""
        if value.is_contiguous() and value.numel() == self._storages[view.storage].numel:
            self._flat[view.storage] = value.reshape(-1)
        else:
            self.tensor(view).copy_(value)

    def _allocate(self, storage: int) -> Tensor:
        known = self._storages[storage]
        if known.constant is not None:
            return known.constant.clone()
        make = torch.zeros if storage in self._blank else torch.empty
        return make(known.numel, dtype=known.dtype)


def _replay(event: Event, memory: _Memory, seed: int, label: str) -> None:
    recorded = (event.args, event.kwargs)
    args, kwargs = tree_map(lambda leaf: memory.tensor(leaf) if isinstance(leaf, View) else leaf, recorded)
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    with torch.no_grad():
        if not event.random:
            result = event.call(*args, **kwargs)
        elif event.sets_every_element and args[0].is_contiguous() and args[0].numel() > DRAWN_TOGETHER:
            result = _draw_in_parts(_seeded(event.call), args, kwargs, seed, label)
        else:
            result = _seeded(event.call)(*args, **{**kwargs, "generator": _generator(seed, label)})
    for view, value in zip(event.outputs, tree_flatten(result)[0], strict=False):
        if view is not None:
            memory.put(view, value)


def _draw_in_parts(call: Any, args: Sequence[Any], kwargs: dict[str, Any], seed: int, label: str) -> Tensor:
    """A draw runs on one thread, which takes seconds for an embedding alone; its parts, each with a seed of its own,
    run side by side."""
    target, *others = args
    parts = target.view(-1).split(DRAWN_TOGETHER)

    def draw(number: int) -> None:
        with torch.no_grad():
            call(parts[number], *others, **{**kwargs, "generator": _generator(seed, f"{label}/{number}")})

    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as threads:
        list(threads.map(draw, range(len(parts))))
    return target


def _seeded(call: Any) -> Any:
    """The form of a random operation that takes a generator."""
    schema = getattr(call, "_schema", None)
    if schema is None or any(argument.name == "generator" for argument in schema.arguments):
        return call
    packet = call._overloadpacket
    if "generator" not in packet.overloads():
        raise ModelError(
            f"initialisation uses the random operation {schema.name}, which cannot be seeded per parameter",
            "use torch.nn.init functions in the module's constructor",
        )
    return packet.generator


def _generator(seed: int, label: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{label}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))

"""Records what a model's constructor does to tensors, without paying for the tensors.

While a `Recorder` is active, large tensors are fake: they claim to be on the CPU but have no memory. Every operation
that creates or changes values is kept as an `Event`; turning events into values is `init_recipe`'s work.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

_ALLOCATING = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted"}
_SETTING_EVERY_ELEMENT = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_",
}  # fmt: skip


@dataclass(frozen=True)
class View:
    """A tensor argument as a window on a storage; which Python object showed it does not matter."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Event:
    """One operation. `args` and `kwargs` hold Views where tensors were; `outputs` are the storages it made."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[View | None, ...]
    reads: frozenset[int]
    sets_every_element: bool
    random: bool


@dataclass
class Storage:
    """Memory that tensors share. `constant` holds values that were there before we could see them being made."""

    numel: int
    dtype: torch.dtype
    constant: Tensor | None = None


@dataclass
class Trace:
    """Every event in order, and for each storage which events wrote to it."""

    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


class Recorder(TorchDispatchMode):
    """Builds a Trace. Tensors of more than `real_limit` elements are fake; None keeps every tensor real.

    Fake rather than meta: initialisers (torch's own too) skip meta tensors, which would go unnoticed here, while
    asking a fake tensor for its values fails.
    """

    def __init__(self, real_limit: int | None) -> None:
        super().__init__()
        self.trace = Trace()
        self._real_limit = real_limit
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._ids: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []  # an address names a storage only while the storage lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        seen = tree_map(self._as_view, (args, kwargs))
        result = self._execute(func, inputs, args, kwargs)
        self._note_operation(func, args, kwargs, seen, result)
        return result

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the body, leaving the process's random state as it was."""
        with torch.random.fork_rng(devices=[]), _truncated_normal_as_one_event(self), self:
            yield

    def view(self, tensor: Tensor) -> View:
        """The window that `tensor` is; memory not seen before is copied, as its values have no known origin."""
        memory = tensor.untyped_storage()
        if memory._cdata not in self._ids:
            constant = None
            if not isinstance(tensor, FakeTensor):
                flat = torch.empty(0, dtype=tensor.dtype).set_(memory)  # pyright: ignore[reportArgumentType]
                constant = flat.detach().clone()
            self._register(tensor, constant)
        return View(
            self._ids[memory._cdata],
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
        )

    def note(self, event: Event, written: frozenset[int]) -> None:
        """Appends an event that wrote to these storages, besides those it made."""
        index = len(self.trace.events)
        self.trace.events.append(event)
        for storage in written | {out.storage for out in event.outputs if out is not None}:
            self.trace.writers[storage].append(index)

    def _as_view(self, leaf: Any) -> Any:
        return self.view(leaf) if isinstance(leaf, Tensor) else leaf

    def _register(self, tensor: Tensor, constant: Tensor | None) -> None:
        memory = tensor.untyped_storage()
        self._alive.append(memory)
        self._ids[memory._cdata] = len(self.trace.storages)
        self.trace.storages.append(Storage(memory.nbytes() // tensor.element_size(), tensor.dtype, constant))

    def _execute(self, func: Any, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        if any(isinstance(tensor, FakeTensor) for tensor in inputs):
            for target in tree_flatten(_mutable_arguments(func, args, kwargs))[0]:
                if isinstance(target, Tensor) and not isinstance(target, FakeTensor):
                    raise RuntimeError(f"{func} would write values that a fake tensor does not have")
            return func(*args, **kwargs)
        if self._real_limit is not None and not inputs:
            with self._fake:
                fake = func(*args, **kwargs)
            if isinstance(fake, Tensor) and fake.numel() > self._real_limit:
                return fake
        return func(*args, **kwargs)

    def _note_operation(self, func: Any, args: Any, kwargs: Any, seen: Any, result: Any) -> None:
        outputs = []
        for out in tree_flatten(result)[0]:
            fresh = isinstance(out, Tensor) and out.untyped_storage()._cdata not in self._ids
            if fresh:
                self._register(out, None)
            outputs.append(self.view(out) if fresh else None)
        name = func._schema.name.removeprefix("aten::")
        written = frozenset(
            leaf.storage for leaf in tree_flatten(_mutable_arguments(func, *seen))[0] if isinstance(leaf, View)
        )
        if name in _ALLOCATING or not (written or any(outputs)):
            return
        target = seen[0][0] if seen[0] else None
        sets_all = name in _SETTING_EVERY_ELEMENT and isinstance(target, View) and self._covers(target)
        sources = tree_flatten((seen[0][1:] if sets_all else seen[0], seen[1]))[0]
        reads = frozenset(leaf.storage for leaf in sources if isinstance(leaf, View))
        random = torch.Tag.nondeterministic_seeded in func.tags
        self.note(Event(func, seen[0], seen[1], tuple(outputs), reads, sets_all, random), written)

    def _covers(self, view: View) -> bool:
        numel = 1
        for size in view.size:
            numel *= size
        return numel == self.trace.storages[view.storage].numel

    def note_truncated_normal(self, tensor: Tensor, bounds: tuple[float, float, float, float]) -> None:
        view = self.view(tensor)
        sets_all = self._covers(view)
        reads = frozenset() if sets_all else frozenset({view.storage})
        event = Event(torch.nn.init.trunc_normal_, (view, *bounds), {}, (), reads, sets_all, random=True)
        self.note(event, frozenset({view.storage}))


def _mutable_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    declared = func._schema.arguments
    by_name = {argument.name: value for argument, value in zip(declared, args, strict=False)} | kwargs
    return [by_name[a.name] for a in declared if a.alias_info and a.alias_info.is_write and a.name in by_name]


@contextlib.contextmanager
def _truncated_normal_as_one_event(recorder: Recorder) -> Iterator[None]:
    """torch draws truncated normals in a loop that looks at the values, so its steps cannot be replayed with other
    random numbers; the call as a whole can."""
    original = torch.nn.init._no_grad_trunc_normal_

    def recorded(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        recorder.note_truncated_normal(tensor, (mean, std, a, b))
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                original(tensor, mean, std, a, b, generator=generator)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = recorded
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original

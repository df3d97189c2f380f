"""The optimizer's state that lies on the host: masters and moments of some buckets, in parts.

Either a part comes to the device for its update and goes back, or the host updates it, in a thread of its own, and what
the model computes with comes to the device. Where that lies on the host, too, it goes there with its state, or stays.
Both may share the work: then the thread lets parts come to the device, too, on streams of their own, beside the next
forward.
All of it is exact: the same arithmetic on the same elements. In a checkpoint state has the names and shapes that it has
without offload.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.params.flat import ALIGNMENT, Piece
from phalanx.params.host_memory import Copying, HostMemory, Release, on_host
from phalanx.params.optimizer import Optimizer
from phalanx.params.parameters import Parameters, Weight
from phalanx.plan.offload import PARTS_BESIDE

PartName = tuple[int, int]  # bucket, part
Make = Callable[[Mapping[str, Weight]], torch.optim.Optimizer]


class Range(NamedTuple):
    """Elements [start, stop) of this rank's piece of a parameter."""

    name: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[self.start : self.stop]


class Given(NamedTuple):
    """What an update goes by: on the device, or on the host once it has arrived there."""

    lr: float | None  # None: as it stands in the optimizer
    norm: Tensor
    finite: Tensor
    loss_scale: Tensor | None


@dataclass(frozen=True)
class Left:
    """Gradients of a bucket on the host, by parameter, as soon as they are there."""

    pieces: dict[str, Tensor]
    copying: Copying
    release: Release


class HostedOptimizer:
    """parts: into how many each bucket's state is divided. make: the torch optimizer for some weights. on_host: the
    host updates, too. on_device: the parts of buckets that the device updates although the host updates others."""

    def __init__(
        self, parameters: Parameters, parts: Mapping[int, int], make: Make, clip: float | None, device: torch.device,
        *, on_host: bool, on_device: Callable[[int, int], bool] = lambda bucket, part: False,
    ) -> None:  # fmt: skip
        self._parameters, self._memory, self._device = parameters, HostMemory(device), device
        self._on_host = on_host
        self.ranges = {
            (bucket, part): own
            for bucket, count in parts.items()
            for part, own in enumerate(_divide(parameters.bucket(bucket).updated, count))
        }
        self._weights = {
            each.key: _part_of(parameters.weights[each.name], each) for own in self.ranges.values() for each in own
        }
        self._of_name: dict[str, list[Range]] = {}
        for own in self.ranges.values():
            for each in own:
                self._of_name.setdefault(each.name, []).append(each)
        for own in self._of_name.values():
            own.sort()
        exact = {name: parameters.weights[name] for name in self._of_name}
        self.masters = {name for name, weight in exact.items() if weight.exact is not weight.copy}  # on the host, too
        self._core = Optimizer(make(self._weights), self._weights, clip)
        self._came: dict[PartName, dict[str, Tensor]] = {}  # gradients that came from the host
        self._beside = {part for part in self.ranges if on_device(*part)}
        self._ways = Ways(device) if self._beside else None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def buckets(self) -> set[int]:
        return {bucket for bucket, _ in self.ranges}

    def follow(self, optimizer: Optimizer, clip: float | None) -> None:
        """Takes over what a loop of the user's own set in the optimizer of what is not on the host, which has the same
        groups: learning rates, decay, and what gradients are clipped to."""
        self._core.clip = clip
        for mine, theirs in zip(self._core.inner.param_groups, optimizer.inner.param_groups, strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})

    # Updates on the device.

    def _memory_of(self, part: PartName) -> HostMemory:
        """Whose streams a part travels on."""
        return self._ways.memory if self._ways is not None and part in self._beside else self._memory

    def fetch(self, part: PartName, left: Left | None = None) -> Copying:
        """Starts to bring a part's state to the device, in memory of its own; nothing else may read it until it is
        back. left: its gradients come, too."""
        if left is not None:
            own = {each.key: each.of(left.pieces[each.name]) for each in self.ranges[part] if each.name in left.pieces}
            self._came[part] = self._memory_of(part).bring_in(own)
        return self._memory_of(part).fetch(self._moving(part))

    def store(self, part: PartName) -> Copying:
        """Starts to bring it back, and what is computed with where that lies on the host."""
        rounded: list[tuple[Tensor, Tensor]] = []
        for each in self.ranges[part] if self._is_copied_home(part) else ():
            copy = each.of(self._parameters.weights[each.name].copy)
            rounded.append((copy, self._weights[each.key].exact.to(copy.dtype)))
        return self._memory_of(part).store(self._moving(part), rounded)

    def _is_copied_home(self, part: PartName) -> bool:
        """Whether masters are updated elsewhere than the parameters that are copies of them lie."""
        bucket = self._parameters.bucket(part[0])
        return bucket.on_host and bucket.masters is not None

    def bring_home(self) -> None:
        """After a step that was interrupted: what had come to the device goes back."""
        for part in self.ranges:
            memory = self._memory_of(part)
            away = [tensor for tensor in self._moving(part) if not memory.is_at_home(tensor)]
            if away:
                memory.store(away)

    def settle(self) -> None:
        """Waits until all state is on the host."""
        self._memory.settle()
        if self._ways is not None:
            self._ways.memory.settle()

    def step(self, part: PartName, gradients: Mapping[str, Tensor], given: Given) -> None:
        """Updates a part where its state is."""
        own = self._came.pop(part, None)
        if own is None:
            own = {each.key: each.of(gradients[each.name]) for each in self.ranges[part] if each.name in gradients}
        self._core.step(own, given.lr, given.norm, given.finite, given.loss_scale)
        for each in self.ranges[part] if not self._parameters.bucket(part[0]).on_host else ():
            weight = self._parameters.weights[each.name]
            if weight.copy is not weight.exact and not self._memory_of(part).is_at_home(self._weights[each.key].exact):
                each.of(weight.copy).copy_(self._weights[each.key].exact)

    def _moving(self, part: PartName) -> list[Tensor]:
        """Masters, or parameters that lie on the host, and moments; what is no larger than a number stays."""
        found: list[Tensor] = []
        on_host = self._parameters.bucket(part[0]).on_host
        for each in self.ranges[part]:
            weight, exact = self._parameters.weights[each.name], self._weights[each.key].exact
            found += [exact] if on_host or weight.copy is not weight.exact else []
            state = self._core.inner.state.get(exact, {})
            found += [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
        return found

    # Updates on the host.

    def step_behind(
        self, part: PartName, left: Left, given: Callable[[], Given], given_here: Callable[[], Given], is_last: bool
    ) -> Future[Copying]:  # fmt: skip
        """Starts the update of a part, after those that were started before; then it comes to the device, unless it is
        fetched when it is needed. given: waits until it is on the host. given_here: the same on the device. is_last: of
        its bucket, so that nobody needs the gradients after it."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "phalanx-optimizer", initializer=self._join_device)
        issued, ways = self._memory.mark(), self._ways
        by_device = given_here() if part in self._beside else None

        def update() -> Copying:
            left.copying.wait_here()
            with torch.no_grad():
                if by_device is not None:
                    return self._step_beside(part, left, by_device, issued, is_last)
                self.step(part, left.pieces, given())
                if is_last:
                    left.release(None if ways is None else ways.memory.arrived())
                ranges = self.ranges[part]
                exact = [self._weights[each.key].exact for each in ranges]
                copies = [each.of(self._parameters.weights[each.name].copy) for each in ranges]
                if self._parameters.bucket(part[0]).on_host:
                    _round_into(copies, exact)
                    return Copying()
                return self._memory.bring(copies, exact, issued)

        return self._thread.submit(update)

    def _step_beside(
        self, part: PartName, left: Left, given: Given, issued: torch.cuda.Event | None, is_last: bool
    ) -> Copying:  # fmt: skip
        """Starts the update of a part on the device, beside what else it computes."""
        assert self._ways is not None
        with self._ways.next(issued):
            self.fetch(part, left).wait()
            if is_last:
                left.release(self._ways.memory.arrived())
            self.step(part, left.pieces, given)
            return self._ways.leave(self.store(part), given)

    def _join_device(self) -> None:
        """Of the thread that updates: it pins memory for this device, and with one rank for each GPU of the machine
        leaves the others their share of the processor."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, torch.cuda.device_count())))

    def leave(self, gradients: Mapping[str, Tensor]) -> Left:
        """Starts to bring gradients to the host."""
        pieces, copying, release = self._memory.take_in(gradients)
        return Left(pieces, copying, release)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def forget(self) -> None:
        """Lets go of all tensors."""
        self._core.forget()
        self._weights.clear()

    # As checkpoints have it.

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """As `Optimizer.tensors`, the parts of a parameter put together."""
        for name, ranges in self._of_name.items():
            states = [self._core.inner.state.get(self._weights[each.key].exact, {}) for each in ranges]
            for slot, value in states[0].items():
                if isinstance(value, Tensor):
                    whole = value if value.dim() == 0 else torch.cat([state[slot] for state in states])
                    yield slot, name, whole if value.dim() == 0 else whole.view(self._shape(name))

    def scalars(self) -> dict[str, Any]:
        first = {ranges[0].key: name for name, ranges in self._of_name.items()}
        found: dict[str, Any] = {}
        for key, value in self._core.scalars().items():
            prefix, slot, own = key.split("/", 2)
            if own in first or own not in self._weights:
                found[f"{prefix}/{slot}/{first.get(own, own)}"] = value
        return found

    def load(
        self, slots: Iterable[tuple[str, str]], read: Callable[[str, str], Tensor], scalars: Mapping[str, Any]
    ) -> None:
        parts: dict[tuple[str, str], tuple[str, Range]] = {}
        for slot, name in slots:
            parts |= {(slot, each.key): (name, each) for each in self._of_name.get(name, ())}
        known: dict[tuple[str, str], Tensor] = {}

        def read_part(slot: str, key: str) -> Tensor:
            name, own = parts[slot, key]
            if (slot, name) not in known:
                known.clear()  # parts of one parameter follow each other
                known[slot, name] = read(slot, name)
            whole = known[slot, name]
            return whole.clone() if whole.dim() == 0 else own.of(whole).clone()

        renamed: dict[str, Any] = {}
        for key, value in scalars.items():
            prefix, slot, name = key.split("/", 2)
            own = [each.key for each in self._of_name.get(name, ())] or [name]
            renamed |= {f"{prefix}/{slot}/{each}": value for each in own}
        self._core.load(parts, read_part, renamed)
        beside = {each.key for part in self._beside for each in self.ranges[part]}
        for key, weight in self._weights.items():
            state = self._core.inner.state.get(weight.exact, {})
            stays = self._on_host and key not in beside
            state |= {slot: self._settled(value, stays) for slot, value in state.items() if isinstance(value, Tensor)}

    def _settled(self, value: Tensor, stays: bool) -> Tensor:
        """Where it lies between steps. Counters of what the device updates by fused kernels lie there. stays: the host
        updates it."""
        if value.dim() > 0:
            return value.cpu() if stays else on_host(value, self._device)
        fused = bool(self._core.inner.defaults.get("fused"))
        return value.to(self._device) if fused and not stays else value

    def _shape(self, name: str) -> torch.Size:
        return self._parameters.weights[name].exact.shape


class Ways:
    """To the device and back for parts that it updates beside its other work, so many at a time at most."""

    def __init__(self, device: torch.device) -> None:
        self.memory = HostMemory(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[tuple[Copying, Given]] = deque()  # with what it reads, so that it stays

    def next(self, issued: torch.cuda.Event | None) -> Any:
        """The stream for a further part, as soon as there is room. issued: what it comes after."""
        while len(self._under_way) >= PARTS_BESIDE:
            self._under_way.popleft()[0].wait_here()
        if self._stream is None or issued is None:
            return nullcontext()
        self._stream.wait_event(issued)
        return torch.cuda.stream(self._stream)

    def leave(self, leaving: Copying, given: Given) -> Copying:
        self._under_way.append((leaving, given))
        return leaving


def _round_into(copies: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Where masters are another thing than the copies of them."""
    for copy, own in zip(copies, exact, strict=True):
        if copy.data_ptr() != own.data_ptr():
            copy.copy_(own)


def _divide(pieces: Sequence[tuple[Piece, int]], count: int) -> list[list[Range]]:
    """A shard's pieces, which lie at these offsets, as so many parts of about equal size."""
    end = max((offset + piece.stop - piece.start for piece, offset in pieces), default=0)
    edges = [end * i // count for i in range(count + 1)]
    parts: list[list[Range]] = []
    for begin, stop in pairwise(edges):
        own: list[Range] = []
        for piece, offset in pieces:
            first, last = (_cut(edge - offset, piece.stop - piece.start) for edge in (begin, stop))
            if first < last:
                own.append(Range(piece.name, first, last))
        parts.append(own)
    return parts


def _cut(place: int, size: int) -> int:
    """Where a piece is cut: so that vectorised kernels, which treat what is left at the end differently, see the same
    elements together as in the whole."""
    return size if place >= size else max(place, 0) // ALIGNMENT * ALIGNMENT


def _part_of(weight: Weight, own: Range) -> Weight:
    """A weight whose copy is left to others."""
    piece = weight.piece
    exact = own.of(weight.exact)
    return Weight(Piece(piece.name, piece.local, piece.start + own.start, piece.start + own.stop), exact, exact, True)

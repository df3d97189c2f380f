"""The optimizer's state that lies on the host: masters and moments of some buckets, in parts.

Either a part comes to the device for its update and goes back, or the host updates it, in a thread of its own, and what
the model computes with comes to the device. Where that lies on the host, too, it goes there with its state, or stays.
Both may share the work: then a second thread lets parts come to the device, on streams of their own, beside the next
forward, while the host updates others.
All of it is exact: the same arithmetic on the same elements. In a checkpoint state has the names and shapes that it has
without offload.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from threading import Lock
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


class Left:
    """Gradients of a bucket on the host, by parameter, as soon as they are there. readers: updates that read them."""

    def __init__(self, pieces: dict[str, Tensor], copying: Copying, release: Release, readers: int) -> None:
        self.pieces, self.copying, self.release = pieces, copying, release
        self._readers, self._lock = readers, Lock()

    def was_read(self, arrived: Callable[[], torch.cuda.Event | None]) -> None:
        """By one of them; the last gives their memory back. arrived: passes when the device has what it fetched."""
        with self._lock:
            self._readers -= 1
            if self._readers:
                return
        self.release(arrived())


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
        self._came: dict[PartName, dict[str, Tensor]] = {}  # gradients that came from the host
        self._beside = {part for part in self.ranges if on_device(*part)}
        self._ways = Ways(device) if self._beside else None
        self._cores = [Optimizer(make(weights), weights, clip) for weights in self._by_place()]
        self._core_of = {key: core for core in self._cores for key in core.weights}
        self._threads: dict[bool, ThreadPoolExecutor] = {}  # that update on the host, and beside it on the device

    @property
    def buckets(self) -> set[int]:
        return {bucket for bucket, _ in self.ranges}

    def follow(self, optimizer: Optimizer, clip: float | None) -> None:
        """Takes over what a loop of the user's own set in the optimizer of what is not on the host, which has the same
        groups: learning rates, decay, and what gradients are clipped to."""
        for core in self._cores:
            core.clip = clip
            for mine, theirs in zip(core.inner.param_groups, optimizer.inner.param_groups, strict=True):
                mine.update({name: value for name, value in theirs.items() if name != "params"})

    def _by_place(self) -> list[dict[str, Weight]]:
        """The weights that one optimizer updates, and those of a second one where host and device update side by side,
        since neither may see what the other is at."""
        beside = {each.key for part in self._beside for each in self.ranges[part]}
        here = {key: weight for key, weight in self._weights.items() if key in beside}
        rest = {key: weight for key, weight in self._weights.items() if key not in beside}
        return [weights for weights in (rest, here) if weights] or [rest]

    def _state_of(self, each: Range) -> dict[str, Any]:
        return self._core_of[each.key].inner.state.get(self._weights[each.key].exact, {})

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
        core = self._cores[-1 if part in self._beside else 0]
        core.step(own, given.lr, given.norm, given.finite, given.loss_scale)
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
            found += [value for value in self._state_of(each).values() if isinstance(value, Tensor) and value.dim() > 0]
        return found

    # Updates on the host.

    def step_behind(
        self, part: PartName, left: Left, given: Callable[[], Given], given_here: Callable[[], Given]
    ) -> Future[Copying]:  # fmt: skip
        """Starts the update of a part, after those that were started before in the same place; then it comes to the
        device, unless it is fetched when it is needed. given: waits until it is on the host. given_here: the same on
        the device."""
        issued = self._memory.mark()
        if part in self._beside:
            return self._thread(beside=True).submit(self._step_beside, part, left, given_here(), issued)
        return self._thread(beside=False).submit(self._step_on_host, part, left, given, issued)

    def _step_on_host(
        self, part: PartName, left: Left, given: Callable[[], Given], issued: torch.cuda.Event | None
    ) -> Copying:  # fmt: skip
        left.copying.wait_here()
        with torch.no_grad():
            self.step(part, left.pieces, given())
            left.was_read(self._arrived)
            ranges = self.ranges[part]
            exact = [self._weights[each.key].exact for each in ranges]
            copies = [each.of(self._parameters.weights[each.name].copy) for each in ranges]
            if self._parameters.bucket(part[0]).on_host:
                _round_into(copies, exact)
                return Copying()
            return self._parameters.fetching.pass_by(issued, self._memory.bring(copies, exact, issued))

    def _step_beside(
        self, part: PartName, left: Left, given: Given, issued: torch.cuda.Event | None
    ) -> Copying:  # fmt: skip
        """Starts the update of a part on the device, beside what else it computes. Its state comes as early as there is
        room, whatever the device is at."""
        assert self._ways is not None
        left.copying.wait_here()
        with torch.no_grad():
            with self._ways.coming():
                self._parameters.fetching.let_pass()
                coming = self.fetch(part, left)
            left.was_read(self._arrived)
            came = [*self._came[part].values(), *(tensor.data for tensor in self._moving(part))]
            with self._ways.updating(issued, coming, came):
                self.step(part, left.pieces, given)
                return self._ways.leave(self.store(part), given)

    def _arrived(self) -> torch.cuda.Event | None:
        return None if self._ways is None else self._ways.memory.arrived()

    def _thread(self, *, beside: bool) -> ThreadPoolExecutor:
        if beside not in self._threads:
            self._threads[beside] = ThreadPoolExecutor(1, "phalanx-optimizer", initializer=self._join_device)
        return self._threads[beside]

    def _join_device(self) -> None:
        """Of the thread that updates: it pins memory for this device, and with one rank for each GPU of the machine
        leaves the others their share of the processor."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // max(1, torch.cuda.device_count())))

    def leave(self, bucket: int, gradients: Mapping[str, Tensor]) -> Left:
        """Starts to bring a bucket's gradients to the host."""
        return Left(*self._memory.take_in(gradients), readers=sum(own == bucket for own, _ in self.ranges))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()

    def forget(self) -> None:
        """Lets go of all tensors."""
        for core in self._cores:
            core.forget()
        self._weights.clear()

    # As checkpoints have it.

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """As `Optimizer.tensors`, the parts of a parameter put together."""
        for name, ranges in self._of_name.items():
            states = [self._state_of(each) for each in ranges]
            for slot, value in states[0].items():
                if isinstance(value, Tensor):
                    whole = value if value.dim() == 0 else torch.cat([state[slot] for state in states])
                    yield slot, name, whole if value.dim() == 0 else whole.view(self._shape(name))

    def scalars(self) -> dict[str, Any]:
        first = {ranges[0].key: name for name, ranges in self._of_name.items()}
        found: dict[str, Any] = {}
        for key, value in (item for core in self._cores for item in core.scalars().items()):
            prefix, slot, own = key.split("/", 2)
            if own in first or own not in self._weights:
                found[f"{prefix}/{slot}/{first.get(own, own)}"] = value
        return found

    def load(
        self, slots: Iterable[tuple[str, str]], read: Callable[[str, str], Tensor], scalars: Mapping[str, Any]
    ) -> None:
        for slot, name in slots:
            if name in self._of_name:
                self._load(slot, name, read(slot, name))
        renamed: dict[str, Any] = {}
        for key, value in scalars.items():
            prefix, slot, name = key.split("/", 2)
            own = [each.key for each in self._of_name.get(name, ())] or [name]
            renamed |= {f"{prefix}/{slot}/{each}": value for each in own}
        for core in self._cores:
            core.load((), read, renamed)
        for part, own in self.ranges.items():
            stays = self._on_host and part not in self._beside
            for state in map(self._state_of, own):
                state |= {
                    slot: self._settled(value, stays) for slot, value in state.items() if isinstance(value, Tensor)
                }

    def _load(self, slot: str, name: str, whole: Tensor) -> None:
        """Into the parts of a parameter, whichever optimizers update them: what came from others can be read once."""
        for each in self._of_name[name]:
            own = whole if whole.dim() == 0 else each.of(whole)
            self._core_of[each.key].inner.state[self._weights[each.key].exact][slot] = own.clone()

    def _settled(self, value: Tensor, stays: bool) -> Tensor:
        """Where it lies between steps. Counters of what the device updates by fused kernels lie there. stays: the host
        updates it."""
        if value.dim() > 0:
            return value.cpu() if stays else on_host(value, self._device)
        fused = bool(self._cores[0].inner.defaults.get("fused"))
        return value.to(self._device) if fused and not stays else value

    def _shape(self, name: str) -> torch.Size:
        return self._parameters.weights[name].exact.shape


class Ways:
    """To the device and back for parts that it updates beside its other work, so many at a time at most."""

    def __init__(self, device: torch.device) -> None:
        self.memory = HostMemory(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._under_way: deque[tuple[Copying, Given]] = deque()  # with what it reads, so that it stays

    def coming(self) -> AbstractContextManager[Any]:
        """For a further part, as soon as there is room. Memory that is taken meanwhile is that of the way in, which
        need not wait until the part before is updated."""
        while len(self._under_way) >= PARTS_BESIDE:
            self._under_way.popleft()[0].wait_here()
        return self.memory.on_the_way_in()

    @contextmanager
    def updating(
        self, issued: torch.cuda.Event | None, coming: Copying, came: Sequence[Tensor]
    ) -> Iterator[None]:  # fmt: skip
        """issued: what the update comes after, besides the arrival of what it reads."""
        if self._stream is None or issued is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(issued)
            coming.wait()
            for tensor in came:
                tensor.record_stream(self._stream)
            yield

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

"""Gradients for a mirror: before NORM every rank sends those of what it alone holds to the rank that mirrors it, and
NORM begins on a rank once it has those that it mirrors. So whoever knows NORM knows that they have come everywhere, and
what a lost rank held after that step, or before it, can still be made.

This is a part of NORM and no instruction: who mirrors whom follows from the machines, whether at all from the options
of the run, and a program is a function of its plan alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from phalanx.comm.links import Channel, Group, Pending
from phalanx.params.host_memory import home_of
from phalanx.params.hosted import Given
from phalanx.params.mirrored import Mirrored

ROUND_BYTES = 2**25  # that are on their way at once: as much of the device's memory a rank needs to send and to receive
_DTYPES = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WHAT = "the gradients for a mirror"


class Gradients:
    """Gradients of some parameters, which go one after the other as a row of float32 at least, in rounds. First comes
    a number for each: what it was, or that there is none. shapes: of the parameters' pieces."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self.device = shapes, device
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._edges = list(accumulate((shape.numel() for shape in shapes.values()), initial=len(shapes)))
        self._staging = torch.empty(0, dtype=self.dtype, device=device)

    @property
    def size(self) -> int:
        return self._edges[-1]

    def rounds(self) -> list[tuple[int, int]]:
        """From which element to which."""
        most = max(ROUND_BYTES // self.dtype.itemsize, len(self._shapes))
        return list(pairwise((*range(0, self.size, most), self.size)))

    def packed(self, gradients: Mapping[str, Tensor], begin: int, end: int) -> Tensor:
        """What goes in a round; what there is no gradient of has any value."""
        row = self.staging(end - begin)
        if begin == 0:
            row[: len(self._shapes)] = self._kinds(gradients)
        parts: list[tuple[Tensor, Tensor]] = []
        for name, (first, last) in zip(self._shapes, pairwise(self._edges), strict=True):
            start, stop = max(first, begin), min(last, end)
            if start < stop and name in gradients:
                own = gradients[name].reshape(-1)[start - first : stop - first]
                parts.append((row[start - begin : stop - begin], own))
        if parts:
            torch._foreach_copy_([part for part, _ in parts], [own for _, own in parts])
        return row

    def _kinds(self, gradients: Mapping[str, Tensor]) -> Tensor:
        found = [gradients.get(name) for name in self._shapes]
        return torch.tensor([0 if own is None else _DTYPES.index(own.dtype) for own in found], dtype=self.dtype)

    def staging(self, size: int) -> Tensor:
        """So many elements on the device, whatever they hold."""
        if self._staging.numel() < size:
            self._staging = torch.empty(size, dtype=self.dtype, device=self.device)
        return self._staging[:size]

    def unpacked(self, row: Tensor) -> dict[str, Tensor]:
        """As they were. row: all rounds, on the host."""
        found: dict[str, Tensor] = {}
        ends = zip(self._shapes.items(), row[: len(self._shapes)].tolist(), pairwise(self._edges), strict=True)
        for (name, shape), kind, (first, last) in ends:
            if (dtype := _DTYPES[int(kind)]) is not None:
                found[name] = row[first:last].view(shape).to(dtype)
        return found


End = tuple[Gradients, Channel]


class Mirroring:
    """One rank's part. out: to the rank that mirrors this one; into: from the one that it mirrors; None where there is
    nothing to send. kept: what it mirrors, after `step` steps. on_trial: whether it is measured what this costs."""

    def __init__(self, out: End | None, into: End | None, kept: Mirrored, step: int, on_trial: bool) -> None:
        self._out, self._into, self.kept, self.step, self.on_trial = out, into, kept, step, on_trial
        self.is_sound = True
        self._exchanging, self._updating = list[float](), list[float]()  # seconds, of each step on trial
        self._row: Tensor | None = None  # of all gradients that came, on the host
        self._came: dict[str, Tensor] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._updated: Future[None] | None = None

    def cost(self) -> float:
        """Seconds that it takes of a step on trial, in the quickest of those since this was last asked (others of the
        machine only add to them): the exchange, and on a CPU the update, which takes nothing beside a GPU."""
        self.settle()
        found = sum(min(each) for each in (self._exchanging, self._updating) if each)
        self._exchanging, self._updating = [], []
        return found

    def exchange(self, gradients: Mapping[str, Tensor], world: Group) -> None:
        """Returns when those have come that this rank is to have. world: all ranks of the plan."""
        self.settle()
        if self.on_trial:  # waiting for a rank that is late costs nothing: NORM would wait for it, too
            world.barrier().wait(_WHAT)
        began = time.perf_counter()
        outgoing = self._out[0].rounds() if self._out is not None else []
        incoming = self._into[0].rounds() if self._into is not None else []
        for number in range(max(len(outgoing), len(incoming))):
            pending: list[Pending] = []
            if self._out is not None and number < len(outgoing):
                pending.append(self._out[1].send(self._out[0].packed(gradients, *outgoing[number])))
            if self._into is not None and number < len(incoming):
                self._receive(self._into, *incoming[number], pending, world)
            for each in pending:
                each.wait(_WHAT)
        if self._into is not None and self._row is not None:
            self._came = self._into[0].unpacked(self._row)
        if self.on_trial:
            self._exchanging.append(time.perf_counter() - began)

    def _receive(self, into: End, begin: int, end: int, pending: list[Pending], world: Group) -> None:
        """A round; on a CPU straight to where it belongs."""
        own, channel = into
        if self._row is None:
            self._row = home_of(torch.empty(own.size, dtype=own.dtype, device="meta"), own.device)
        here = self._row[begin:end]
        if own.device.type != "cuda":
            pending.append(channel.recv(here))
            return
        row = own.staging(end - begin)
        channel.recv(row).wait(_WHAT)
        world.confirm(row, _WHAT)
        here.copy_(row)

    def update(self, given: Callable[[], Given]) -> None:
        """Starts the update of what is kept, by what came. given: on the host; waits for it."""
        self.settle()
        if self._thread is None:
            threads = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, "phalanx-mirror", lambda: torch.set_num_threads(threads))
        self._updated = self._thread.submit(self._update, given)

    def _update(self, given: Callable[[], Given]) -> None:
        found, began = given(), time.thread_time()
        with torch.no_grad():
            self.is_sound = self.is_sound and self.kept.update(self._came, found)
        if self.on_trial and not (self._into is not None and self._into[0].device.type == "cuda"):
            self._updating.append(time.thread_time() - began)
        self._came, self.step = {}, self.step + 1

    def settle(self) -> None:
        """Waits for the update that was started."""
        if self._updated is not None:
            self._updated.result()
            self._updated = None

    def close(self) -> None:
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

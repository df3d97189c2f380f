"""A step taken apart for `overlap.py`: its computation with nothing sent, and its communication with nothing computed.

The stand-in belongs to benchmarks alone: what it hands on has the right shape and the wrong values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.session.session import Session


@dataclass(frozen=True)
class Collective:
    """One call as a program made it. elements: of the tensor that all ranks have a part in."""

    group: Group
    kind: Literal["all_reduce", "reduce_scatter", "all_gather"]
    elements: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Nothing:
    """Takes the place of a Pending: it is here already."""

    def wait(self, what: str = "") -> None:
        pass


class SilentGroup:
    """Takes the place of a Group: sends nothing, as if all ranks held what this one holds, and notes what it would
    have sent."""

    def __init__(self, group: Group, calls: list[Collective]) -> None:
        self.ranks, self.index = group.ranks, group.index
        self._group, self._calls = group, calls

    def all_reduce(self, tensor: Tensor) -> Nothing:
        return self._note("all_reduce", tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Nothing:
        output.view(-1).copy_(input.view(len(self.ranks), -1)[self.index])
        return self._note("reduce_scatter", input)

    def all_gather(self, output: Tensor, input: Tensor) -> Nothing:
        output.view(len(self.ranks), -1).copy_(input.view(1, -1))
        return self._note("all_gather", output)

    def _note(self, kind: Literal["all_reduce", "reduce_scatter", "all_gather"], tensor: Tensor) -> Nothing:
        self._calls.append(Collective(self._group, kind, tensor.numel(), tensor.dtype))
        return Nothing()


@contextmanager
def silent(session: Session) -> Iterator[list[Collective]]:
    """Within it the rank's training engine redistributions nothing; gives the list of what it would have sent."""
    calls: list[Collective] = []
    groups = {mover: mover._group for mover in session.step.engine.parts.movers.values()}
    assert groups, "without tensor parallelism nothing is exchanged"
    for mover, group in groups.items():  # only this: other movers would need another program to be linked
        mover._group = cast(Group, SilentGroup(group, calls))
    try:
        yield calls
    finally:
        for mover, group in groups.items():
            mover._group = group


class Communication:
    """The same collectives, of the same sizes and in the same order, one after the other."""

    def __init__(self, calls: list[Collective], device: torch.device) -> None:
        self.calls = calls
        sizes = {(call.elements, call.dtype) for call in calls}
        self._buffers = {key: torch.zeros(key[0], dtype=key[1], device=device) for key in sizes}

    def __call__(self) -> None:
        for call in self.calls:
            whole = self._buffers[call.elements, call.dtype]
            own = whole.view(len(call.group.ranks), -1)[call.group.index]
            match call.kind:
                case "all_reduce":
                    pending = call.group.all_reduce(whole)
                case "reduce_scatter":
                    pending = call.group.reduce_scatter(own.clone(), whole)
                case "all_gather":
                    pending = call.group.all_gather(whole, own.clone())
            pending.wait("communication alone")

"""GPipe: all forwards, then all backwards in reverse. Holds the activations of every micro-batch at once."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.program.instructions import Program
from phalanx.program.schedules.parts import Part, backwards, forwards, parts_of


def gpipe(pp: int, v: int, num_micro_batches: int, num_slices: Sequence[int] = ()) -> tuple[Program, ...]:
    assert v == 1
    parts = parts_of(num_micro_batches, num_slices)
    return tuple(_of_stage(stage, parts) for stage in range(pp))


def _of_stage(stage: int, parts: Sequence[Sequence[Part]]) -> Program:
    return (*forwards(stage, parts), *backwards(stage, parts[::-1]))

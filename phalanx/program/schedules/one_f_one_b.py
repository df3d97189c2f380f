"""1F1B: each micro-batch's backward as early as possible. Stage s holds the activations of at most pp - s at once.

Where micro-batches are cut into slices, these take turns instead: one forward, one backward. A micro-batch's backward
begins with its last slice, so with at most n slices to a micro-batch stage s holds n + pp - 1 - s of them at once, and
waits for stage s + 1 only with what that needs already sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.program.instructions import Program
from phalanx.program.schedules.merge import alternate
from phalanx.program.schedules.parts import Part, backwards, forwards, parts_of


def one_f_one_b(pp: int, v: int, num_micro_batches: int, num_slices: Sequence[int] = ()) -> tuple[Program, ...]:
    assert v == 1
    parts = parts_of(num_micro_batches, num_slices)
    return tuple(_of_stage(parts, stage, most_held(pp, stage, num_slices)) for stage in range(pp))


def most_held(pp: int, stage: int, num_slices: Sequence[int] = ()) -> int:
    """The most forwards of a stage that wait for their backward at once."""
    return max(num_slices, default=1) + pp - 1 - stage


def _of_stage(parts: Sequence[Sequence[Part]], stage: int, most: int) -> Program:
    return alternate(forwards(stage, parts), [[it] for it in backwards(stage, parts)], num_ahead=most - 1)

"""1F1B: each micro-batch's backward as early as possible. Stage s holds the activations of at most pp - s at once.

Where micro-batches are cut into slices, these take turns instead: one forward, one backward. A micro-batch's backward
begins with its last slice, so with at most n slices to a micro-batch stage s holds n + pp - 1 - s of them at once, and
waits for stage s + 1 only with what that needs already sent.

Eager 1F1B begins with one more forward for each stage behind. 1F1B has just enough to keep all stages at work if
messages take no time: what a gradient is late then, every stage waits, again for every pp micro-batches. With the
further forwards messages up to as long as half a micro-batch's computation hide, for the memory of n + 2 (pp - 1 - s).
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.program.instructions import Program
from phalanx.program.schedules.parts import Part, alternate, backwards, forwards, parts_of

# Forwards that a stage begins with for each stage behind it, and computations by which it posts a receive ahead.
NUM_AHEAD = {"1f1b": 1, "eager-1f1b": 2, "zb-h1": 1}


def one_f_one_b(pp: int, v: int, num_micro_batches: int, num_slices: Sequence[int] = ()) -> tuple[Program, ...]:
    return _programs("1f1b", pp, v, num_micro_batches, num_slices)


def eager_one_f_one_b(pp: int, v: int, num_micro_batches: int, num_slices: Sequence[int] = ()) -> tuple[Program, ...]:
    return _programs("eager-1f1b", pp, v, num_micro_batches, num_slices)


def most_held(schedule: str, pp: int, stage: int, num_slices: Sequence[int] = ()) -> int:
    """The most forwards of a stage that wait for their backward at once."""
    return max(num_slices, default=1) + NUM_AHEAD[schedule] * (pp - 1 - stage)


def _programs(schedule: str, pp: int, v: int, num_micro_batches: int, num_slices: Sequence[int]) -> tuple[Program, ...]:
    assert v == 1
    parts = parts_of(num_micro_batches, num_slices)
    return tuple(_of_stage(parts, stage, most_held(schedule, pp, stage, num_slices)) for stage in range(pp))


def _of_stage(parts: Sequence[Sequence[Part]], stage: int, most: int) -> Program:
    return alternate(forwards(stage, parts), [[it] for it in backwards(stage, parts)], num_ahead=most - 1)

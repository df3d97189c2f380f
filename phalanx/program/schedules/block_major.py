"""Block-major: a virtual stage, which is a block, runs for all micro-batches before the next does, forward and back.

What a block needs beside activations, parameters from the host above all, comes once for all micro-batches, and its
gradients are complete when it is done. All micro-batches' activations are held between blocks, so it goes with
recompute and offload. Stages are dealt out in rounds: the next rank begins with the first micro-batch that is done, so
from pp micro-batches on none waits longer than to fill the pipeline, as if it were interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from phalanx.program.instructions import Program
from phalanx.program.schedules.parts import Part, backwards, forwards, parts_of


def block_major(pp: int, v: int, num_micro_batches: int, num_slices: Sequence[int] = ()) -> tuple[Program, ...]:
    parts = parts_of(num_micro_batches, num_slices)
    return tuple(_of_rank([pp_index + round * pp for round in range(v)], parts) for pp_index in range(pp))


def _of_rank(stages: Sequence[int], parts: Sequence[Sequence[Part]]) -> Program:
    """The last micro-batch goes back first: what it needs was there last."""
    forth = chain.from_iterable(forwards(stage, parts) for stage in stages)
    back = chain.from_iterable(backwards(stage, parts[::-1]) for stage in reversed(stages))
    return (*forth, *back)

"""What follows from a micro-batch's samples alone, and what of it is used again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch

from phalanx.engine.compute import MOST_SHAPES, Compute
from phalanx.engine.inputs import Feeder, Inputs, SampleShard
from phalanx.model.segment.compile import Compiler
from phalanx.model.slicing import slice_model
from tests import captured


def feeder(case: captured.Case) -> Feeder:
    """Of slices; buffers are its own."""
    sliced = slice_model(case.captured, torch.float64)
    buffers = {name: buffer.clone() for name, buffer in sliced.captured.buffers.items()}
    compute = Compute(
        sliced.captured.blocks, buffers, trainable=(), device=torch.device("cpu"), compiler=Compiler("off"),
    )  # fmt: skip
    degrees: dict[int, SampleShard] = {}
    return Feeder(case.captured, compute, seed=0, dtype=torch.float64, degrees=degrees, sliced=sliced)


@pytest.fixture
def made() -> Iterator[Feeder]:
    yield feeder(captured.named(captured.LLAMA))


def fed(made: Feeder) -> list[Inputs]:
    batch = captured.named(captured.LLAMA).batch
    return made(batch, 0, [1, 1, 1], lambda number, tokens: (0, 4, tokens))


def test_rotary_tables_are_made_once_for_all_micro_batches_of_a_shape(made: Feeder) -> None:
    (name, *_), (first, second, _) = made.compute.fixed, fed(made)
    assert first[0, 0, "whole_value", name] is second[0, 0, "whole_value", name]
    later = fed(made)[0]
    assert later[0, 0, "whole_value", name] is first[0, 0, "whole_value", name]


def test_what_follows_from_a_buffer_is_made_again_when_it_has_changed(made: Feeder) -> None:
    name = made.compute.fixed[-1]
    before = fed(made)[0][1, 0, "whole_value", name]
    for buffer in made.compute.buffers.values():
        buffer.mul_(2)
    assert not torch.equal(fed(made)[0][1, 0, "whole_value", name], before)


def test_what_follows_from_samples_is_each_ones_own(made: Feeder) -> None:
    changing = [name for name in made.compute.blocks.values if name not in made.compute.fixed]
    assert changing and made.compute.fixed
    first, second, _ = fed(made)
    assert all(first[0, 0, "whole_value", name] is not second[0, 0, "whole_value", name] for name in changing)


def test_a_past_is_used_again_once_its_micro_batch_is_gone_and_is_empty_then(made: Feeder) -> None:
    key = (1, 0, "past", "layer")
    parts = fed(made)
    handles = {int(part[key]) for part in parts}
    assert len(handles) == 3  # they may all be alive at once
    keys = torch.ones(1, 1, 4, 1)
    parts[0]._alike._slices[0].past.write(0, keys, keys)
    assert parts[0].past_bytes() > 0
    parts.clear()
    again = fed(made)
    assert {int(part[key]) for part in again} == handles
    assert all(part.past_bytes() == 0 for part in again)


def test_of_micro_batches_that_always_look_different_little_is_kept(made: Feeder) -> None:
    (name, *_), batch = made.compute.fixed, captured.named(captured.LLAMA).batch
    kept: list[weakref.ref[torch.Tensor]] = []
    for tokens in range(2, 2 * MOST_SHAPES + 2):
        longer = {key: value[:1].repeat(1, 2)[:, :tokens] for key, value in batch.items()}
        (one,) = made(longer, 0, [1], lambda _, n: (0, 1, n))
        kept.append(weakref.ref(one[1, 0, "whole_value", name]))
    assert sum(each() is not None for each in kept) == MOST_SHAPES

"""Tensors side by side in one buffer: every element lies in exactly one shard, and every start suits kernels."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.params.flat import ALIGNMENT, FlatLayout, Piece
from phalanx.state.local import Local

tensor_sets = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), max_size=6).map(
    lambda found: {f"tensor{number}": Local(shape) for number, shape in enumerate(found)}
)
shards = st.integers(1, 8)


@given(tensor_sets, shards)
def test_the_pieces_of_all_shards_tile_every_tensor_exactly_once(tensors: dict[str, Local], shards: int) -> None:
    layout = FlatLayout.of(tensors, shards)
    seen: Counter[tuple[str, int]] = Counter()
    for shard in range(shards):
        for piece, _ in layout.pieces(shard):
            assert piece.local == tensors[piece.name]
            seen.update((piece.name, element) for element in range(piece.start, piece.stop))
    assert seen == Counter((name, element) for name, local in tensors.items() for element in range(local.numel))


@given(tensor_sets, shards)
def test_a_piece_lies_in_its_shard_where_its_tensor_lies_in_the_buffer(tensors: dict[str, Local], shards: int) -> None:
    layout = FlatLayout.of(tensors, shards)
    starts = {place.name: place.start for place in layout.places}
    for shard in range(shards):
        for piece, offset in layout.pieces(shard):
            assert offset >= 0 and offset + piece.stop - piece.start <= layout.shard_size
            assert shard * layout.shard_size + offset == starts[piece.name] + piece.start


@given(tensor_sets, shards)
def test_tensors_do_not_overlap_and_every_tensor_and_shard_starts_aligned(
    tensors: dict[str, Local], shards: int
) -> None:
    layout = FlatLayout.of(tensors, shards)
    assert all(place.start % ALIGNMENT == 0 for place in layout.places)
    assert layout.shard_size % ALIGNMENT == 0 and layout.shard_size * shards == layout.size
    ends = [0, *(place.stop for place in layout.places)]
    assert all(place.start >= end for place, end in zip(layout.places, ends, strict=False))
    assert ends[-1] <= layout.size < ends[-1] + shards * ALIGNMENT


@pytest.mark.parametrize(("start", "stop", "whole"), [(0, 6, True), (0, 5, False), (1, 6, False)])
def test_a_piece_is_whole_only_with_all_its_elements(start: int, stop: int, whole: bool) -> None:
    assert Piece("a", Local((2, 3)), start, stop).is_whole is whole
    assert Piece("a", Local((2, 5), 1, ((0, 2), (4, 5))), start, stop).is_whole is whole

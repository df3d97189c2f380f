"""Reshapes divide into groups of dims that hold the same elements; a split stays with the outermost of its group."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.shard.placement import Conflict, Cutting, Origin, Placement, Refined, groups
from phalanx.model.shard.rules.views import carried

sizes = st.lists(st.sampled_from([1, 2, 3, 5, 7]), max_size=5)


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_groups_cover_all_dims_in_order_and_hold_the_same_elements(parts: list[list[int]], data: st.DataObject) -> None:
    before = [size for part in parts for size in part]
    after = [size for part in parts for size in data.draw(st.sampled_from([part, [math.prod(part)]]))]
    found = groups(before, after)
    assert [dim for old, _ in found for dim in old] == list(range(len(before)))
    assert [dim for _, new in found for dim in new] == list(range(len(after)))
    for old, new in found:
        assert math.prod(before[d] for d in old) == math.prod(after[d] for d in new)


class _Weight:
    """As much of a walk as a reshape asks for: one weight whose columns are cut."""

    def __init__(self, size: int, ranks: int) -> None:
        self.cutting, self.ranks = Cutting(size), ranks

    def place(self, dim: int) -> Placement:
        return Placement("split", dim, self.cutting.cuts(self.ranks), Origin("product", "weight"))

    def refine(self, place: Placement, change: Any) -> None:
        if not change(self.cutting, place.origin):
            raise Conflict("the weight cannot be cut like that", place)
        raise Refined


def _carried(weight: _Weight, dim: int, before: list[int], after: list[int]) -> Placement:
    """Again and again until the cuts suit."""
    for _ in range(3):
        try:
            return carried(cast(Any, weight), weight.place(dim), before, after)
        except Refined:
            continue
    raise AssertionError("cuts do not settle")


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 4))
def test_features_divided_into_heads_keep_heads_together(num_heads: int, head_dim: int, ranks: int) -> None:
    if num_heads < ranks:
        return
    weight = _Weight(num_heads * head_dim, ranks)
    place = _carried(weight, 2, [59, 53, num_heads * head_dim], [59, 53, num_heads, head_dim])
    assert place.dim == 2
    assert [head for own in place.cuts for a, b in own for head in range(a, b)] == list(range(num_heads))
    assert all(edge % head_dim == 0 for own in weight.place(2).cuts for part in own for edge in part)


@given(st.integers(4, 12), st.integers(2, 8), st.integers(1, 4))
def test_heads_merged_again_are_the_features_they_were(num_heads: int, head_dim: int, ranks: int) -> None:
    features, split = [59, 53, num_heads * head_dim], [59, 53, num_heads, head_dim]
    weight = _Weight(num_heads * head_dim, ranks)
    by_head = _carried(weight, 2, features, split)
    assert carried(cast(Any, weight), by_head, split, features).same_as(weight.place(2))


@given(st.integers(2, 12), st.integers(1, 8), st.integers(1, 4))
def test_heads_merged_with_samples_are_heads_of_every_sample_until_they_are_taken_apart(
    num_heads: int, head_dim: int, ranks: int
) -> None:
    if num_heads < ranks:
        return
    weight = _Weight(num_heads * head_dim, ranks)
    by_head = _carried(weight, 2, [59, 53, num_heads * head_dim], [59, 53, num_heads, head_dim]).moved(1)
    apart, together = [59, num_heads, 53, head_dim], [59 * num_heads, 53, head_dim]
    merged = carried(cast(Any, weight), by_head, apart, together)
    assert (merged.dim, merged.outer, merged.cuts) == (0, 59, by_head.cuts)
    assert carried(cast(Any, weight), merged, together, apart).same_as(by_head)


def test_merged_dims_that_are_divided_otherwise_are_a_conflict() -> None:
    merged = _carried(_Weight(8, 2), 1, [6, 8], [48])
    with pytest.raises(Conflict, match="a split dim is divided otherwise than it was merged"):
        carried(cast(Any, _Weight(8, 2)), merged, [48], [4, 12])


def test_heads_that_no_cut_keeps_together_are_a_conflict() -> None:
    """Half a head of a section of one and a half."""
    weight = _Weight(12, 2)
    weight.cutting.bounds |= {3}
    with pytest.raises(Conflict, match="the weight cannot be cut like that"):
        _carried(weight, 2, [59, 53, 12], [59, 53, 3, 4])

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.state.layout import Box


def boxes(dims: int) -> st.SearchStrategy[Box]:
    offsets = st.tuples(*[st.integers(0, 4)] * dims)
    shapes = st.tuples(*[st.integers(0, 4)] * dims)
    return st.builds(Box, offsets, shapes)


pairs = st.integers(0, 3).flatmap(lambda dims: st.tuples(boxes(dims), boxes(dims)))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*[range(s.start, s.stop) for s in box.slices()]))


@given(pairs)
def test_an_intersection_holds_exactly_the_elements_of_both(pair: tuple[Box, Box]) -> None:
    a, b = pair
    both = a.intersect(b)
    assert (elements(both) if both else set()) == elements(a) & elements(b)
    assert both == b.intersect(a)


@given(pairs)
def test_a_box_contains_its_intersections_and_counts_its_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.numel == len(elements(a))
    if both := a.intersect(b):
        assert a.contains(both) and b.contains(both)


@given(pairs)
def test_relative_coordinates_name_the_same_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    both = a.intersect(b)
    if both is None:
        return
    shifted = elements(both.relative_to(a))
    assert {tuple(x + o for x, o in zip(e, a.offset, strict=True)) for e in shifted} == elements(both)
    assert Box.whole(a.shape).contains(both.relative_to(a))


def test_a_scalar_has_one_element_and_no_dims() -> None:
    box = Box.whole(())
    assert box.numel == 1 and box.slices() == () and box.intersect(box) == box


def test_offset_and_shape_must_agree() -> None:
    with pytest.raises(AssertionError, match="differ in dims"):
        Box((0,), (1, 2))
    with pytest.raises(AssertionError, match="negative"):
        Box((-1,), (1,))

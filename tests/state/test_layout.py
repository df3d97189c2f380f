from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.state.layout import Box, StateShard, boxes_of_range, whole
from tests.state.layouts import check_layout


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


@given(pairs)
def test_what_is_left_of_a_box_is_what_the_other_does_not_hold(pair: tuple[Box, Box]) -> None:
    a, b = pair
    rest = a.without(b)
    assert sum(part.numel for part in rest) == len(elements(a) - elements(b))
    assert set().union(*map(elements, rest)) == elements(a) - elements(b)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_a_flat_range_is_a_few_boxes_in_order(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = drawn
    values = torch.arange(math.prod(shape)).view(shape)
    found = boxes_of_range(shape, start, stop)
    in_order = [element for box in found for element in values[box.slices()].reshape(-1).tolist()]
    assert in_order == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_the_data_of_a_state_shard_is_its_boxes_one_after_the_other() -> None:
    shard = StateShard("w", (4, 4), "float32", boxes_of_range((4, 4), 3, 10))
    assert shard.numel == 7
    assert [start for _, start in shard.places()] == [0, 1, 5]


def test_a_whole_tensor_is_one_owned_box() -> None:
    tensor = torch.arange(6).view(2, 3).t()
    shard, data = whole("w", tensor)
    assert shard == StateShard("w", (3, 2), "int64", (Box.whole((3, 2)),), owned=True)
    assert data.tolist() == [0, 3, 1, 4, 2, 5]


def held(*boxes: Box, owned: bool = True, shape: tuple[int, ...] = (4, 2), dtype: str = "float32") -> StateShard:
    return StateShard("w", shape, dtype, boxes, owned)


TOP, BOTTOM, ALL = Box((0, 0), (2, 2)), Box((2, 0), (2, 2)), Box.whole((4, 2))


def test_owners_that_cover_a_tensor_once_and_any_replicas_are_a_layout() -> None:
    check_layout({0: [held(TOP)], 1: [held(BOTTOM)], 2: [held(ALL, owned=False)], 3: []})


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({0: [held(TOP)]}, "owners hold 4 of the 8 elements of w"),
        ({0: [held(TOP)], 1: [held(BOTTOM, owned=False)]}, "owners hold 4 of the 8"),
        ({0: [held(ALL)], 1: [held(BOTTOM)]}, "w is held twice"),
        ({0: [held(TOP, BOTTOM), held(TOP)]}, "rank 0 holds a name twice"),
        ({0: [held(ALL)], 1: [held(TOP, TOP, owned=False)]}, "w is held twice"),
        ({0: [held(ALL)], 1: [held(TOP, owned=False, dtype="int64")]}, "disagree on what w is"),
        ({0: [held(Box((0, 0), (4, 3)))]}, "lie outside w"),
        ({0: [held(Box((), ()), shape=())], 1: [held(Box((), ()), shape=())]}, "w is held twice"),
    ],
)
def test_what_is_not_a_layout_is_said(layout: dict[int, list[StateShard]], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_layout(layout)

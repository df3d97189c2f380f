"""What a tensor-parallel rank keeps of a tensor: its elements in order, the boxes they come from, and few of those."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.state.layout import Box, check_disjoint, take_boxes
from phalanx.state.local import Local


@st.composite
def locals_(draw: st.DrawFn) -> Local:
    """Of tensors with 1 to 4 dims: nothing, everything, one range, or several that may touch or be empty."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=6).filter(lambda found: len(found) % 2 == 0)))
    return Local(shape, dim, tuple(zip(cuts[::2], cuts[1::2], strict=True)))


def kept(local: Local, tensor: Tensor) -> Tensor:
    """The local tensor, as a model would be split."""
    if not local.ranges:
        return tensor
    return torch.cat([tensor.narrow(local.dim, start, stop - start) for start, stop in local.ranges], local.dim)


def logical(local: Local) -> Tensor:
    return torch.arange(math.prod(local.shape)).view(local.shape)


@given(locals_(), st.data())
def test_the_boxes_of_any_elements_hold_exactly_these_elements(local: Local, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, local.numel))
    stop = data.draw(st.integers(start, local.numel))
    tensor = logical(local)
    here = kept(local, tensor)
    assert here.shape == local.local_shape and here.numel() == local.numel
    elements = here.reshape(-1)[start:stop]
    boxes = local.boxes(start, stop)
    check_disjoint("tensor", boxes)
    packed = take_boxes(tensor, boxes)
    assert torch.equal(local.packed(elements, start), packed)
    assert torch.equal(local.unpacked(packed, start), elements)


@given(locals_())
def test_what_is_kept_is_at_most_one_box_for_each_range(local: Local) -> None:
    boxes = local.boxes()
    assert len(boxes) <= max(1, len(local.ranges))
    assert sum(box.numel for box in boxes) == local.numel


@given(locals_(), st.data())
def test_elements_that_begin_and_end_anywhere_add_a_few_boxes_for_each_dim_not_for_each_row(
    local: Local, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, local.numel))
    boxes = local.boxes(start, data.draw(st.integers(start, local.numel)))
    assert len(boxes) <= (2 * len(local.shape) - 1) * max(1, len(local.ranges))


def test_a_column_split_of_a_matrix_is_one_box() -> None:
    assert Local((4096, 8), 1, ((2, 4),)).boxes() == (Box((0, 2), (4096, 2)),)


def test_fused_columns_are_one_box_for_each_section_and_their_data_is_permuted() -> None:
    local = Local((2, 6), 1, ((0, 1), (2, 3), (4, 5)))
    assert local.boxes() == (Box((0, 0), (2, 1)), Box((0, 2), (2, 1)), Box((0, 4), (2, 1)))
    assert local.packed(torch.tensor([0, 2, 4, 6, 8, 10])).tolist() == [0, 6, 2, 8, 4, 10]


def test_sections_that_touch_are_one_box() -> None:
    assert Local((2, 6), 1, ((0, 2), (2, 4), (5, 6))).boxes() == (Box((0, 0), (2, 4)), Box((0, 5), (2, 1)))


@pytest.mark.parametrize("local", [Local((4, 6)), Local((4, 6), 1, ((2, 4),)), Local((4, 6), 0, ((0, 1), (2, 3)))])
def test_nothing_is_copied_where_boxes_are_in_the_order_of_elements(local: Local) -> None:
    elements = torch.arange(local.numel)
    assert local.packed(elements) is elements and local.unpacked(elements) is elements


def test_a_scalar_is_kept_whole() -> None:
    assert Local(()).boxes() == (Box((), ()),) and Local(()).is_whole and Local(()).numel == 1


def test_a_rank_may_be_left_with_nothing() -> None:
    local = Local((3, 2), 0, ((3, 3),))
    assert local.boxes() == () and local.numel == 0 and not local.is_whole

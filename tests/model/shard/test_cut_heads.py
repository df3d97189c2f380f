"""How dims are divided between ranks: everything once, evenly, and every head where its keys and values are."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.shard.placement import Cutting, TooFew, cut_evenly, cut_heads, tiles, total

Heads = tuple[int, int, int]  # heads, key/value heads, ranks


@st.composite
def heads(draw: st.DrawFn) -> Heads:
    kv_heads = draw(st.integers(1, 8))
    count = kv_heads * draw(st.integers(1, 8))
    return count, kv_heads, draw(st.integers(1, count))


@given(heads())
def test_every_head_finds_its_keys_and_values_on_its_rank(given: Heads) -> None:
    count, kv_heads, ranks = given
    q, kv = cut_heads(count, kv_heads, ranks)
    group = count // kv_heads
    for (first, last), (kv_first, kv_last) in zip(q, kv, strict=True):
        assert {head // group for head in range(first, last)} == set(range(kv_first, kv_last))


@given(heads())
def test_heads_lie_on_one_rank_each_and_no_rank_has_none(given: Heads) -> None:
    count, kv_heads, ranks = given
    q, kv = cut_heads(count, kv_heads, ranks)
    assert [head for first, last in q for head in range(first, last)] == list(range(count))
    assert len(q) == len(kv) == ranks and all(first < last for first, last in (*q, *kv))
    assert {head for first, last in kv for head in range(first, last)} == set(range(kv_heads))


def test_uneven_heads_give_the_first_ranks_one_more() -> None:
    q, kv = cut_heads(25, 25, 4)
    assert q == kv == ((0, 7), (7, 13), (13, 19), (19, 25))


def test_ranks_that_share_a_key_value_head_divide_its_heads() -> None:
    assert cut_heads(14, 2, 4) == (((0, 4), (4, 7), (7, 11), (11, 14)), ((0, 1), (0, 1), (1, 2), (1, 2)))
    assert cut_heads(4, 1, 3) == (((0, 2), (2, 3), (3, 4)), ((0, 1),) * 3)


def test_fewer_heads_than_ranks_cannot_be_divided() -> None:
    with pytest.raises(TooFew, match="3 heads cannot be divided between 4 ranks"):
        cut_heads(3, 1, 4)


@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 5), st.integers(0, 30))
def test_an_even_cut_covers_a_range_in_whole_granules(start: int, parts: int, granule: int, more: int) -> None:
    stop = start + granule * (parts + more)
    found = cut_evenly(start, stop, parts, granule)
    assert [i for a, b in found for i in range(a, b)] == list(range(start, stop))
    sizes = [(b - a) // granule for a, b in found]
    assert max(sizes) - min(sizes) <= 1 and all((b - a) % granule == 0 for a, b in found)


@pytest.mark.parametrize(
    ("stop", "granule", "message"),
    [(7, 2, "7 is not a multiple of 2"), (4, 2, "2 cannot be divided between 3 ranks")],
)
def test_a_range_that_has_too_few_granules_is_refused(stop: int, granule: int, message: str) -> None:
    with pytest.raises(TooFew, match=message):
        cut_evenly(0, stop, 3, granule)


@given(st.lists(st.integers(4, 12), min_size=1, max_size=4), st.integers(1, 4))
def test_every_rank_gets_its_share_of_each_section(sizes: list[int], ranks: int) -> None:
    bounds = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    cuts = Cutting(bounds[-1], bounds=set(bounds[:-1])).cuts(ranks)
    assert tiles(cuts) and sum(map(total, cuts)) == bounds[-1]
    for section, (start, stop) in enumerate(pairwise(bounds)):
        assert tuple(own[section] for own in cuts) == cut_evenly(start, stop, ranks)


def test_a_weight_with_fewer_heads_than_ranks_is_not_tiled_but_shared() -> None:
    cuts = Cutting(16, granules={0: 8}).cuts(4)
    assert cuts == (((0, 8),), ((0, 8),), ((8, 16),), ((8, 16),))
    assert not tiles(cuts)


def test_a_section_with_fewer_heads_than_ranks_is_dealt_out() -> None:
    cuts = Cutting(24, bounds={16}, granules={0: 4, 16: 8}).cuts(2)
    assert cuts == (((0, 8),), ((8, 16), (16, 24)))
    assert tiles(cuts)


def test_sections_of_which_a_rank_would_have_nothing_are_too_few() -> None:
    with pytest.raises(TooFew, match="some ranks would have nothing"):
        Cutting(16, bounds={8}, granules={0: 8, 8: 8}).cuts(3)

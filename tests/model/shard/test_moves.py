"""Moves bring a value from any placement to any other, and its gradient all the way back.

Checked against what a placement means: all ranks of this process hold what it says they hold, before and after.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.shard.sharded import Value, between_cells, inner_cells, moves
from tests.model.shard.fake_ranks import carry_back, carry_out


@dataclass(frozen=True)
class Journey:
    """kind at degree → wanted at degree `to`, of a value of this many tokens."""

    tp: int
    kind: str
    degree: int
    wanted: str
    to: int
    heavy: bool
    tokens: int
    has_batch: bool = True

    @property
    def value(self) -> Value:
        return Value(self.has_batch, "tokens" in (self.kind, self.wanted), True)

    @property
    def moves(self) -> list:
        return list(moves(self.value, self.kind, self.degree, self.wanted, self.to, self.heavy, self.tp))


@st.composite
def journeys(draw: st.DrawFn) -> Journey:
    tp = draw(st.sampled_from([2, 3, 4, 6, 8]))
    degree = st.sampled_from([k for k in range(1, tp + 1) if tp % k == 0])
    sequence, heavy = draw(st.booleans()), draw(st.booleans())
    home = "tokens" if sequence else "whole"
    kind = draw(st.sampled_from(["partial", home, "whole"]))
    wanted = "whole" if heavy else draw(st.sampled_from([home, "whole"]))
    return Journey(tp, kind, draw(degree), wanted, draw(degree), heavy, draw(st.integers(1, 9)))


def _samples(whole: Tensor, tp: int, rank: int, degree: int) -> Tensor:
    return whole.chunk(tp // degree)[rank // degree]


def _own_tokens(value: Tensor, degree: int, index: int) -> Tensor:
    length = -(-value.shape[1] // degree)
    padded = torch.nn.functional.pad(value, (0, 0, 0, length * degree - value.shape[1]))
    return padded[:, index * length : (index + 1) * length]


def lying(whole: Tensor, kind: str, tp: int, degree: int) -> list[Tensor]:
    """What each rank has of a value in a placement."""
    found: list[Tensor] = []
    for rank in range(tp):
        own, index = _samples(whole, tp, rank, degree), rank % degree
        if kind == "tokens":
            own = _own_tokens(own, degree, index)
        if kind == "partial":  # summands that are all different and add up to it
            shares = torch.arange(1, degree + 1, dtype=torch.float64)
            own = own * (shares / shares.sum())[index]
        found.append(own)
    return found


def _whole(tp: int, tokens: int) -> Tensor:
    return torch.randn(2 * tp, tokens, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(tokens))


@given(journeys())
def test_a_value_arrives_as_it_is_wanted(way: Journey) -> None:
    whole = _whole(way.tp, way.tokens)
    found = carry_out(way.moves, lying(whole, way.kind, way.tp, way.degree), {"tokens": way.tokens})
    for got, expected in zip(found, lying(whole, way.wanted, way.tp, way.to), strict=True):
        torch.testing.assert_close(got, expected)


@given(journeys())
def test_its_gradient_comes_back_as_the_value_lay(way: Journey) -> None:
    """Where ranks compute different things their gradients are summands; else each has all of it, or its tokens."""
    whole = _whole(way.tp, way.tokens)
    arriving = lying(whole, "partial" if way.heavy else way.wanted, way.tp, way.to)
    back = carry_back(way.moves, arriving, {"tokens": way.tokens})
    lay = "whole" if way.kind == "partial" else way.kind
    for got, expected in zip(back, lying(whole, lay, way.tp, way.degree), strict=True):
        torch.testing.assert_close(got, expected)


@given(journeys())
def test_what_is_the_same_for_all_samples_gets_the_gradients_of_all_of_them(way: Journey) -> None:
    way = Journey(way.tp, "whole", way.degree, "whole", way.to, way.heavy, way.tokens, has_batch=False)
    whole = _whole(way.tp, way.tokens)
    parts = lying(whole, "partial" if way.heavy else "whole", way.tp, way.to)
    back = carry_back(way.moves, [own.sum(0) for own in parts], {"tokens": way.tokens})
    total = sum(back[:: way.degree], torch.zeros_like(back[0]))  # one rank of each part
    torch.testing.assert_close(total, whole.sum(0))
    for rank, gradient in enumerate(back):
        torch.testing.assert_close(gradient, back[rank - rank % way.degree])


@given(st.sampled_from([2, 4, 6, 8, 12]), st.data())
def test_cells_divide_all_ranks_and_join_parts_in_the_order_of_their_samples(tp: int, data: st.DataObject) -> None:
    large = data.draw(st.sampled_from([k for k in range(1, tp + 1) if tp % k == 0]))
    small = data.draw(st.sampled_from([k for k in range(1, large + 1) if large % k == 0]))
    for cells in (inner_cells(tp, large), between_cells(tp, small, large)):
        assert sorted(rank for cell in cells for rank in cell) == list(range(tp))
    for cell in between_cells(tp, small, large):
        first = cell[0] // small
        assert [rank // small for rank in cell] == list(range(first, first + large // small))
        assert len({rank % small for rank in cell}) == 1


@pytest.mark.parametrize(
    ("kind", "wanted", "heavy", "sequence", "expected"),
    [
        ("partial", "whole", False, False, ["all_reduce"]),
        ("partial", "tokens", False, True, ["reduce_scatter"]),
        ("whole", "whole", True, False, ["identity"]),
        ("tokens", "whole", True, True, ["all_gather"]),
        ("tokens", "whole", False, True, ["unshard"]),
        ("whole", "tokens", False, True, ["shard"]),
        ("whole", "whole", False, False, []),
        ("stacked", "whole", False, False, ["stack"]),
    ],
)
def test_within_a_unit_the_cheapest_collective_is_taken(
    kind: str, wanted: str, heavy: bool, sequence: bool, expected: list[str]
) -> None:
    found = moves(Value(True, sequence, True), kind, 2, wanted, 2, heavy, 2)
    assert [move.kind for move in found] == expected

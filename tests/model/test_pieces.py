from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.weights.key_map import Assembly, chunked, concatenated, stacked
from phalanx.state.layout import Box

STORED = {key: torch.arange(24.0).view(2, 3, 4) + 100 * i for i, key in enumerate("abcd")}


def read_stored(key: str, box: Box) -> Tensor:
    return STORED[key][box.slices()]


def stored(key: str) -> Assembly:
    return Assembly.stored(key, tuple(STORED[key].shape))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cat"), st.integers(0, 2)),
        st.tuples(st.just("stack"), st.integers(0, 2)),
        st.tuples(st.just("transpose"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("chunk"), st.integers(0, 2), st.integers(1, 2)),
    ),
    max_size=4,
)


def both(steps: list[tuple[object, ...]]) -> tuple[Assembly, Tensor]:
    """The same steps on assemblies and on real tensors."""
    lazy, real = stored("a"), STORED["a"]
    for name, *args in steps:
        if name == "cat":
            lazy, real = concatenated([lazy, lazy], *args), torch.cat([real, real], *args)  # pyright: ignore
        elif name == "stack":
            lazy, real = stacked([lazy, lazy], *args), torch.stack([real, real], *args)  # pyright: ignore
        elif name == "transpose":
            lazy, real = lazy.transposed(*args), real.transpose(*args)  # pyright: ignore
        else:
            dim, count = args
            lazy, real = chunked(lazy, count, dim)[-1], torch.chunk(real, count, dim)[-1]  # pyright: ignore
    return lazy, real


@given(STEPS, st.data())
def test_every_box_of_an_assembly_is_that_box_of_the_real_tensor(steps: list[tuple[object, ...]], data: st.DataObject):
    lazy, real = both(steps)
    assert lazy.shape == tuple(real.shape)
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in lazy.shape)
    shape = tuple(data.draw(st.integers(1, size - o)) for size, o in zip(lazy.shape, offset, strict=True))
    box = Box(offset, shape)
    assert torch.equal(lazy.part(box).read(read_stored), real[box.slices()])
    assert torch.equal(lazy.read(read_stored), real)


def test_reading_a_box_touches_only_the_stored_boxes_it_needs() -> None:
    experts = stacked([concatenated([stored("a"), stored("b")], 1), concatenated([stored("c"), stored("d")], 1)], 0)
    part = experts.part(Box((1, 0, 3, 0), (1, 2, 2, 4)))
    assert part.keys == {"d"}
    assert part.pieces[0].source == Box((0, 0, 0), (2, 2, 4))

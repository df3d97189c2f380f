"""Which parameters share a bucket: those that the same blocks use and that are summed over the same ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from phalanx.engine.compose import bucket_names
from phalanx.plan.plan import Plan
from tests.params.sharded_cases import Model, Split, blocks_of, cases

SPLIT = Split((4, 4), 0, (4,), (0, 1), summed=False)
WHOLE = Split((4,), 0, (), (0, 0), summed=True)
KNOWN = Split((4,), 0, (), (0, 0), summed=False)


def test_without_tensor_parallelism_a_bucket_is_what_the_same_blocks_use() -> None:
    found = bucket_names(blocks_of(("embed", "norm"), ("w",), ("embed",)), ["w"])
    assert found.names == (("norm",), ("w",), (), ("embed",))
    assert found.shape.shared == ((0, 2),)
    assert (found.shape.held, found.shape.trained) == ((True, True, False, True), (False, True, False, False))
    assert found.shape.sums == ()


def test_parameters_that_need_a_sum_of_their_own_get_a_bucket_of_their_own() -> None:
    model = Model(
        (("embed",), ("norm", "w", "bias"), ("embed",)), {"embed": SPLIT, "norm": WHOLE, "w": SPLIT, "bias": KNOWN}, 2
    )
    found = bucket_names(model.blocks, list(model.shapes), model.sharded(0))
    assert found.names == ((), ("w", "bias"), (), ("embed",), ("norm",))
    assert found.shape.shared == ((0, 2), (1,))
    assert found.shape.sums == ((), (), (), (), ((0, 1),))
    assert [[step.buckets for step in steps] for steps in found.shape.ops] == [
        [(), (3,)],
        [(4,), (1,)],
        [(), (3,)],
    ]


@given(cases())
def test_every_rank_sees_the_same_buckets_and_every_parameter_is_in_one(case: tuple[Model, Plan]) -> None:
    model, plan = case
    views = [model.sharded(index) if plan.tp > 1 else None for index in range(plan.tp)]
    found = [bucket_names(model.blocks, model.trainable, view) for view in views]
    assert all(other == found[0] for other in found)
    assert sorted(name for group in found[0].names for name in group) == sorted(model.splits)
    for bucket, group in enumerate(found[0].names):
        users = {tuple(b for b, names in enumerate(model.uses) if name in names) for name in group}
        assert users <= {found[0].shape.users(bucket)}
        if plan.tp > 1:
            needed = {model.splits[name].at(0).sums for name in group}
            cells = found[0].shape.cells(bucket)
            assert all(sums == cells if any(len(c) > 1 for c in sums) else cells == () for sums in needed)


def test_a_parameter_that_sharding_lost_is_noticed() -> None:
    model = Model((("w", "v"),), {"w": SPLIT, "v": SPLIT}, 2)
    smaller = Model((("w",),), {"w": SPLIT}, 2).sharded(0)
    with pytest.raises(AssertionError, match=r"no segment uses \['v'\]"):
        bucket_names(model.blocks, ["w", "v"], smaller)


def test_gradients_of_different_parts_are_never_summed() -> None:
    model = Model((("w",),), {"w": SPLIT}, 2)
    sharded = model.sharded(0)
    wrong = replace(sharded.parameters["w"], sums=((0, 1),))
    broken = type(sharded)(sharded.blocks, sharded.parts, sharded.ops, {"w": wrong}, ())
    with pytest.raises(AssertionError, match=r"w is summed over .* which keep different parts of it"):
        bucket_names(model.blocks, ["w"], broken)

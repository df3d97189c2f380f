"""Gradients added up over micro-batches, replicas, shards and tied stages, with ranks that are threads of this process.

Their groups really wait for each other, so a sum that a rank did not start, or started twice, is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.engine.gradients import BucketGradients, Reduced, Reduction, Sum, together
from phalanx.launch.context import RankContext
from phalanx.model.segment.products import Product
from phalanx.params.buckets import BufferPool, FlatBuffer
from phalanx.params.flat import FlatLayout, Sharding
from phalanx.state.local import Local

CPU = torch.device("cpu")
SHAPES = {"a": (5, 40), "b": (3,), "unused": (2,)}  # of two shards, both have a part of "a"
LOCALS = {name: Local(shape) for name, shape in SHAPES.items()}
ALONE = Links(RankContext.alone()).group((0,))


class Started:
    """A collective that is carried out when it is awaited."""

    def __init__(self, carry_out: Callable[[], None], log: list[str]) -> None:
        self._carry_out, self._log = carry_out, log

    def wait(self, what: str = "") -> None:
        self._log.append("wait")
        self._carry_out()


class Meeting:
    """Where the threads of one group redistribution what they bring."""

    def __init__(self, size: int) -> None:
        self.size, self._parts, self._barrier = size, [torch.empty(0)] * size, threading.Barrier(size, timeout=10)

    def sum(self, index: int, tensor: Tensor) -> Tensor:
        self._parts[index] = tensor.clone()
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        return total


class ThreadGroup:
    """The part of a Group that gradients use, for one thread of a meeting."""

    def __init__(self, meeting: Meeting, index: int, log: list[str] | None = None) -> None:
        self.ranks, self._meeting, self._index = tuple(range(meeting.size)), meeting, index
        self.log = [] if log is None else log

    def all_reduce(self, tensor: Tensor) -> Any:
        self.log.append("all_reduce")
        return Started(lambda: tensor.copy_(self._meeting.sum(self._index, tensor)), self.log)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        self.log.append("reduce_scatter")

        def carry_out() -> None:
            output.copy_(self._meeting.sum(self._index, input).view(len(self.ranks), -1)[self._index])

        return Started(carry_out, self.log)


def on_threads(size: int, rank: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(size) as pool:
        return [future.result(timeout=20) for future in [pool.submit(rank, index) for index in range(size)]]


def gradient(name: str, rank: int = 0, micro_batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * micro_batch + len(SHAPES[name]))
    return torch.randn(SHAPES[name], generator=generator)


def summed(name: str, ranks: int, micro_batches: int) -> Tensor:
    return sum(gradient(name, rank, m) for rank in range(ranks) for m in range(micro_batches))


def flat_buffer(locals: Mapping[str, Local], sharding: Sharding, dtype: torch.dtype = torch.float32) -> FlatBuffer:
    return FlatBuffer(FlatLayout.of(locals, sharding.shards), sharding, dtype, CPU)


def bucket_of(how: Reduction, sharding: Sharding | None = None) -> BucketGradients:
    return BucketGradients(flat_buffer(LOCALS, sharding or Sharding()), how, BufferPool())


def add_all(bucket: BucketGradients, rank: int, micro_batches: int, reduce: str) -> Reduced:
    """As a program does it that reduces after each micro-batch, or once."""
    total: Reduced | None = None
    added = bucket.open()
    for micro_batch in range(micro_batches):
        found = [gradient("a", rank, micro_batch), gradient("b", rank, micro_batch), None]
        added.add(together(("a", "b", "unused"), found))
        if reduce == "micro-batch" or micro_batch + 1 == micro_batches:
            part: Any = bucket.reduce(added).wait("gradients")
            added = bucket.open()
            if total is None:
                total = part
            else:
                total.add(part)
                part.release()
    assert total is not None
    return total


def test_what_is_this_ranks_alone_is_summed_by_name_and_what_got_nothing_is_absent() -> None:
    gradients = Sum()
    gradients.add(together(("a", "b", "unused"), [gradient("a"), gradient("b"), None]))
    gradients.add(together(("a", "a"), [gradient("a", micro_batch=1), gradient("a", micro_batch=2)]))
    found = gradients.pieces()
    assert set(found) == {"a", "b"}
    torch.testing.assert_close(found["a"], summed("a", 1, 3))


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
def test_replicas_end_up_with_the_sum_of_all_in_every_step(reduce: str) -> None:
    meeting = Meeting(2)

    def rank(index: int) -> list[dict[str, Tensor]]:
        bucket, found = bucket_of(Reduction(ThreadGroup(meeting, index), ALONE, ALONE, sharded=False)), []
        for _ in range(2):  # what is left of one step must not reach the next
            total = add_all(bucket, index, 3, reduce)
            found.append({name: value.clone() for name, value in total.pieces().items()})
            total.release()
        return found

    for found in (step for steps in on_threads(2, rank) for step in steps):
        assert set(found) == {"a", "b"}
        for name, value in found.items():
            torch.testing.assert_close(value, summed(name, 2, 3))


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
def test_shards_hold_the_sum_each_of_its_own_pieces(reduce: str) -> None:
    meeting = Meeting(2)

    def rank(index: int) -> dict[str, Tensor]:
        how = Reduction(ThreadGroup(meeting, index), ALONE, ALONE, sharded=True)
        return add_all(bucket_of(how, Sharding(2, index, whole=False)), index, 3, reduce).pieces()

    first, second = on_threads(2, rank)
    assert (set(first), set(second)) == ({"a"}, {"a", "b"})
    torch.testing.assert_close(torch.cat([first["a"], second["a"]]).view(SHAPES["a"]), summed("a", 2, 3))
    torch.testing.assert_close(second["b"], summed("b", 2, 3))


def test_shards_inside_groups_are_summed_across_the_groups() -> None:
    inside, across = [Meeting(2), Meeting(2)], [Meeting(2), Meeting(2)]

    def rank(number: int) -> dict[str, Tensor]:
        group, index = divmod(number, 2)
        zero, replicas = ThreadGroup(inside[group], index), ThreadGroup(across[index], group)
        bucket = bucket_of(Reduction(zero, replicas, ALONE, sharded=True), Sharding(2, index))
        total: Any = bucket.sum(add_all(bucket, number, 2, "micro-batch"), replicas).wait("gradients")
        return total.pieces()

    found = on_threads(4, rank)
    for first, second in (found[:2], found[2:]):
        torch.testing.assert_close(torch.cat([first["a"], second["a"]]).view(SHAPES["a"]), summed("a", 4, 2))


def test_a_tied_bucket_is_summed_between_stages_and_zero_stands_for_none() -> None:
    meeting = Meeting(2)

    def stage(index: int) -> dict[str, Tensor]:
        bucket = bucket_of(Reduction(ALONE, ALONE, ThreadGroup(meeting, index), sharded=False))
        name = ("a", "b")[index]  # each stage has a gradient that the other has not
        added = bucket.open()
        added.add({name: gradient(name, index)})
        total: Any = bucket.sum(bucket.whole(added), bucket.how.tie).wait("gradients")
        return total.pieces()

    for found in on_threads(2, stage):
        torch.testing.assert_close(found["a"], gradient("a", 0))
        torch.testing.assert_close(found["b"], gradient("b", 1))
        assert not found["unused"].any()


def test_many_small_gradients_of_a_bucket_are_summed_in_float32() -> None:
    flat = flat_buffer({"w": Local((1,))}, Sharding(), torch.bfloat16)
    bucket = BucketGradients(flat, Reduction(ALONE, ALONE, ALONE, sharded=False), BufferPool())
    added = bucket.open()
    for _ in range(1000):
        added.add({"w": torch.ones(1, dtype=torch.bfloat16)})
    total = bucket.whole(added).pieces()["w"]
    assert (total.dtype, total.item()) == (torch.float32, 1000)


def test_products_are_multiplied_into_the_bucket() -> None:
    bucket = bucket_of(Reduction(ALONE, ALONE, ALONE, sharded=False))
    left, right, added = torch.ones(5, 2), torch.full((2, 40), 3.0), bucket.open()
    for _ in range(3):
        added.add({"a": Product(left, right), "b": torch.ones(3)})
    found = bucket.whole(added).pieces()
    assert torch.equal(found["a"].reshape(5, 40), torch.full((5, 40), 18.0))
    assert torch.equal(found["b"], torch.full((3,), 3.0))


def test_two_uses_of_a_parameter_in_one_block_are_one_gradient() -> None:
    twice = Product(torch.ones(5, 2), torch.ones(2, 40))
    found = together(("a", "a"), [twice, torch.ones(5, 40)])
    assert torch.equal(found["a"], torch.full((5, 40), 3.0))


def test_memory_of_released_gradients_is_used_again() -> None:
    pool = BufferPool()
    bucket = BucketGradients(flat_buffer(LOCALS, Sharding()), Reduction(ALONE, ALONE, ALONE, sharded=False), pool)
    places: set[int] = set()
    for _ in range(3):
        added = bucket.open()
        added.add({"a": gradient("a")})
        total: Any = bucket.reduce(added).wait("gradients")
        places.add(total.tensor.untyped_storage().data_ptr())
        total.release()
    assert len(places) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_small_gradients_are_summed_in_float32(dtype: torch.dtype) -> None:
    gradients = Sum()
    for _ in range(1000):
        gradients.add({"a": torch.ones(1, dtype=dtype)})
    total = gradients.pieces()["a"]
    assert (total.dtype, total.item()) == (torch.float32, 1000)

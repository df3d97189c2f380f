"""Gradients added up over micro-batches, replicas, shards and tied stages, with ranks that are threads of this process.

Their groups really wait for each other, so a sum that a rank did not start, or started twice, is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.launch.seat import Seat
from phalanx.model.segment.products import Product
from phalanx.runtime.accumulate import Accumulator, BucketGradients, Gradients, Reduction
from phalanx.runtime.buckets import BufferPool, Sharding, Shelf
from phalanx.state.local import Local

CPU = torch.device("cpu")
SHAPES = {"a": (5, 40), "b": (3,), "unused": (2,)}  # of two shards, both have a part of "a"
LOCALS = {name: Local(shape) for name, shape in SHAPES.items()}
ALONE = Links(Seat.alone()).group((0,))


class Started:
    """A collective that is carried out when it is awaited."""

    def __init__(self, carry_out: Callable[[], None], log: list[str]) -> None:
        self._carry_out, self._log = carry_out, log

    def wait(self, what: str = "") -> None:
        self._log.append("wait")
        self._carry_out()


class Meeting:
    """Where the threads of one group exchange what they bring."""

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


def gradients_of(how: Reduction, sharding: Sharding | None = None, in_flight: int | None = None) -> Gradients:
    shelf = Shelf(LOCALS, sharding or Sharding(), torch.float32, CPU)
    bucket = BucketGradients(shelf, how, BufferPool())
    return Gradients({7: bucket}, dict.fromkeys(SHAPES, 7), in_flight)


def add_all(gradients: Gradients, rank: int, micro_batches: int, reduce: str) -> None:
    for micro_batch in range(micro_batches):
        gradients.add(["a", "b", "unused"], [gradient("a", rank, micro_batch), gradient("b", rank, micro_batch), None])
        if reduce == "micro-batch":
            gradients.reduce(7)
    if reduce == "step":
        gradients.reduce(7)


def test_what_is_this_ranks_alone_is_summed_by_name_and_what_got_nothing_is_absent() -> None:
    gradients = Gradients({}, {})
    gradients.add(["a", "b", "unused"], [gradient("a"), gradient("b"), None])
    gradients.add(["a", "a"], [gradient("a", micro_batch=1), gradient("a", micro_batch=2)])
    found = gradients.finish()
    assert set(found) == {"a", "b"}
    torch.testing.assert_close(found["a"], summed("a", 1, 3))
    assert gradients.finish() == {}


@pytest.mark.parametrize("reduce", ["step", "micro-batch"])
def test_replicas_end_up_with_the_sum_of_all_in_every_step(reduce: str) -> None:
    meeting = Meeting(2)

    def rank(index: int) -> list[dict[str, Tensor]]:
        gradients, found = gradients_of(Reduction(ThreadGroup(meeting, index), ALONE, ALONE, sharded=False)), []
        for _ in range(2):  # what is left of one step must not reach the next
            add_all(gradients, index, 3, reduce)
            found.append({name: value.clone() for name, value in gradients.finish().items()})
            gradients.release()
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
        gradients = gradients_of(how, Sharding(2, index, whole=False), in_flight=2)
        add_all(gradients, index, 3, reduce)
        return gradients.finish()

    first, second = on_threads(2, rank)
    assert (set(first), set(second)) == ({"a"}, {"a", "b"})
    torch.testing.assert_close(torch.cat([first["a"], second["a"]]).view(SHAPES["a"]), summed("a", 2, 3))
    torch.testing.assert_close(second["b"], summed("b", 2, 3))


def test_shards_inside_groups_are_summed_across_the_groups() -> None:
    inside, across = [Meeting(2), Meeting(2)], [Meeting(2), Meeting(2)]

    def rank(number: int) -> dict[str, Tensor]:
        group, index = divmod(number, 2)
        zero, replicas = ThreadGroup(inside[group], index), ThreadGroup(across[index], group)
        gradients = gradients_of(Reduction(zero, replicas, ALONE, sharded=True), Sharding(2, index), in_flight=2)
        add_all(gradients, number, 2, "micro-batch")
        gradients.sum(7)
        return gradients.finish()

    found = on_threads(4, rank)
    for first, second in (found[:2], found[2:]):
        torch.testing.assert_close(torch.cat([first["a"], second["a"]]).view(SHAPES["a"]), summed("a", 4, 2))


def test_a_tied_bucket_is_summed_between_stages_and_zero_stands_for_none() -> None:
    meeting = Meeting(2)

    def stage(index: int) -> dict[str, Tensor]:
        gradients = gradients_of(Reduction(ALONE, ALONE, ThreadGroup(meeting, index), sharded=False))
        name = ("a", "b")[index]  # each stage has a gradient that the other has not
        gradients.add([name], [gradient(name, index)])
        gradients.tie(7)
        return gradients.finish()

    for found in on_threads(2, stage):
        torch.testing.assert_close(found["a"], gradient("a", 0))
        torch.testing.assert_close(found["b"], gradient("b", 1))
        assert not found["unused"].any()


def test_no_more_reductions_are_under_way_than_allowed() -> None:
    log: list[str] = []
    buckets = {
        index: BucketGradients(
            Shelf({f"w{index}": Local((4,))}, Sharding(), torch.float32, CPU),
            Reduction(ThreadGroup(Meeting(1), 0, log), ALONE, ALONE, sharded=True), BufferPool(),
        )
        for index in range(5)
    }  # fmt: skip
    gradients = Gradients(buckets, {f"w{index}": index for index in range(5)}, in_flight=2)
    under_way: list[int] = []
    for index in range(5):
        gradients.add([f"w{index}"], [torch.full((4,), float(index))])
        gradients.reduce(index)
        under_way.append(log.count("reduce_scatter") - log.count("wait"))
    assert under_way == [1, 2, 2, 2, 2]
    assert {name: value[0].item() for name, value in gradients.finish().items()} == {f"w{n}": n for n in range(5)}


def test_many_small_gradients_of_a_bucket_are_summed_in_float32() -> None:
    shelf = Shelf({"w": Local((1,))}, Sharding(), torch.bfloat16, CPU)
    bucket = BucketGradients(shelf, Reduction(ALONE, ALONE, ALONE, sharded=False), BufferPool())
    gradients = Gradients({0: bucket}, {"w": 0})
    for _ in range(1000):
        gradients.add(["w"], [torch.ones(1, dtype=torch.bfloat16)])
    total = gradients.finish()["w"]
    assert (total.dtype, total.item()) == (torch.float32, 1000)


def test_products_are_multiplied_into_the_bucket() -> None:
    gradients = gradients_of(Reduction(ALONE, ALONE, ALONE, sharded=False))
    left, right = torch.ones(5, 2), torch.full((2, 40), 3.0)
    for _ in range(3):
        gradients.add(["a", "b"], [Product(left, right), torch.ones(3)])
    found = gradients.finish()
    assert torch.equal(found["a"].reshape(5, 40), torch.full((5, 40), 18.0))
    assert torch.equal(found["b"], torch.full((3,), 3.0))


def test_two_uses_of_a_parameter_in_one_block_are_one_gradient() -> None:
    gradients = Gradients({}, {})
    twice = Product(torch.ones(5, 2), torch.ones(2, 40))
    gradients.add(["a", "a"], [twice, torch.ones(5, 40)])
    assert torch.equal(gradients.finish()["a"], torch.full((5, 40), 3.0))


def test_memory_of_released_gradients_is_used_again() -> None:
    pool = BufferPool()
    bucket = BucketGradients(
        Shelf(LOCALS, Sharding(), torch.float32, CPU), Reduction(ALONE, ALONE, ALONE, sharded=False), pool
    )
    gradients = Gradients({7: bucket}, dict.fromkeys(SHAPES, 7))
    places: set[int] = set()
    for _ in range(3):
        gradients.add(["a"], [gradient("a")])
        places.add(gradients.finish()["a"].untyped_storage().data_ptr())
        gradients.release()
    assert len(places) == 1


class TestAccumulator:
    def test_gradients_of_one_name_are_summed_and_missing_ones_left_out(self) -> None:
        accumulator = Accumulator()
        accumulator.add(["a", "b"], [torch.ones(2), None])
        accumulator.add(["a", "c"], [torch.ones(2), torch.zeros(1)])
        sums = accumulator.take()
        assert set(sums) == {"c", "a"}
        assert sums["a"].tolist() == [2, 2]

    def test_taking_empties_it(self) -> None:
        accumulator = Accumulator()
        accumulator.add(["a"], [torch.ones(2)])
        accumulator.take()
        assert accumulator.take() == {}

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_many_small_gradients_are_summed_in_float32(self, dtype: torch.dtype) -> None:
        accumulator = Accumulator()
        for _ in range(1000):
            accumulator.add(["a"], [torch.ones(1, dtype=dtype)])
        total: Tensor = accumulator.take()["a"]
        assert (total.dtype, total.item()) == (torch.float32, 1000)

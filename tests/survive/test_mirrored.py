"""What a rank mirrors by gradients is what the other has, to the last bit, whatever plan, optimizer and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.adapt.mirrors import mirror_of
from phalanx.engine import mirroring
from phalanx.engine.mirroring import Gradients
from phalanx.launch.worker_pool import WorkerPool
from phalanx.params.mirrored import checksums
from tests.survive import jobs

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "stages": (2, "pp=2,mb=2", {}),
    "tensor parts": (4, "pp=2,tp=2,mb=2", {}),
    "shards of the optimizer": (2, "dp=2,zero=1", {"dtype": "bfloat16"}),
    "shards of parameters": (2, "dp=2,zero=3", {}),
    "shards of three": (3, "dp=3,zero=2", {"clip": None, "dtype": "float32"}),
    "float16": (2, "pp=2,mb=2", {"dtype": "float16"}),
    "gradients as they came": (2, "pp=2", {"dtype": "bfloat16", "optimizer": "torch.optim.Adagrad"}),
    "without masters": (2, "pp=2,mb=2", {"dtype": "bfloat16", "master_weights": False}),
    "frozen": (2, "pp=2,mb=2", {"frozen": "wpe"}),
    "sgd": (2, "pp=2,mb=2", {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}),
    "an average of steps": (2, "dp=2,zero=1", {"optimizer": "torch.optim.NAdam"}),
    "state on the host": (2, "pp=2,mb=2,offload=optimizer", {}),
    "updated on the host": (2, "pp=2,mb=2,offload=optimizer-step", {"dtype": "bfloat16"}),
    "exact sums": (2, "pp=2,mb=8", {"deterministic": True}),
}
QUICK = ("stages", "shards of the optimizer")


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in CASES]
)
def test_a_mirror_has_what_the_rank_has(name: str, pool: WorkerPool) -> None:
    """A step that is not finite in between is skipped by both."""
    world, plan, options = CASES[name]
    found = pool.run(jobs.mirrored, plan, 3, 1, options, world=world)
    for rank, (_, mirrors, kept) in enumerate(found):
        own = found[mirrors][0]
        assert mirrors != rank and kept and kept.keys() <= own.keys()
        assert {each for each in kept if not torch.equal(kept[each], own[each])} == set()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 0], {0: 1, 1: 0}),
        ([0, 0, 1, 1], {0: 2, 1: 3, 2: 0, 3: 1}),
        ([0, 1, 0, 1], {0: 1, 2: 3, 1: 0, 3: 2}),
        ([0, 0, 0, 1], {0: 3, 1: 0, 2: 1, 3: 2}),
    ],
)
def test_a_mirror_is_on_another_machine_where_that_can_be(nodes: list[int], expected: dict[int, int]) -> None:
    assert mirror_of(nodes) == expected


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_every_rank_mirrors_one_other(nodes: list[int]) -> None:
    found = mirror_of(nodes)
    assert sorted(found) == sorted(found.values()) == list(range(len(nodes)))
    assert all(rank != mirror for rank, mirror in found.items())
    if 2 * max(map(nodes.count, nodes)) <= len(nodes):
        assert all(nodes[rank] != nodes[mirror] for rank, mirror in found.items())


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(mirroring._DTYPES)), max_size=6), st.integers(1, 7))
def test_gradients_come_as_they_went(kinds: list[tuple[int, torch.dtype | None]], most: int) -> None:
    shapes = {str(number): torch.Size((size,)) for number, (size, _) in enumerate(kinds)}
    sent = {str(i): torch.randn(size).to(dtype) for i, (size, dtype) in enumerate(kinds) if dtype is not None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirroring, "ROUND_BYTES", 8 * most)
        out, into = (Gradients(shapes, torch.float64, torch.device("cpu")) for _ in range(2))
        row = torch.cat([torch.empty(0, dtype=out.dtype), *(out.packed(sent, *ends).clone() for ends in out.rounds())])
    came = into.unpacked(row)
    assert came.keys() == sent.keys()
    assert all(torch.equal(came[name], sent[name]) and came[name].dtype == sent[name].dtype for name in sent)


@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 39), st.integers(0, 7))
def test_a_bit_that_turns_is_noticed(size: int, skipped: int, place: int, bit: int) -> None:
    values = torch.arange(skipped + size, dtype=torch.uint8)[skipped:]
    before = checksums([values, torch.zeros(())])
    values[place % size] ^= 1 << bit
    assert checksums([values, torch.zeros(())]) != before

"""Groups of ranks communicate as fast as the nodes that they touch, whatever other nodes there are."""

from __future__ import annotations

import random

import pytest

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster, slowest
from phalanx.planning.cost import Machine, Software, machines
from phalanx.planning.estimate import Estimate, estimate
from phalanx.planning.work import Shape, transformer

MODEL = transformer("model", Shape(32, 4096, 32, 8, 14336, 128256, 4096, gated=True))
LAYER = MODEL.classes[1]
PLANS = [
    "pp=2,tp=8,mb=8,stages=17-17", "dp=2,tp=8,mb=4,stages=34", "pp=2,dp=2,tp=4,mb=8,stages=17-17",
    "pp=2,dp=8,mb=2,zero=3,stages=17-17", "tp=16,mb=8,stages=34",
]  # fmt: skip


def places(text: str, plan: str) -> list[Machine]:
    return machines(Cluster.read(text), Software(), Plan.parse(plan), 1)


def judged(cluster: Cluster, plan: str, batch: int = 32) -> Estimate:
    return estimate(MODEL, Plan.parse(plan), cluster, Software(), batch)


def test_tensor_parallel_ranks_inside_a_node_use_its_links_whatever_other_nodes_there_are() -> None:
    first, second = places("1x8 H100 + 1x8 T4", "pp=2,tp=8,mb=8")
    fast, slow = (places(text, "pp=2,tp=8,mb=8")[0] for text in ("2x8 H100", "2x8 T4"))
    assert first.sums_seconds(LAYER) == fast.sums_seconds(LAYER)
    assert second.sums_seconds(LAYER) == slow.sums_seconds(LAYER) > 20 * fast.sums_seconds(LAYER)
    few = "pp=2,tp=8,mb=8,stages=32-2"
    mixed, slower = (judged(Cluster.read(text), few) for text in ("1x8 H100 + 1x8 T4", "2x8 H100, nvlink 12GB/s"))
    assert mixed.parts["tensor communication"] < slower.parts["tensor communication"] / 10


def test_tensor_parallel_ranks_on_two_kinds_of_nodes_use_the_slower_links() -> None:
    (mixed,) = places("1x8 H100 + 1x8 H100 network 1GB/s nvlink 20GB/s", "tp=16")
    (slow,) = places("2x8 H100, network 1GB/s, nvlink 20GB/s", "tp=16")
    assert mixed.sums_seconds(LAYER) == slow.sums_seconds(LAYER)


def test_replicas_exchange_gradients_over_the_nodes_of_their_own_place() -> None:
    text = "2x8 H100 + 2x8 H100 network 1GB/s"
    first, second = places(text, "pp=2,dp=16")
    (slow, _), (fast, _) = places("4x8 H100, network 1GB/s", "pp=2,dp=16"), places("4x8 H100", "pp=2,dp=16")
    assert first.reduce_seconds(1e9) == fast.reduce_seconds(1e9)
    assert second.reduce_seconds(1e9) == slow.reduce_seconds(1e9) > 10 * fast.reduce_seconds(1e9)
    (together,) = places(text, "dp=32")
    assert together.reduce_seconds(1e9) == places("4x8 H100, network 1GB/s", "dp=32")[0].reduce_seconds(1e9)


def test_a_message_is_as_slow_as_the_slower_of_two_neighbours() -> None:
    first, second, third = places("2x8 H100 + 1x8 H100 network 1GB/s", "pp=3,dp=8,mb=3")
    fast, slow = (places(text, "pp=3,dp=8,mb=3")[0] for text in ("3x8 H100", "3x8 H100, network 1GB/s"))
    assert first.message_seconds(1e6) == fast.message_seconds(1e6)
    assert second.message_seconds(1e6) == third.message_seconds(1e6) == slow.message_seconds(1e6)
    back = places("2x8 H100 network 1GB/s + 1x8 H100", "pp=3,dp=8,mb=3,schedule=interleaved,v=2")
    assert back[2].message_seconds(1e6) == slow.message_seconds(1e6)  # from the last stage of a round to the next


def test_a_place_on_several_kinds_has_the_least_of_each() -> None:
    text = "1x8 H100 memory 40GB host 1TB + 1x4 A100 host 1TB"
    (mixed,) = places(text, "dp=12")
    kind = mixed.nodes
    assert (kind.memory, kind.devices, kind.device.name) == (40e9, 4, "A100")
    assert kind.network / kind.devices == min(own.network / own.devices for own in Cluster.read(text).nodes)
    assert mixed.host_memory == 1e12 / 8
    own = judged(Cluster.read(text), "dp=12,stages=34", batch=12)
    assert own.budget == (pytest.approx(mixed.budget),)


@pytest.mark.parametrize("seed", range(12))
def test_a_cluster_of_several_kinds_lies_between_its_best_and_its_worst(seed: int) -> None:
    generator = random.Random(seed)
    words = [
        f"{generator.choice(['H100', 'A100', 'T4'])} nvlink {generator.choice([20, 100, 450])}GB/s "
        f"network {generator.choice([1, 10, 100])}GB/s memory {generator.choice([16, 40, 80])}GB"
        for _ in range(2)
    ]
    mixed = Cluster.read(" + ".join(f"1x8 {word}" for word in words))
    one, other = mixed.nodes
    plan = generator.choice(PLANS)
    worst = Cluster((slowest((one, other)),))
    assert worst.world == 16
    own, least = judged(mixed, plan), judged(worst, plan)
    best = min(judged(Cluster((kind, kind)), plan).step_seconds for kind in (one, other))
    assert best * (1 - 1e-9) <= own.step_seconds <= least.step_seconds * (1 + 1e-9)
    alike = judged(Cluster((one, one)), plan)
    assert alike.step_seconds == pytest.approx(judged(Cluster((one,)).scaled(2), plan).step_seconds, rel=1e-12)
    assert alike.memory == judged(Cluster((one,)).scaled(2), plan).memory

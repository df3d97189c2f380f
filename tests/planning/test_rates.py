"""What was measured of a device beside what is published and what a user says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.collectives import Links, all_reduce, consecutive, gather, send
from phalanx.planning.cost import LISTENED, Machine, Software
from phalanx.planning.devices import DEVICES
from phalanx.planning.estimate import estimate
from phalanx.planning.precision import in_precision
from phalanx.planning.rates import Points, Rates, Spread, Talk, on_cluster
from phalanx.planning.work import Shape, transformer


def rates(**changes: Any) -> Rates:
    links = Links(2e9, 1e9, 4, 1e-5)
    sums = tuple((size, all_reduce(links, consecutive(4, 1, 4), size)) for size in (1e5, 1e6, 1e7))
    products = tuple((side, 5e12 * side / (side + 300)) for side in (128, 512, 2048))
    given: dict[str, Any] = {"device": "NVIDIA A100-SXM4-80GB", "dtype": "bfloat16", "products": products,
                             "bandwidth": 1e12, "near": Talk(Spread(4, 4), {"all_reduce": sums})}  # fmt: skip
    return Rates(**given | changes)


def machine(text: str, measured: Rates, **fields: Any) -> Machine:
    cluster, software = on_cluster(Cluster.read(text), Software(), measured)
    return Machine(cluster.nodes[0], software, Plan(**fields), samples=1)


def test_what_goes_to_the_host_takes_as_long_as_was_measured() -> None:
    slow = machine("4 A100", rates(host=1e9), dp=4)
    assert slow.host_rate == pytest.approx(1e9) and slow.nodes.device.host.known == "measured"
    assert slow.host_seconds(1e9, 4.0) == pytest.approx(4.0)
    assert machine("4 A100", rates(), dp=4).host_rate == DEVICES["A100"].host.value


def test_what_all_ranks_of_a_node_reached_at_once_its_memory_is_not_said_to_lack() -> None:
    assert machine("4 A100", rates(host=9e10), dp=4).host_rate == pytest.approx(9e10)
    assert machine("8 A100", rates(host=9e10, near=Talk(Spread())), dp=8).host_rate == Software().host_copies / 8


@pytest.mark.parametrize("word, share", [("nvlink", "link"), ("network", "network")])
def test_what_a_user_says_of_links_stands_before_what_was_measured(word: str, share: str) -> None:
    text = f"2x4 A100, {word} 1GB/s"
    cluster, software = on_cluster(Cluster.read(text), Software(), rates())
    assert getattr(cluster.nodes[0], share) == 1e9 and getattr(software, share) == getattr(Software(), share)


def test_what_a_user_says_of_one_kind_of_nodes_is_not_measured_of_it() -> None:
    text = "1x4 A100 nvlink 1GB/s + 1x4 A100"
    cluster, software = on_cluster(Cluster.read(text), Software(), rates())
    reached = [kind.link * software.link for kind in cluster.nodes]
    assert reached == [pytest.approx(Software().link * 1e9), pytest.approx(2e9)]


def test_what_a_user_says_of_a_device_stands_too() -> None:
    cluster, software = on_cluster(Cluster.read("4 A100, flops 1e14"), Software(), rates())
    device = cluster.nodes[0].device
    assert device.flops == (1e14, "the cluster's description", "given") and device.bandwidth.value == 1e12
    assert (software.products, software.small, software.memory) == (Software().products, Software().small, 1.0)
    assert str(Cluster.read("4 A100, flops 1e14, bandwidth 900GB/s")) == "1x4 A100 flops 1e14 bandwidth 900GB/s"


def test_devices_are_as_fast_as_in_the_precision_of_the_run() -> None:
    def flops(text: str, dtype: str) -> float:
        return in_precision(Cluster.read(text), dtype).nodes[0].device.flops.value

    assert flops("8 H100", "bfloat16") == flops("8 H100", "float16") == DEVICES["H100"].flops.value
    assert flops("8 H100", "float32") == 67e12
    assert flops("8 T4", "float32") == DEVICES["T4"].flops.value / 8
    assert flops("8 H100, flops 1e12", "float32") == 1e12
    assert flops("2 CPU", "bfloat16") == flops("2 CPU", "float32") / 2
    unlike = replace(Cluster.read("8 H100").nodes[0], device=replace(DEVICES["H100"], name="Z100"))
    assert in_precision(Cluster((unlike,)), "float64").nodes[0].device.flops.known == "assumed"


def test_ranks_that_share_cores_get_on_faster_while_others_wait() -> None:
    """A pipeline takes no longer than what all of its ranks have to do, where their cores never rest, and no less than
    its way takes a rank that has them for itself."""
    crowd = Talk(Spread(4, 4), {}, {"computing": ((2.0, 0.9), (4.0, 0.5))})
    cluster, software = on_cluster(Cluster.read("4 A100"), Software(), rates(near=crowd))
    assert software.crowded == 2.0 and on_cluster(cluster, software, rates())[1].crowded == 1.0
    model = transformer("any", Shape(8, 1024, 8, 8, 4096, 1000, 1024))

    def way(mb: int, crowded: float, text: str = "4 A100") -> tuple[float, float]:
        plan = Plan(pp=4, mb=mb, stages=(3, 3, 2, 2))
        own = estimate(model, plan, Cluster.read(text), replace(software, crowded=crowded), 16)
        return own.parts["computation"] + own.parts["bubble"], own.parts["computation"]

    for mb in (1, 2, 8):
        through, _ = way(mb, 1.0)
        assert way(mb, 1.5)[0] == pytest.approx(max(through / 1.5, way(mb, 1e9)[0]))
    assert way(1, 1e9)[0] == way(1, 1e3)[0] < way(1, 2.0)[0] < way(1, 1.0)[0]
    assert way(2, 2.0, "4x1 A100") == way(2, 1.0, "4x1 A100")  # each has its node for itself


def test_messages_that_are_waited_for_slow_the_computation_of_a_pipeline() -> None:
    listened = Talk(Spread(4, 4), {}, {"listening": ((1.0, 0.8),)})
    software = on_cluster(Cluster.read("4 A100"), Software(), rates(near=listened))[1]
    assert software.listening == pytest.approx(0.25) and Software().listening == 0.0
    node = Cluster.read("4 A100").nodes[0]

    def slowed(**fields: Any) -> float:
        return Machine(node, software, Plan(**fields), samples=1).slowed

    assert slowed(dp=4) == slowed(tp=4) == 1.0
    assert slowed(pp=4, mb=4) == pytest.approx(1 + 0.25 * LISTENED * 2 * 3 / 4)
    assert slowed(pp=4, mb=4, schedule="gpipe") == pytest.approx(1 + 0.25 * LISTENED * 3 / 4)  # from one side at a time
    model = transformer("any", Shape(8, 1024, 8, 8, 4096, 1000, 1024))
    plan = Plan(pp=4, mb=8, stages=(3, 3, 2, 2))
    quiet, loud = (
        estimate(model, plan, Cluster.read("4 A100"), replace(software, listening=own, launch=0.0), 16).parts
        for own in (0.0, 0.25)
    )
    share = slowed(pp=4, mb=8)
    assert loud["computation"] == pytest.approx(share * quiet["computation"])
    assert loud["messages"] == quiet["messages"]


def test_ranks_of_nodes_that_are_parts_of_one_machine_get_on_faster_while_others_wait() -> None:
    """As those of one node do, whatever of the pipeline lies on which node."""
    crowd = Talk(Spread(1, 1, 4), {}, {"computing": ((4.0, 0.5),)})
    cluster, software = on_cluster(Cluster.read("4x1 A100, network 100GB/s"), Software(), rates(far=crowd))
    assert software.crowded == 2.0 and software.one_machine
    apart = replace(software, one_machine=False)
    model, plan = transformer("any", Shape(8, 1024, 8, 8, 4096, 1000, 1024)), Plan(pp=4, mb=2, stages=(3, 3, 2, 2))
    lab, real = (estimate(model, plan, cluster, shares, 16).parts for shares in (software, apart))
    assert real["bubble"] + real["computation"] > 1.3 * (lab["bubble"] + lab["computation"])
    near = replace(rates(), near=Talk(Spread(4, 4), {}, {"computing": ((4.0, 0.5),)}))
    assert not on_cluster(cluster, Software(), near)[1].one_machine


SIZES = (1e5, 1e6, 1e7)


def seen(links: Links, among: Spread) -> dict[str, Points]:
    """As ranks would measure links that are like this."""
    group = consecutive(among.world, 1, links.per_node)
    gathers = tuple((size, gather(links, group, size)) for size in SIZES)
    return {
        "all_reduce": tuple((size, all_reduce(links, group, size)) for size in SIZES),
        "all_gather": tuple((size, 0.5 * seconds) for size, seconds in gathers),
        "reduce_scatter": tuple((size, 1.5 * seconds) for size, seconds in gathers),
        "send": tuple((size, send(links, size, among.nodes == 1)) for size in SIZES),
    }


def test_what_is_measured_in_a_node_and_between_nodes_is_what_planning_counts_there() -> None:
    """Sums, gathers (the mean of gathering and scattering) and messages, of either class of groups by itself."""
    links = Links(2e9, 4e8, 4, 1e-5, 3e-4, gathers=0.5, sends=2.0, network_gathers=0.7, network_sends=1.6)
    near, far = (Talk(spread, seen(links, spread)) for spread in (Spread(4, 4), Spread(4, 4, 3)))
    found = machine("8x4 A100", rates(near=near, far=far), dp=32).links
    for name, value in vars(links).items():
        # Messages carry the latency of a whole hop, gathers that of several.
        assert getattr(found, name) == pytest.approx(value, rel=0.02), name
    alone = machine("8x4 A100", rates(near=near), dp=32).links
    assert (alone.network, alone.network_sends) == (0.75 * DEVICES["A100"].network.value, 1.0)


def test_one_rank_on_each_node_measures_the_network_alone() -> None:
    links = Links(1e12, 1e8, 1, 0.0, 2e-4)
    measured = rates(near=Talk(Spread()), far=Talk(Spread(nodes=2), seen(links, Spread(nodes=2))))
    cluster, software = on_cluster(Cluster.read("2x1 A100"), Software(), measured)
    assert cluster.nodes[0].network == pytest.approx(1e8) and software.network == 1
    assert cluster.nodes[0].device.network.known == "measured" and software.link == Software().link
    given, shares = on_cluster(Cluster.read("2x1 A100, network 1Gb/s"), Software(), measured)
    assert given.nodes[0].network * shares.network == pytest.approx(0.75 * 1.25e8)


def test_spreads_are_told_by_the_class_of_their_group() -> None:
    shown = [str(Spread(*counts)) for counts in ((1, 1), (4, 1), (4, 4), (4, 2), (4, 4, 2), (1, 1, 2))]
    assert shown == ["1 rank", "4 ranks of a device", "4 ranks of a node", "4 ranks of a node",
                     "4 ranks on each of 2 nodes", "1 rank on each of 2 nodes"]  # fmt: skip

"""Clusters as text and files, and the devices that are known."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.errors import ConfigError
from phalanx.planning.cluster import Cluster
from phalanx.planning.devices import DEVICES, find


@pytest.mark.parametrize(
    "text, nodes, devices, link, network",
    [
        ("8x8 H100", 8, 8, 450e9, 400e9),
        ("8 H100", 1, 8, 450e9, 400e9),
        ("8xH100", 1, 8, 450e9, 400e9),
        ("H100", 1, 1, 450e9, 400e9),
        ("8x8 H100, nvlink 450GB/s, network 400Gb/s", 8, 8, 450e9, 50e9),
        ("8x8 H100, network 8x400Gb/s", 8, 8, 450e9, 400e9),
        ("16x4 rtx 3090, pcie 12GB/s, network 10Gbit/s", 16, 4, 12e9, 1.25e9),
    ],
)
def test_a_line_says_nodes_devices_and_links(text: str, nodes: int, devices: int, link: float, network: float) -> None:
    cluster = Cluster.read(text)
    (kind,) = cluster.nodes
    assert (kind.count, kind.devices, kind.link, kind.network) == (nodes, devices, link, network)
    assert cluster.world == nodes * devices
    assert Cluster.read(str(cluster)) == cluster


def test_kinds_of_nodes_have_words_of_their_own() -> None:
    cluster = Cluster.read("4x8 H100 + 2x4 A100-40 nvlink 200GB/s memory 38GB, network 200Gb/s, price 2")
    first, second = cluster.nodes
    assert (first.link, second.link) == (450e9, 200e9)
    assert (first.network, second.network) == (25e9, 25e9)
    assert second.memory == 38e9
    assert cluster.price == 40 * 2
    assert cluster.kind_of(31) is first and cluster.kind_of(32) is second
    assert cluster.kinds_of(range(28, 36)) == (first, second) and cluster.kinds_of(range(32, 40)) == (second,)
    assert Cluster.read(str(cluster)) == cluster


def test_a_file_says_the_same_and_may_describe_a_device() -> None:
    assert Cluster.take(
        {"nodes": [{"count": 8, "devices": 8, "device": "H100"}], "network": "400Gb/s"}
    ) == Cluster.read("8x8 H100, network 400Gb/s")
    own = {"device": "X1", "devices": 2, "flops": "5e14", "bandwidth": "2TB/s", "memory": "64GB", "link": "100GB/s"}
    (kind,) = Cluster.take({"nodes": [own]}).nodes
    assert kind.device.flops.value == 5e14 and kind.memory == 64e9 and kind.device.flops.known == "given"


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "cluster: the description is empty"),
        ("8x8 H101", "cluster: no device 'H101' is known"),
        ("8x8", "cluster: '8x8' says how many devices, and not which"),
        ("8, network 3GB/s", "cluster: '8' says how many devices, and not which"),
        ("0x8 H100", "cluster: '0x8 H100' has no nodes"),
        ("8x0 H100", "cluster: '8x0 H100' has no devices"),
        ("8x8 H100, nvlnk 3GB/s", "cluster: unknown word 'nvlnk'"),
        ("8x8 H100, network 3", "cluster: network '3' is not a rate"),
        ("8x8 H100, network 0GB/s", "cluster: network '0GB/s' is nothing"),
        ("8x8 H100, network 1GB/s, network 2GB/s", "cluster: 'network' is given twice"),
        ("9999999x8 H100", "cluster: 79999992 devices are more than can be planned for"),
        ("99999999 H100", "cluster: 99999999 devices are more than can be planned for"),
        ("-1 H100", "cluster: '-1 H100' has no devices"),
        ("8 H100, price x", "cluster: price 'x' is not a price"),
        ("8 H100, host -1TB", "cluster: host '-1TB' is not a size"),
        ("8 H100, memory 0GB", "cluster: memory '0GB' is nothing"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_may_stand_there(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Cluster.read(text)
    assert error.value.message == message and error.value.hint


@pytest.mark.parametrize(
    "mapping, message",
    [
        ({}, "cluster: a file gives `nodes`, a list of kinds of nodes"),
        ({"nodes": ["8x8 H100"]}, "cluster: nodes: '8x8 H100' is not a kind of nodes"),
        ({"nodes": [{"count": "8", "device": "H100"}]}, "cluster: nodes: count = '8' is not a number"),
        ({"nodes": [{"device": "H100", "links": "1GB/s"}]}, "cluster: unknown word 'links'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Cluster.take(mapping)
    assert error.value.message == message and error.value.hint


def test_every_figure_of_a_device_has_a_source_and_says_how_it_is_known() -> None:
    named = {"V100", "A100-40", "A100", "H100", "H200", "B200", "MI300X", "RTX 3090", "RTX 4090", "T4", "L4", "CPU"}
    assert named <= set(DEVICES)
    for device in DEVICES.values():
        for figure in device.figures.values():
            assert figure.value > 0 and figure.source and figure.known in ("published", "measured", "assumed")
    assert find("a100-80gb") is find("A100") and find("RTX3090").name == "RTX 3090"


def test_hosts_have_memory_and_sizes_may_be_binary() -> None:
    cluster = Cluster.read("2x4 H100, memory 16GiB, host 1TB")
    assert (cluster.nodes[0].memory, cluster.nodes[0].host) == (16 * 2**30, 1e12)
    assert Cluster.read(str(cluster)).nodes[0].host == 1e12
    assert Cluster.read("2x4 H100, network 8Gibit/s").nodes[0].network == 2**30
    with pytest.raises(ConfigError, match="host 'much' is not a size") as error:
        Cluster.read("H100, host much")
    assert "write 1TB" in error.value.hint

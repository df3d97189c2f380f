"""A cluster: nodes of one or more kinds, their devices, and what connects these. From a line of text or a mapping.

    8x8 H100                                              eight nodes of eight
    8x8 H100, nvlink 450GB/s, network 400Gb/s             links inside a node per device, the network per node
    4x8 H100 + 2x8 A100-40 nvlink 200GB/s, network 200Gb/s    what follows one kind is its own, after a comma of all

Rates are those of one direction. Pure data; how fast collectives are on it is `collectives.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, cast

from phalanx.errors import ConfigError, nearest
from phalanx.planning.devices import DEVICES, Device, Figure, find

NETWORK_VARIABLE = "PHALANX_NETWORK"  # what a node of the machines that are here sends to others, as a line says it
EXAMPLE = "8x8 H100, nvlink 450GB/s, network 400Gb/s"
MOST_DEVICES = 1_000_000
_RATES = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_LINKS = ("link", "nvlink", "pcie", "xgmi")
_WORDS = (*_LINKS, "network", "memory", "host", "flops", "bandwidth", "price")
_OF_DEVICES = ("flops", "bandwidth")
_RATED = frozenset((*_OF_DEVICES, "link", "network"))  # words about what can be measured as well
_SOURCE = "the cluster's description"
_KINDS_OF_WORDS = {"memory": "size", "host": "size", "price": "price"}
_KIND = re.compile(r"(?:(-?\d{1,18}) ?[x×] ?)?(?:(-?\d{1,18}) ?[x×]? )?\s*(\S.*)")


@dataclass(frozen=True)
class Nodes:
    """Nodes that are alike. link: bytes/s each way between a device and the others of its node; network: between the
    node and the others. memory: bytes of a device; host: of a whole node, beside its devices, 0 where that is not
    known. price: of a device and hour; 0 where none is given. given: which rates the user said, in whose place nothing
    that was measured is put."""

    count: int
    devices: int
    device: Device
    link: float
    network: float
    memory: float
    price: float = 0.0
    host: float = 0.0
    given: frozenset[str] = frozenset()

    @property
    def total(self) -> int:
        return self.count * self.devices

    def __str__(self) -> str:
        return f"{self.count}x{self.devices} {self.device.name}"


@dataclass(frozen=True)
class Cluster:
    """Ranks are numbered through the nodes in order, one for each device."""

    nodes: tuple[Nodes, ...]

    @staticmethod
    def read(text: str) -> Cluster:
        """From the one-line form; the error names the word and what may stand there."""
        first, *rest = (part.strip() for part in text.split(","))
        if not first:
            raise ConfigError("cluster: the description is empty", f"write for example {EXAMPLE}")
        general = _attributes(rest)
        return Cluster.of(_kind(part.strip(), general) for part in first.split("+"))

    @staticmethod
    def take(mapping: Mapping[str, Any]) -> Cluster:
        """From a file: `nodes`, a list of kinds with count, devices, device and whatever a line may say; beside it
        what holds for all of them. A device that is not known gives flops, bandwidth, memory and link."""
        rows = mapping.get("nodes")
        if not isinstance(rows, list) or not rows:
            message = "cluster: a file gives `nodes`, a list of kinds of nodes"
            raise ConfigError(message, "write for example nodes: [{count: 8, devices: 8, device: H100}]")
        general = _values({name: value for name, value in mapping.items() if name != "nodes"})
        return Cluster.of(_kind_of_row(row, general) for row in cast(list[object], rows))

    @staticmethod
    def of(kinds: Iterable[Nodes]) -> Cluster:
        cluster = Cluster(tuple(kinds))
        if cluster.world > MOST_DEVICES:
            message = f"cluster: {cluster.world} devices are more than can be planned for"
            raise ConfigError(message, f"describe {MOST_DEVICES} or fewer")
        return cluster

    @property
    def world(self) -> int:
        """The number of devices."""
        return sum(kind.total for kind in self.nodes)

    @property
    def per_node(self) -> int:
        """Devices of the smallest node: what surely lies inside one."""
        return min(kind.devices for kind in self.nodes)

    @property
    def slots(self) -> tuple[int, ...]:
        """Devices of each node, in order."""
        return tuple(kind.devices for kind in self.nodes for _ in range(kind.count))

    @property
    def num_nodes(self) -> int:
        return sum(kind.count for kind in self.nodes)

    @property
    def price(self) -> float:
        """Of an hour; 0 where none is given."""
        return sum(kind.total * kind.price for kind in self.nodes)

    def kind_of(self, rank: int) -> Nodes:
        for kind in self.nodes:
            if rank < kind.total:
                return kind
            rank -= kind.total
        raise AssertionError("there is no such rank")

    @cached_property
    def _edges(self) -> list[int]:
        """Of the kinds: the first rank of each, and the one behind the last."""
        return list(accumulate((kind.total for kind in self.nodes), initial=0))

    def kinds_of(self, ranks: range) -> tuple[Nodes, ...]:
        """The kinds of nodes that consecutive ranks lie on."""
        return tuple(self.nodes[number] for number in self.numbers_of(ranks))

    def numbers_of(self, ranks: range) -> tuple[int, ...]:
        """Which of the kinds they are."""
        edges = enumerate(pairwise(self._edges))
        return tuple(number for number, (start, end) in edges if ranks.start < end and start < ranks.stop)

    def together(self, numbers: tuple[int, ...]) -> Nodes:
        """What ranks on nodes of these kinds get when they act together."""
        if numbers not in self._together:
            self._together[numbers] = slowest([self.nodes[number] for number in numbers])
        return self._together[numbers]

    @cached_property
    def _together(self) -> dict[tuple[int, ...], Nodes]:
        return {}

    def scaled(self, factor: int) -> Cluster:
        """With so many times the nodes."""
        return Cluster(tuple(replace(kind, count=kind.count * factor) for kind in self.nodes))

    def __str__(self) -> str:
        """What `read` reads back."""
        return " + ".join(f"{kind}{_differences(kind)}" for kind in self.nodes)


def slowest(kinds: Sequence[Nodes]) -> Nodes:
    """Nodes that are in every respect as the worst of several kinds, since ranks on all of these act together. Of the
    network a device's share counts, and of main memory too, where that is known of a kind."""
    if len(kinds) == 1:
        return kinds[0]
    devices = min(kind.devices for kind in kinds)
    device, *_ = sorted((kind.device for kind in kinds), key=lambda device: device.flops.value)
    memory, bandwidth, host = (
        min((kind.device.figures[name] for kind in kinds), key=lambda figure: figure.value)
        for name in ("memory", "bandwidth", "host")
    )
    shares = [kind.host / kind.devices for kind in kinds if kind.host]
    return Nodes(
        sum(kind.count for kind in kinds), devices, replace(device, memory=memory, bandwidth=bandwidth, host=host),
        min(kind.link for kind in kinds), devices * min(kind.network / kind.devices for kind in kinds),
        min(kind.memory for kind in kinds), host=devices * min(shares, default=0.0),
    )  # fmt: skip


def _differences(kind: Nodes) -> str:
    usual, found = kind.device, ""
    said = kind.given if usual.name in DEVICES else frozenset[str]()  # of others a line says nothing
    for word, value, standard in (
        ("link", kind.link, usual.link.value),
        ("network", kind.network, usual.network.value),
    ):
        found += f" {word} {value / 1e9:g}GB/s" if value != standard or word in said else ""
    if kind.memory != usual.memory.value:
        found += f" memory {kind.memory / 1e9:g}GB"
    found += f" host {kind.host / 1e9:g}GB" if kind.host else ""
    found += f" flops {usual.flops.value:g}".replace("e+", "e") if "flops" in said else ""
    found += f" bandwidth {usual.bandwidth.value / 1e9:g}GB/s" if "bandwidth" in said else ""
    return found + (f" price {kind.price:g}" if kind.price else "")


def _kind(text: str, general: Mapping[str, float]) -> Nodes:
    words = re.split(rf"\s+(?=(?:{'|'.join(_WORDS)})\b)", text)
    match = _KIND.fullmatch(words[0])
    if match is None:
        raise ConfigError(f"cluster: {text!r} is not a kind of nodes", f"write for example {EXAMPLE}")
    first, second, name = match.groups()
    if re.fullmatch(r"[\d x×]+", name):
        raise ConfigError(f"cluster: {text!r} says how many devices, and not which", f"write for example {text} H100")
    # `8 H100` is one node of eight; `8x8 H100` eight of them; `8xH100` is read as `8 H100`.
    nodes, devices = (first, second) if first and second else ("1", first or second or "1")
    device = find(name)
    own = dict(general) | _attributes(words[1:])
    return _nodes(text, int(nodes), int(devices), device, own)


def _kind_of_row(row: object, general: Mapping[str, float]) -> Nodes:
    if not isinstance(row, dict):
        raise ConfigError(
            f"cluster: nodes: {row!r} is not a kind of nodes", "write {count: 8, devices: 8, device: H100}"
        )
    given = {str(name): value for name, value in cast(dict[Any, Any], row).items()}
    name = str(given.pop("device", ""))
    counts = {key: given.pop(key, 1) for key in ("count", "devices")}
    for key, value in counts.items():
        if type(value) is not int:
            raise ConfigError(f"cluster: nodes: {key} = {value!r} is not a number", f"write for example {key}: 8")
    values = dict(general) | _values(given)
    return _nodes(name, counts["count"], counts["devices"], _device(name, values), values)


def _device(name: str, values: Mapping[str, float]) -> Device:
    """A known one, or one that the file describes."""
    needed = (*_OF_DEVICES, "memory", "link")
    if name in DEVICES or any(key not in values for key in needed):
        return find(name)
    memory, flops, bandwidth, link = (Figure(values[key], _SOURCE, "given") for key in
                                      ("memory", "flops", "bandwidth", "link"))  # fmt: skip
    network = Figure(values.get("network", link.value), _SOURCE, "given")
    return Device(name, memory, flops, bandwidth, link, "link", network, 8)


def _nodes(text: str, count: int, devices: int, device: Device, values: Mapping[str, float]) -> Nodes:
    for number, what in ((count, "nodes"), (devices, "devices")):
        if number < 1:
            raise ConfigError(f"cluster: {text!r} has no {what}", f"write for example {EXAMPLE}")
    own = {word: Figure(values[word], _SOURCE, "given") for word in _OF_DEVICES if word in values}
    device = replace(device, **own)
    return Nodes(
        count, devices, device, values.get("link", device.link.value), values.get("network", device.network.value),
        values.get("memory", device.memory.value), values.get("price", 0.0),
        values.get("host", 0.0), frozenset(_RATED & values.keys()),
    )  # fmt: skip


def _attributes(parts: Iterable[str]) -> dict[str, float]:
    given: dict[str, str] = {}
    for part in filter(None, parts):
        word, _, value = part.partition(" ")
        if word.lower() in given:
            raise ConfigError(f"cluster: {word!r} is given twice", "write each once")
        given[word.lower()] = value
    return _values(given)


def _values(given: Mapping[str, object]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in given.items():
        word = "link" if name in _LINKS else name
        if word not in _WORDS:
            raise ConfigError(
                f"cluster: unknown word {name!r}", f"{nearest(name, _WORDS)}; write for example {EXAMPLE}"
            )
        found[word] = _number(name, str(value).strip())
    return found


def stated_network(variables: Mapping[str, str]) -> float | None:
    """bytes/s each way of a node that is here, where the environment says it."""
    if not (text := variables.get(NETWORK_VARIABLE)):
        return None
    try:
        return _number("network", text)
    except ConfigError as error:
        message = error.message.removeprefix("cluster: network ")
        raise ConfigError(f"environment variable {NETWORK_VARIABLE}: {message}", error.hint) from None


def _number(word: str, text: str) -> float:
    """`450GB/s`, `400Gb/s`, `8x400Gb/s`, `80GB`; of flops and price a plain number."""
    match = re.fullmatch(r"(?:(\d{1,3}) ?[x×] ?)?(\d+(?:\.\d+)?(?:e\d+)?) ?([kKmMgGtT]i?[bB](?:it)?(?:/s|ps)?)?", text)
    form = {"memory": "80GB", "host": "1TB", "flops": "989e12", "price": "2.5"}.get(
        word, "450GB/s, 400Gb/s or 8x400Gb/s"
    )
    needs_unit = word not in ("flops", "price")
    if match is None or (match[3] is None) == needs_unit:
        raise ConfigError(f"cluster: {word} {text!r} is not a {_KINDS_OF_WORDS.get(word, 'rate')}", f"write {form}")
    times, number, unit = match.groups()
    value = int(times or 1) * float(number)
    if unit:
        is_bits = unit.replace("i", "", 1)[1] == "b" or "bit" in unit
        scale = 1024 ** (1 + "kmgt".index(unit[0].lower())) if unit[1] == "i" else _RATES[unit[:2].lower()]
        value *= scale / (8 if is_bits else 1)
    if value <= 0 and word != "price":
        raise ConfigError(f"cluster: {word} {text!r} is nothing", f"write for example {form}")
    return value

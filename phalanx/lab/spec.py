"""What a lab is to look like: nodes, ranks, the links between nodes, and the share of this machine each rank gets.

One line (`nodes=2,ranks_per_node=2,link=1gbit,device=cpu:1thread`) or a small YAML or JSON file of the same fields;
rates, shares and moments are read and written here as people write them. Pure data; whether this machine can provide it
is found out by `run.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError, PhalanxError, nearest
from phalanx.planning.cluster import Cluster, Nodes
from phalanx.planning.devices import DEVICES

# Bits per second. Links are sold in decimal units.
RATE_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "kB/s": 8 * 10**3, "MB/s": 8 * 10**6, "GB/s": 8 * 10**9}
SLOWEST, FASTEST = 10**4, 10**11
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}


def read_rate(place: str, text: str) -> int:
    """'1gbit' or '12.5MB/s' → bits per second. `place` names the value in the error: 'link'."""
    units = {unit.lower(): factor for unit, factor in RATE_UNITS.items()}
    number, unit = _split_unit(text)
    if number is None or unit.lower() not in units:
        hint = nearest(unit, RATE_UNITS) if number is not None and unit else f"units: {', '.join(RATE_UNITS)}"
        raise ConfigError(f"{place}={text} is not a rate", f"write for example 1gbit or 100MB/s; {hint}")
    rate = round(number * units[unit.lower()])
    if not SLOWEST <= rate <= FASTEST:
        allowed = f"{rate_text(SLOWEST)} … {rate_text(FASTEST)}"
        raise ConfigError(f"{place}={text} is outside of what can be throttled", f"allowed: {allowed}")
    return rate


def rate_text(rate: int) -> str:
    """The shortest text that `read_rate` reads back."""
    texts = [f"{rate / RATE_UNITS[unit]:.12g}{unit}" for unit in ("gbit", "mbit", "kbit")]
    return min(texts, key=lambda text: (text.startswith("0"), len(text)))


def read_percent(place: str, text: str, lowest: int, highest: int) -> int:
    """'25%' → 25."""
    found = re.fullmatch(r"(\d{1,3})%", text, re.ASCII)
    if found is None or not lowest <= int(found[1]) <= highest:
        raise ConfigError(f"{place}={text} is not a share", f"write a whole percentage, {lowest}% … {highest}%")
    return int(found[1])


def read_seconds(text: str) -> float:
    """'5s', '1.5min' or '200ms' → seconds."""
    number, unit = _split_unit(text)
    if number is None or unit not in _SECONDS:
        raise ConfigError(f"{text!r} is not a moment", "write the time since the start, for example 5s, 500ms or 2min")
    return number * _SECONDS[unit]


def _split_unit(text: str) -> tuple[float | None, str]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z/]*)", text.strip(), re.ASCII)
    return (float(found[1]), found[2]) if found else (None, "")


FIELDS = ("nodes", "ranks_per_node", "ranks", "link", "device", "gpu_share", "compute")
TIMED = "PHALANX_TIMED"  # the variable that tells a command in a lab to wait where it would compute
EXAMPLE = "nodes=2,ranks_per_node=2,link=1gbit,device=cpu:1thread"
_FILES = (".yaml", ".yml", ".json")
_DELAYS = ("latency", "delay", "rtt", "jitter")
MOST_NODES, MOST_RANKS = 250, 4096


@dataclass(frozen=True)
class LabSpec:
    """A virtual cluster. Rank r lives on node r // ranks_per_node."""

    nodes: int = 1
    ranks_per_node: int = 1
    link: int | None = None  # bits per second each way between a node and the others; None: as fast as it goes
    threads: int | None = None  # of a CPU rank; None: the cores divided by the ranks
    gpu_share: int | None = None  # percent of one GPU that each rank may use; None: CPU ranks
    timed: bool = False  # whether ranks wait where they would compute

    @classmethod
    def read(cls, text: str) -> LabSpec:
        """From the one-line form, or from the file it names."""
        if text.endswith(_FILES):
            return cls.load(Path(text))
        return cls.take(_split(text))

    @classmethod
    def load(cls, path: Path) -> LabSpec:
        from phalanx.written import read_mapping

        try:
            return cls.take(read_mapping(path))
        except PhalanxError as error:
            raise ConfigError(f"lab: {path}: {error.message.removeprefix('lab: ')}", error.hint) from None

    @classmethod
    def take(cls, fields: Mapping[str, Any]) -> LabSpec:
        """From values by name, each as it would be written in the line."""
        for name in fields:
            _check_name(name)
        given = {name: str(value).strip() for name, value in fields.items()}
        nodes, ranks_per_node = _count_ranks(given)
        threads = _read_device(given["device"], "gpu_share" in given) if "device" in given else None
        spec = cls(
            nodes,
            ranks_per_node,
            link=read_rate("lab: link", given["link"]) if "link" in given else None,
            threads=threads,
            gpu_share=read_percent("lab: gpu_share", given["gpu_share"], 1, 100) if "gpu_share" in given else None,
            timed=_read_compute(given),
        )
        if spec.link is not None and spec.nodes == 1:
            raise ConfigError("lab: link is given, but one node has no links", "write for example nodes=2")
        return spec

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cluster(self) -> Cluster:
        """As planning sees it: a device for every rank. A part of a GPU is planned for as a CPU rank is, by assumed
        figures: what matters in a lab is the network."""
        device = DEVICES["CPU"]
        network = device.network.value if self.link is None else self.link / 8
        given = frozenset({"network"} if self.link is not None else ())
        memory, link = device.memory.value, device.link.value
        return Cluster((Nodes(self.nodes, self.ranks_per_node, device, link, network, memory, given=given),))

    def __str__(self) -> str:
        parts = [f"nodes={self.nodes},ranks_per_node={self.ranks_per_node}"]
        if self.link is not None:
            parts.append(f"link={rate_text(self.link)}")
        if self.threads is not None:
            parts.append(f"device=cpu:{self.threads}thread{'s' if self.threads > 1 else ''}")
        if self.gpu_share is not None:
            parts.append(f"gpu_share={self.gpu_share}%")
        if self.timed:
            parts.append("compute=timed")
        return ",".join(parts)


def _split(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = (part.strip() for part in word.partition("="))
        if not separator or not value:
            raise ConfigError(f"lab: {word!r} is not name=value", f"write for example {EXAMPLE}")
        if name in fields:
            raise ConfigError(f"lab: {name!r} is given twice", "write each field once")
        fields[name] = value
    if not fields:
        raise ConfigError("lab: the description is empty", f"write for example {EXAMPLE}")
    return fields


def _check_name(name: str) -> None:
    if name in _DELAYS:
        raise ConfigError(
            f"lab: {name!r} is not offered: links are limited in rate only (token bucket)",
            "leave it out; a delay needs the netem queue, which many kernels lack",
        )
    if name not in FIELDS:
        raise ConfigError(f"lab: unknown field {name!r}", nearest(name, FIELDS))


def _count_ranks(given: Mapping[str, str]) -> tuple[int, int]:
    """(nodes, ranks per node)."""
    nodes = _read_count("nodes", given.get("nodes", "1"), MOST_NODES)
    if "ranks" not in given:
        return nodes, _read_count("ranks_per_node", given.get("ranks_per_node", "1"), MOST_RANKS // nodes)
    ranks = _read_count("ranks", given["ranks"], MOST_RANKS)
    if "ranks_per_node" in given:
        raise ConfigError("lab: both ranks and ranks_per_node are given", "write one of them")
    if ranks % nodes:
        raise ConfigError(f"lab: ranks={ranks} cannot be spread evenly over nodes={nodes}", "use a multiple of nodes")
    return nodes, ranks // nodes


def _read_count(name: str, text: str, most: int) -> int:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise ConfigError(f"lab: {name}={text} is not a number of {name.split('_')[0]}", f"use 1 … {most}")
    return int(text)


def _read_device(text: str, shares_gpu: bool) -> int | None:
    """Threads of a CPU rank."""
    if shares_gpu:
        raise ConfigError(f"lab: device={text} and gpu_share are both given", "write one of them")
    found = re.fullmatch(r"cpu(?::([1-9]\d{0,2}) ?threads?)?", text, re.ASCII)
    if found is None:
        hint = "write gpu_share=25% for ranks on a GPU" if re.match("gpu|cuda", text) else "write cpu or cpu:1thread"
        raise ConfigError(f"lab: device={text} is not a device of a lab", hint)
    return int(found[1]) if found[1] else None


def _read_compute(given: Mapping[str, str]) -> bool:
    text = given.get("compute", "real")
    if text not in ("real", "timed"):
        raise ConfigError(f"lab: compute={text} is neither real nor timed", "write compute=timed, or leave it out")
    if text == "timed" and "gpu_share" in given:
        raise ConfigError(
            "lab: compute=timed and gpu_share are both given, but a GPU's ranks have it to themselves in parts",
            "leave one of them out",
        )
    return text == "timed"

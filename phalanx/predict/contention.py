"""How fast work gets on beside other work: ranks that share a device, communication beneath computation, transfers that
share a network. Tables from a profile; what they do not say goes on at full speed. Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Work(StrEnum):
    """What occupies a place."""

    COMPUTE = "compute"
    TRANSFER = "transfer"  # a message or collective
    COPY = "copy"  # between a device and its host
    LISTEN = "listen"  # to the next message of a channel, asked for and not begun to come: that takes a part of a GPU


Speeds = tuple[float, ...]  # beside one other, beside two, …; beside more than are listed as beside the last
Place = tuple[str, int]  # a device, or one way of the network of a node
Use = tuple[Place, Work]
DEVICE, OUT, IN = "device", "network out", "network in"


@dataclass(frozen=True)
class Contention:
    """devices: of each rank the one that it computes on. nodes: of each rank its node, where transfers between nodes
    share their networks. beside: how fast work of the first kind gets on, as a share of its speed alone, beside so many
    others of the second kind on one device, where a transfer counts for each rank that takes part."""

    devices: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    beside: Mapping[tuple[Work, Work], Speeds] = field(default_factory=dict[tuple[Work, Work], Speeds])

    @property
    def listening_slows(self) -> bool:
        return (Work.COMPUTE, Work.LISTEN) in self.beside

    @property
    def is_between_ranks(self) -> bool:
        """Whether what one rank does can slow another, so that one pipeline does not stand for all."""
        return len(set(self.devices)) < len(self.devices) or bool(self.nodes)

    def uses(self, rank: int, work: Work) -> tuple[Use, ...]:
        """What a rank's part of some work occupies of devices; nothing where no speed depends on it."""
        matters = self.beside and rank < len(self.devices)
        return (((DEVICE, self.devices[rank]), work),) if matters else ()

    def networks(self, ranks: tuple[int, ...], is_message: bool = False) -> tuple[Use, ...]:
        """What a transfer between ranks occupies besides: the networks of their nodes, where these differ. A message
        goes from the first rank to the second, a collective both ways."""
        nodes = [self.nodes[rank] for rank in ranks] if self.nodes else []
        if len(set(nodes)) < 2:
            return ()
        places = (
            [(OUT, nodes[0]), (IN, nodes[1])] if is_message else [(w, n) for n in sorted(set(nodes)) for w in (OUT, IN)]
        )
        return tuple((place, Work.TRANSFER) for place in places)

    def speed(self, place: Place, work: Work, others: Mapping[Work, int]) -> float:
        """Of work at a place, beside so many others of each kind. A network is divided equally."""
        if place[0] != DEVICE:
            return 1 / (1 + others[Work.TRANSFER])
        found = 1.0
        for other, count in others.items():
            speeds = self.beside.get((work, other))
            if speeds and count:
                found *= speeds[min(count, len(speeds)) - 1]
        return found


ALONE = Contention()

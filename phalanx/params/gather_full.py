"""Whole tensors from what ranks hold of them, one at a time, on rank 0. For export; nobody holds the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.comm.links import Channel, Links
from phalanx.comm.pending import Pending
from phalanx.state.layout import Layout, StateShard
from phalanx.state.reshard import gather_tensors

if TYPE_CHECKING:
    from phalanx.launch.context import RankContext

SLOW_DISK = 3600.0  # seconds: rank 0 may write many tensors there before it asks for the next


class _ToRoot:
    """Messages of other ranks to rank 0."""

    def __init__(self, links: Links, rank: int, world: int) -> None:
        links.open_channels((peer, 0, "f") for peer in range(1, world))
        self._channels: dict[int, Channel] = (
            {0: links.channel(0, "f", "out")} if rank else {p: links.channel(p, "f", "in") for p in range(1, world)}
        )

    def meet(self, device: torch.device) -> None:
        """Until every rank is connected: one that has nothing to send or to wait for would leave while another still
        connects to it, which would take that for a loss."""
        token = torch.zeros(1, device=device)
        for channel in self._channels.values():
            (channel.send if channel.way == "out" else channel.recv)(token).wait("every rank to be connected")

    def send(self, peer: int, tensor: Tensor) -> Pending:
        return self._channels[peer].send(tensor)

    def recv(self, peer: int, tensor: Tensor) -> Pending:
        return self._channels[peer].recv(tensor)


def gather_full(
    layout: Layout, pieces: Iterable[tuple[StateShard, Tensor]], context: RankContext, device: torch.device,
    name: str = "whole", timeout: float = SLOW_DISK,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Every tensor by its name on rank 0; the other ranks must exhaust it too, and get nothing.

    layout: what all ranks hold, which each of them works out for itself; pieces: what this one does. name: of the links
    between them, another one each time; timeout: seconds that a rank waits for another.
    """
    held = list(pieces)
    assert [shard for shard, _ in held] == list(layout.get(context.rank, ())), (
        "this rank holds something else than the layout says"
    )
    if context.world == 1:
        yield from ((shard.name, data.view(shard.shape)) for shard, data in held)
        return
    local = {shard.name: data for shard, data in held}
    # Over a connection of its own: whoever waits in a store keeps a checkpoint that is on its way from asking it.
    context = replace(context, store=context.store.clone())
    with Links(context, timeout=timeout, name=name) as links:
        to_root = _ToRoot(links, context.rank, context.world)
        to_root.meet(device)
        yield from gather_tensors(layout, local, rank=context.rank, transport=to_root, device=device)

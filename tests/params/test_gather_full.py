"""Whole tensors on rank 0: ranks that have nothing to send each other still meet."""

from __future__ import annotations

import time

import torch

from phalanx.comm.links import Channel, Links
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.params.gather_full import gather_full
from phalanx.state.layout import Box, StateShard


def gather_late(context: RankContext) -> tuple[float, float, list[float]]:
    """Both ranks hold the tensor whole; rank 1 is late with what comes after it has connected. When it was, when the
    gathering was over here, and what it gave."""
    connected: list[float] = []
    made = Links.channel

    def channel(*arguments: object) -> Channel:
        found = made(*arguments)  # type: ignore[arg-type]
        time.sleep(0.3 * context.rank)
        connected.append(time.monotonic())
        return found

    Links.channel = channel  # type: ignore[method-assign]
    try:
        shard, data = StateShard("a", (3,), "float32", (Box.whole((3,)),)), torch.arange(3.0)
        whole = dict(gather_full({0: (shard,), 1: (shard,)}, [(shard, data)], context, torch.device("cpu"), "late"))
    finally:
        Links.channel = made
    return connected[0], time.monotonic(), whole["a"].tolist() if whole else []


def test_no_rank_leaves_before_all_are_connected(pool: WorkerPool) -> None:
    (_, left, found), (connected, _, nothing) = pool.run(gather_late, world=2)
    assert left >= connected and found == [0.0, 1.0, 2.0] and nothing == []

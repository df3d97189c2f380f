"""One rank of a side: a process that a lab starts and `peer_workers.py` leads. Not for users.

Arguments: the folder of the leader's socket, and the port at which the side's ranks meet.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from compare import Step
    from compare_setting import Setting
    from peer_workers import Entrant, Order

    from phalanx.launch.context import RankContext
    from phalanx.plan.plan import Plan

CHECKED_STEPS = 2
_DEADLINE = timedelta(seconds=120)


class Member:
    """What one rank answers to its leader's orders."""

    def __init__(self) -> None:
        from phalanx.launch.join import join

        context = join("cuda" if os.environ.get("CUDA_VISIBLE_DEVICES", "0") else "cpu")
        assert context is not None, "a lab starts this"
        self.context: RankContext = context

    def build(self, entrant: Entrant, setting: Setting, plan: Plan) -> list[float]:
        """The losses of the first steps."""
        import torch.distributed as dist

        store = dist.PrefixStore("torch", self.context.store.for_torch)
        backend = "gloo" if self.context.device == "cpu" else "nccl"
        dist.init_process_group(
            backend, store=store, rank=self.context.rank, world_size=self.context.world, timeout=_DEADLINE
        )
        module, _, name = entrant.build.rpartition(".")
        function = getattr(importlib.import_module(module), name)
        self._step: Step = function(self.context, setting, plan, **entrant.options)
        losses = [self._step()() for _ in range(CHECKED_STEPS)]
        self._forget_peak()
        return losses

    def steps(self, number: int) -> tuple[float, float]:
        self._meet()
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(number):
            self._step()
        self._synchronise()
        return (time.perf_counter() - began) / number, (time.process_time() - worked) / number

    def rest(self) -> None:
        """Gives memory that it does not hold tensors in to others, until its next step."""
        import torch

        self._synchronise()
        torch.cuda.empty_cache()

    def peak(self) -> int:
        """Bytes since the first steps: of the device's memory, on CPUs of the whole process."""
        import torch

        if self.context.device != "cpu":
            return torch.cuda.max_memory_allocated()
        status = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))

    def _forget_peak(self) -> None:
        """Weights were copied while building, which no training would do."""
        import torch

        gc.collect()
        if self.context.device != "cpu":
            return torch.cuda.reset_peak_memory_stats()
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")

    def _meet(self) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1, device=self.context.device))
        self._synchronise()

    def _synchronise(self) -> None:
        import torch

        if self.context.device != "cpu":
            torch.cuda.synchronize()


def serve(connection: Connection) -> None:
    """Until the leader has gone, or something went wrong."""
    member: Member | None = None
    while True:
        try:
            order: Order = connection.recv()
        except EOFError:
            return
        try:
            member = member or Member()
            connection.send((True, getattr(member, order.name)(*order.arguments)))
        except Exception as error:
            connection.send((False, in_one_line(error)))
            raise


def in_one_line(error: BaseException) -> str:
    lines: list[Any] = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


if __name__ == "__main__":
    folder, port = Path(sys.argv[1]), sys.argv[2]
    os.environ["MASTER_PORT"] = port
    output = os.open(folder / f"rank-{os.environ['RANK']}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    with Client(str(folder / "leader"), family="AF_UNIX") as leader:
        leader.send(int(os.environ["RANK"]))
        serve(leader)

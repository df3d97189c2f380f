"""What ranks are asked to do in tests of measured timelines."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from phalanx.comm.links import Links
from phalanx.engine import measured
from phalanx.launch.context import RankContext
from phalanx.plan.plan import Plan
from phalanx.predict.timeline import Timeline
from phalanx.program.instructions import from_text
from phalanx.program.shape import ModelShape


def gather_from_another_machine(context: RankContext, ahead: float) -> Timeline | None:
    """Both ranks do something at the same time, but the clock of rank 1, which is on another machine, is ahead."""
    if context.rank == 0:
        return _gathered(context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead))
        return _gathered(replace(context, node=1))


def _gathered(context: RankContext) -> Timeline | None:
    recorder = measured.Recorder(
        Plan(dp=2, stages=(1,)), ModelShape(1, (), (True,), (True,)), context.rank, torch.device("cpu")
    )
    with Links(context, timeout=20) as links:
        world = links.group((0, 1))
        world.barrier().wait()
        for instruction in from_text("COUNT F0.0/0"):
            recorder.begin(instruction)
            recorder.ready(instruction)
            recorder.end(instruction)
        return measured.gather(recorder.timeline(), context, world, timeout=20)

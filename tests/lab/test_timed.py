"""Waits that stand for computation take as long as they are told, and leave tensors of the true shapes."""

from __future__ import annotations

import time

import pytest
import torch

from phalanx.lab.rehearsal import TimedCompute, wait_until
from phalanx.model.segment.joint import Outline
from phalanx.program.instructions import Op
from phalanx.runtime.micro_batch import MicroBatch, StageRun

WAITS = {Op.F: (0.004, 0.002), Op.B: (0.003, 0.003), Op.W: (0.002, 0.002), Op.BW: (0.005, 0.005)}


class Block:
    """Block `number` turns one wire into the next and has two parameters."""

    def __init__(self, number: int) -> None:
        self.outputs = (f"wire{number + 1}",)
        self._names = {"wire": (f"wire{number}",), "parameter": ("weight", "bias")}

    def names(self, kind: str) -> tuple[str, ...]:
        return self._names[kind]


class Blocks:
    blocks = (Block(0), Block(1))


class Looks:
    """What a timed computation asks of the real one."""

    blocks, device = Blocks(), torch.device("cpu")

    def outlines(self, number: int, batch: MicroBatch, run: StageRun, parameters: object) -> tuple[Outline, ...]:
        return (Outline((2, 3 + number), torch.float64, True),)


@pytest.fixture
def run() -> StageRun:
    return StageRun(wires={"wire0": torch.ones(2, 2)}, differentiable={"wire0": True})


@pytest.fixture
def compute() -> TimedCompute:
    return TimedCompute(Looks(), {}, WAITS)  # type: ignore[arg-type]


def batch() -> MicroBatch:
    return MicroBatch({}, torch.zeros(1), {})


def test_a_pass_to_and_fro_leaves_tensors_of_the_true_shapes(compute: TimedCompute, run: StageRun) -> None:
    for number in (0, 1):
        compute.forward(number, batch(), run, keep=True)
    assert (run.wires["wire2"].shape, run.wires["wire2"].dtype) == ((2, 4), torch.float64)
    run.gradients["wire2"] = torch.zeros(2, 4)
    compute.backward(1, run)
    assert compute.weight(1, run) == [None, None]
    assert run.gradients.keys() == {"wire1"} and run.gradients["wire1"].shape == (2, 3)
    assert compute.backward_weight(0, run) == [None, None]
    assert run.gradients.keys() == {"wire0"} and run.gradients["wire0"].shape == (2, 2)


def test_what_needs_no_gradient_gets_none(compute: TimedCompute, run: StageRun) -> None:
    run.differentiable["wire0"] = False
    compute.forward(0, batch(), run, keep=True)
    compute.backward_weight(0, run)
    assert not run.gradients


def test_every_operation_takes_its_own_time(compute: TimedCompute, run: StageRun) -> None:
    calls = {
        Op.F: lambda: compute.forward(0, batch(), run, keep=True),
        Op.B: lambda: compute.backward(0, run),
        Op.W: lambda: compute.weight(0, run),
    }
    for op, call in calls.items():
        begin = time.perf_counter()
        call()
        assert time.perf_counter() - begin >= WAITS[op][0]


def test_a_wait_never_ends_early_and_one_for_the_past_ends_at_once() -> None:
    moment = time.perf_counter() + 0.003
    wait_until(moment)
    assert time.perf_counter() >= moment
    begin = time.perf_counter()
    wait_until(begin - 100)
    assert time.perf_counter() - begin < 1

"""Waits that stand for computation take as long as they are told, and leave tensors of the true shapes."""

from __future__ import annotations

import time

from phalanx.lab.rehearsal import replace_compute, wait_until
from phalanx.program.instructions import COMPUTE, Op
from tests import captured

SECONDS = {Op.F: 0.004, Op.B: 0.003, Op.W: 0.002, Op.BW: 0.005, Op.A: 0.001}


def test_every_operation_takes_its_own_time_and_gives_zeros_of_the_true_shapes() -> None:
    case = captured.named(captured.GPT2)
    session = case.session("mb=2,schedule=zb-h1")
    engine, blocks = session.step.engine, len(case.blocks.blocks)
    replace_compute(engine, {op: (seconds,) * blocks for op, seconds in SECONDS.items()})
    took: dict[Op, list[float]] = {op: [] for op in COMPUTE}

    class Watch:
        def begin(self, instruction) -> None: ...

        def ready(self, instruction) -> None:
            self.since = time.perf_counter()

        def end(self, instruction) -> None:
            if instruction.op in COMPUTE:
                took[instruction.op].append(time.perf_counter() - self.since)

    engine.watches.append(Watch())
    step = session.step.begin(case.batch, 0, 0.0)
    engine.run(session.step.program, step, until=Op.STEP)
    assert {op: len(seconds) for op, seconds in took.items() if seconds} == {
        Op.F: 2 * blocks,
        Op.B: 2 * blocks,
        Op.W: 2 * blocks,
    }
    assert all(seconds >= SECONDS[op] for op in took for seconds in took[op])
    assert step.loss == 0 and step.gradients == {}
    captured.require_released(step)


def test_a_wait_never_ends_early_and_one_for_the_past_ends_at_once() -> None:
    moment = time.perf_counter() + 0.003
    wait_until(moment)
    assert time.perf_counter() >= moment
    begin = time.perf_counter()
    wait_until(begin - 100)
    assert time.perf_counter() - begin < 1

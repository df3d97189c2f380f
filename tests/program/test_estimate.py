"""The closed forms of planning beside the simulation of the programs they stand for."""

from __future__ import annotations

import pytest

from phalanx.plan.cost import Seconds, Software
from phalanx.plan.estimate import Place, step_parts
from phalanx.plan.plan import Plan
from phalanx.program.compile import compile_plan
from phalanx.program.costs import uniform
from phalanx.program.shape import ModelShape
from phalanx.program.simulate import simulate

BLOCKS = 12
SHAPE = ModelShape(BLOCKS, (), (True,) * BLOCKS, (True,) * BLOCKS)


@pytest.mark.parametrize("message", [0.0, 0.5])
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule, v", [("1f1b", 1), ("eager-1f1b", 1), ("zb-h1", 1), ("interleaved", 3)])
def test_a_step_of_equal_stages_takes_what_its_simulation_does(schedule: str, v: int, pp: int, message: float) -> None:
    for mb in (pp, 3 * pp):
        plan = Plan(pp=pp, mb=mb, schedule=schedule, v=v, stages=(BLOCKS // pp // v,) * (pp * v))
        simulated = simulate(compile_plan(plan, SHAPE), uniform(SHAPE, 1, 1, 1, send=message)).makespan
        place = Place(Seconds(BLOCKS / pp, BLOCKS / pp, BLOCKS / pp, 0, 0), 0, 0, 0, 0)
        parts = step_parts(plan, [place] * pp, message, Software(step=0.0, micro_batch=0.0))
        assert sum(parts.values()) == pytest.approx(simulated, rel=0.03)

"""Training in float16: the scale of the loss falls on overflow and grows again, and all ranks agree on what to skip."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.capture import capture
from phalanx.model.zoo.zoo import resolve
from phalanx.params.loss_scale import INITIAL, LossScale
from phalanx.plan.complete import complete
from phalanx.tasks.custom import infer_inputs
from tests.engine import rank_jobs
from tests.run_helpers import HALF, short_run

GOOD, OVERFLOW = torch.tensor(True), torch.tensor(False)


def values(scale: LossScale, *outcomes: torch.Tensor) -> list[float]:
    found: list[float] = []
    for finite in outcomes:
        scale.update(finite)
        found.append(scale.value.item())
    return found


def test_an_overflow_halves_the_scale_and_it_never_falls_below_one() -> None:
    assert values(LossScale(torch.device("cpu"), initial=4.0), *[OVERFLOW] * 4) == [2, 1, 1, 1]


def test_it_doubles_after_as_many_good_steps_in_a_row_as_the_interval_says() -> None:
    scale = LossScale(torch.device("cpu"), initial=8.0, interval=3)
    assert values(scale, GOOD, GOOD, OVERFLOW, GOOD, GOOD, GOOD, GOOD) == [8, 8, 4, 4, 4, 8, 8]


def test_its_state_comes_back() -> None:
    first, second = (LossScale(torch.device("cpu"), interval=3) for _ in range(2))
    values(first, OVERFLOW, GOOD, GOOD)
    second.load(first.state())
    assert values(first, GOOD) == values(second, GOOD) == [INITIAL]


def test_a_tiny_model_learns_in_float16(tmp_path: Path) -> None:
    options = {**HALF, "dtype": "float16", "steps": 20, "lr": 1e-2, "export": False}
    result = short_run("phalanx-demo", "synthetic:4", tmp_path, **options)
    assert all(map(math.isfinite, result.losses))
    assert result.losses[-1] < 0.8 * result.losses[0]
    assert result.skipped < 5


def test_an_overflow_on_one_rank_skips_the_step_on_both(pool: WorkerPool) -> None:
    torch.manual_seed(0)
    module = rank_jobs.Stack()
    inputs = infer_inputs({"x": torch.ones(4, 4), "y": torch.ones(4)})
    captured = capture(resolve(module), inputs, dtype=torch.float16, check=False, use_cache=False)
    plan = complete("pp=2,mb=1", world=2, batch_size=4, costs=[1.0] * 4).plan
    initial = {name: parameter.detach() for name, parameter in module.named_parameters()}
    first, last = pool.run(rank_jobs.half_steps, captured, plan, initial, (1.0, 3e4, 1.0), world=2)
    # The large input meets the weights of the first stage only.
    assert [step.finite_here for step in first] == [True, False, True]
    assert [step.finite_here for step in last] == [True, True, True]
    for steps in (first, last):
        assert [step.changed for step in steps] == [True, False, True]
        assert [step.scale for step in steps] == [INITIAL, INITIAL / 2, INITIAL / 2]

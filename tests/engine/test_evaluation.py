"""The evaluation loss is that of the plain model under every plan, however samples fall on replicas."""

from __future__ import annotations

import pytest
import torch

from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model import reference
from tests import captured
from tests.engine import rank_jobs

long = pytest.mark.long
SAMPLES, COUNTS = 7, (7, 5, 4, 1)  # in micro-batches of two: a short last one, one replica without its last, one alone


@pytest.fixture(scope="module")
def case() -> captured.Case:
    """Padded, so that samples hold different numbers of items; with dropout, which evaluation must not use."""
    return captured.named(captured.GPT2, samples=SAMPLES, padding=True)


@pytest.fixture(scope="module")
def expected(case: captured.Case) -> list[float]:
    losses: list[float] = []
    with captured.evaluating(case.model), torch.no_grad(), reference.Widen():
        for count in COUNTS:
            losses.append(reference.loss(case.model, {name: t[:count] for name, t in case.raw.items()}).item())
    return losses


def test_one_rank_gives_the_loss_of_the_model_in_eval_mode(case: captured.Case, expected: list[float]) -> None:
    assert rank_jobs.evaluate(RankContext.alone(), case, "mb=4", COUNTS) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2,dp=2,mb=2",
        pytest.param("dp=2,mb=2,zero=3", marks=long),
        pytest.param("pp=2,mb=4,schedule=zb-v", marks=long),
        "tp=2,mb=4",
    ],
)
def test_all_ranks_get_the_same_loss_under_every_plan(
    plan: str, pool: WorkerPool, case: captured.Case, expected: list[float]
) -> None:
    world = 4 if "pp=2,dp=2" in plan else 2
    for losses in pool.run(rank_jobs.evaluate, case, plan, COUNTS, world=world):
        assert losses == pytest.approx(expected, rel=1e-11)

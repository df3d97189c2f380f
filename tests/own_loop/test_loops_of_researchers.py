"""Loops as researchers write them, with more than a loss and a step, are equal to the plain ones under every plan."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.own_loop.session import OwnSession
from tests.own_loop import loops
from tests.own_loop.jobs import Trained, both, net, numbers, opened

PIPELINE, SPLIT, SHARDED, REPLICAS = "pp=2,mb=2", "tp=2", "dp=2,zero=3,mb=2", "dp=2"
QUICK = {("frozen_on_the_way", PIPELINE), ("overflows_in_one_place", PIPELINE), ("probed", PIPELINE)}
QUICK |= {("probed", SHARDED)}  # in which one bucket is reduced twice in a row
REFUSED = {("searched_along_lines", plan) for plan in (PIPELINE, SHARDED)}
REFUSED |= {("siamese", plan) for plan in (PIPELINE, SHARDED)}
CASES = [
    pytest.param(loop, plan, marks=[] if (loop, plan) in QUICK else pytest.mark.long)
    for loop in loops.LOOPS
    for plan in (PIPELINE, SPLIT, SHARDED)
    if (loop, plan) not in REFUSED
] + [pytest.param("searched_along_lines", REPLICAS, marks=pytest.mark.long)]


def require_equal(found: list[Trained], expected: Trained) -> None:
    for rank in found:
        torch.testing.assert_close(rank.losses, expected.losses, rtol=1e-9, atol=1e-11, equal_nan=True)
    for name, value in expected.values.items():
        torch.testing.assert_close(found[0].values[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(("loop", "plan"), CASES)
def test_a_loop_is_equal_to_the_plain_one(pool: WorkerPool, tmp_path: Path, loop: str, plan: str) -> None:
    folders = [tmp_path / "plain", tmp_path / "planned"] if loop == "rolled_back" else []
    for folder in folders:
        folder.mkdir()
    found = pool.run(loops.planned, plan, loop, *folders[1:], world=2)
    require_equal(found, loops.plain(loop, *folders[:1]))


@pytest.mark.long
@pytest.mark.parametrize(
    ("loop", "plan", "message", "hint"),
    [
        ("searched_along_lines", PIPELINE, "LBFGS looks at all parameters together", "use replicas alone"),
        ("searched_along_lines", SHARDED, "LBFGS looks at all parameters together", "use replicas alone"),
        ("siamese", PIPELINE, "called again before the backward", "both batches in one call"),
    ],
)
def test_a_loop_that_a_plan_cannot_follow_is_refused(
    pool: WorkerPool, loop: str, plan: str, message: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        pool.run(loops.planned, plan, loop, world=2)
    assert hint in caught.value.hint


X = numbers(0)[0]


@pytest.fixture(scope="module")
def outer() -> OwnSession:
    return opened(RankContext.alone(), net(), "mb=2", X, loss="outer")


def to_its_inputs(session: OwnSession) -> None:
    session(X.clone().requires_grad_())


def twice_over_one_call(session: OwnSession) -> None:
    logits, hidden = session(X)
    logits.sum().backward(retain_graph=True)
    hidden.sum().backward()


def under_autocast(session: OwnSession) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        session(X)


@pytest.mark.parametrize(
    ("does", "message", "hint"),
    [
        (to_its_inputs, "input 'x' of a batch requires a gradient, and none comes back", "x.detach()"),
        (twice_over_one_call, "backward() came a second time", "add the losses up"),
        (under_autocast, "called under torch.autocast", "dtype='bfloat16'"),
        (copy.deepcopy, "a session cannot be copied or pickled", "session.parameters()"),
    ],
)
def test_what_would_silently_be_another_loop_is_refused(outer: OwnSession, does: Any, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        does(outer)
    assert message in str(caught.value) and hint in caught.value.hint


def test_weights_are_what_they_became_where_a_closure_asks_for_gradients() -> None:
    """In half precision the model computes with copies of them."""
    x, target = numbers(0)
    batch = x.float(), target
    session = opened(RankContext.alone(), net().float(), "", batch, loss=both, dtype="bfloat16")
    seen: list[Tensor] = []

    class Moves(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            seen.append(closure())
            with torch.no_grad():
                torch._foreach_mul_(self.param_groups[0]["params"], 0.5)
            seen.append(closure())

    Moves(session.parameters(), {}).step(lambda: session.forward_backward(batch))
    assert not torch.equal(*seen)

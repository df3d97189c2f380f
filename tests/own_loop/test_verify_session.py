"""`phalanx.verify` of a session, in the middle of a loop: the loss and every gradient against the plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx.errors import ConfigError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.own_loop import session as own_session
from phalanx.own_loop.gradients import taken
from phalanx.params.groups import ParameterGroup
from tests.own_loop.jobs import both, llama, net, numbers, opened, verified, words


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        ("mb=2", "function"),
        pytest.param("mb=2", "language", marks=pytest.mark.long),
        ("mb=2", "outer"),
        ("pp=2,mb=2", "language"),
        pytest.param("tp=2,mb=2", "language", marks=pytest.mark.long),
        pytest.param("dp=2,zero=3,mb=2", "function", marks=pytest.mark.long),
        pytest.param("pp=2,dp=2,zero=1,mb=2", "outer", marks=pytest.mark.long),
    ],
)
def test_a_session_in_the_middle_of_its_loop_is_exact_and_goes_on(pool: WorkerPool, plan: str, kind: str) -> None:
    world = phalanx.Plan.parse(plan).world
    reports = pool.run(verified, plan, kind, world=world) if world > 1 else [verified(RankContext.alone(), plan, kind)]
    assert all(report.ok for report in reports), reports[0].failures
    first = reports[0]
    assert [(row.step, row.quantity) for row in first.rows] == [
        (1, "loss"), (1, "gradient"), (2, "loss"), (2, "gradient"),
    ]  # fmt: skip
    assert first.worst("gradient").compared == (12 if kind != "language" else 38)
    assert all(report.rows == first.rows for report in reports), "all ranks get the same"


def test_a_gradient_that_is_wrong_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> dict[str, torch.Tensor]:
        found = taken(*given)
        found["layers.1.weight"][0, 0] *= 1 + 1e-6
        return found

    monkeypatch.setattr(own_session, "taken", wrong)
    with opened(RankContext.alone(), net(), "mb=2", numbers(0), loss=both) as session:
        report = phalanx.verify(session, data=[numbers(0)])
    assert not report.ok and "gradient 'layers.1.weight' is off by" in report.failures[0]


def test_dropout_is_compared_and_the_users_module_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)).double()
    values = {name: value.clone() for name, value in module.state_dict().items()}
    with phalanx.open(
        module, example=numbers(0), loss=nn.functional.cross_entropy, dtype="float64", plan="mb=2", device="cpu"
    ) as session:
        optimizer = torch.optim.SGD(session.parameters(), lr=0.1)
        session.forward_backward(numbers(0))
        optimizer.step()
        report = phalanx.verify(session, data=[numbers(1)])
    assert report.ok, report.failures
    assert all(torch.equal(value, values[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_of_frozen_parameters_and_beside_adapters_what_is_trained_is_compared() -> None:
    with opened(
        RankContext.alone(), net(), "mb=2", numbers(0), loss=both, groups=[ParameterGroup("layers.*", freeze=True)]
    ) as session:
        report = phalanx.verify(session, data=[numbers(1)])
    assert report.ok and report.worst("gradient").compared == 6
    with opened(RankContext.alone(), llama(), "mb=2", words(0), lora="r=2,targets=q_proj+v_proj") as session:
        report = phalanx.verify(session, data=[words(1)])
    assert report.ok and report.worst("gradient").compared == 16


@pytest.mark.parametrize(
    ("opening", "options", "message", "hint"),
    [
        ({}, {"data": []}, "none is given", "give data=[batch]"),
        ({}, {"data": [numbers(0)], "loss": both}, "computes its loss itself", "leave loss out"),
        ({}, {"data": [numbers(0)], "plan": "mb=4"}, "plan = 'mb=4' is the session's own", "open a session with it"),
        ({}, {"data": [numbers(0)], "tiny": True}, "option 'tiny' is the session's own", "open a session with it"),
        ({"dtype": "bfloat16"}, {"data": [numbers(0)]}, "computes in bfloat16", "float64 or float32"),
        ({"loss": "outer"}, {"data": [numbers(0)]}, "opened for a loss outside", "loss=function"),
        (
            {"loss": "outer", "outputs": "replica"}, {"data": [numbers(0)], "loss": both},
            "outputs = 'replica' gives each replica its own samples", "outputs='whole'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_says_why(
    opening: dict[str, Any], options: dict[str, Any], message: str, hint: str
) -> None:
    x, target = numbers(0)
    x = x if "dtype" not in opening else x.float()
    example = x if opening.get("loss") == "outer" else (x, target)
    with (
        opened(RankContext.alone(), net(), "mb=2", example, **{"loss": both, **opening}) as session,
        pytest.raises(ConfigError) as error,
    ):
        phalanx.verify(session, **options)
    assert message in error.value.message and hint in error.value.hint

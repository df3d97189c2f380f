"""What a loop of one's own does wrong gets a message that says what, where, and what to do."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import phalanx
from phalanx.errors import CheckpointError, ConfigError, DataError, PhalanxError, PlanError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.own_loop.session import OwnSession
from tests.own_loop import jobs
from tests.own_loop.jobs import both, net, numbers, opened

X, TARGET = numbers(0)
NAMED = {"x": X, "target": TARGET}


@cache
def session() -> OwnSession:
    return opened(RankContext.alone(), net(), "", numbers(0), loss=both)


@cache
def outer_session() -> OwnSession:
    return opened(RankContext.alone(), net(), "mb=2", numbers(0)[0], loss="outer")


def open_net(**options: Any) -> OwnSession:
    return phalanx.open(
        **{"model": net(), "example": numbers(0), "loss": both, "dtype": "float64", "device": "cpu", **options}
    )


class OwnWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output[0], target, self.weight)


class CountsToo(nn.Module):
    """One of whose outputs is no tensor of numbers with a row for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x)
        return logits, logits.argmax(-1)


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"plan": "pp=2"}, "plan pp=2 needs 2 ranks, and this process was started alone", "phalanx launch --ranks 2"),
        ({"plan": "auto"}, "a loop of your own has no search for a plan", "phalanx plan --out plan.json"),
        ({"epochs": 3}, "option 'epochs' is for phalanx.train", ""),
        ({"learning_rate": 3}, "unknown option 'learning_rate'", "here it is lr"),
        ({"dtpye": "float64"}, "unknown option 'dtpye'", "did you mean 'dtype'"),
        ({"lr": 0.1}, "option lr = 0.1 does nothing: the session has no optimizer of its own", "optimizer='adamw'"),
        ({"loss": "cross_entropy"}, "loss = 'cross_entropy' is not a function", "'outer'"),
        ({"loss": OwnWeights()}, "loss OwnWeights has parameters of its own", "a part of the model"),
        ({"loss": lambda output: output}, "the loss function takes output and nothing besides", "labels"),
        ({"outputs": "replica"}, "outputs = 'replica' does nothing without loss='outer'", "leave outputs out"),
        ({"example": {}}, "a batch is an empty dict", "by name"),
        ({"example": 3}, "a batch is a int", "a dict of tensors"),
        ({"example": (numbers(0)[0], [1, 2])}, "'target' in a batch is a list", "first dim is the sample"),
        ({"example": (*numbers(0), numbers(0)[1])}, "a batch holds 3 tensors without names", "forward takes x"),
        ({"example": (numbers(0)[0], numbers(0)[1][:3])}, "differ in their number of samples", "first dim"),
        ({"example": {"x": numbers(0)[0]}}, "the loss gets nothing but the outputs of Net", "target"),
        ({"dims": {"y": ("batch",)}}, "dims: the batch holds no 'y'", "x, target"),
        ({"dims": {"x": ("batch", "words")}}, r"dims: 'x' of shape \[batch, 6\] is not", "tokens or source"),
        ({"groups": ["head.*:lr=fast"]}, "'fast' is not a number", "PATTERN:lr=FACTOR"),
        ({"loss": "outer", "example": NAMED}, "forward of Net does not take target", "labels are for the loss"),
        ({"loss": "outer", "example": X, "plan": "mb=2,slices=2"}, "slices do not leave", "as a function"),
        ({"loss": "outer", "example": X, "plan": "mb=2,schedule=1f1b"}, "before the first backward", "gpipe"),
        (
            {"loss": "outer", "example": X, "model": CountsToo()},
            "output 1 of CountsToo cannot leave", "floating-point tensor",
        ),
    ],
)  # fmt: skip
def test_a_session_that_cannot_be_opened_says_why(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(PhalanxError, match=message) as info:
        open_net(**options)
    assert hint in str(info.value)


def test_a_step_needs_an_optimizer_and_gradients() -> None:
    own = session()
    with pytest.raises(ConfigError, match=r"session.step\(\) has no optimizer") as info:
        own.step()
    assert "make your own of session.parameters()" in info.value.hint
    with pytest.raises(ConfigError, match="found no gradients") as info:
        own.clip_grad_norm_(1.0)
    assert "session.forward_backward(batch)" in info.value.hint
    own.optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"session.step\(\) found no gradients"):
        own.step()
    with pytest.raises(ConfigError, match="SGD updates no parameter of this session"):
        own.optimizer = torch.optim.SGD([torch.zeros(3)], lr=0.1)
    with pytest.raises(ConfigError, match=r"session.optimizer = None is no optimizer(.|\n)*make one of"):
        own.optimizer = None
    with pytest.raises(ConfigError, match=r"no parameter 'head.bais'(.|\n)*did you mean 'head.bias'"):
        own.whole_shape("head.bais")


def test_outputs_leave_only_a_session_that_was_opened_for_it() -> None:
    with pytest.raises(ConfigError, match="no outputs leave it") as info:
        session()(numbers(0)[0])
    assert "loss='outer'" in info.value.hint
    for call in (outer_session().forward_backward, outer_session().evaluate):
        with pytest.raises(ConfigError, match="loss outside"):
            call(numbers(0)[0])


def test_a_batch_is_what_the_session_was_opened_for() -> None:
    with pytest.raises(DataError, match=r"input 'x' has shape \[8, 5\], but the model was captured for \[batch, 6\]"):
        session().forward_backward((torch.zeros(8, 5), numbers(0)[1]))
    with pytest.raises(DataError, match="a batch holds target, y"):
        session().forward_backward({"y": numbers(0)[0], "target": numbers(0)[1]})
    own = opened(RankContext.alone(), net(), "mb=2", numbers(0), loss=both)
    with own, pytest.raises(DataError, match="a batch holds x, but the model was captured with target, x"):
        own.forward_backward({"x": numbers(0)[0]})


def test_a_checkpoint_of_another_model_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be used"):
        session().load(tmp_path / "none")
    other = opened(RankContext.alone(), CountsToo().double(), "", numbers(0), loss=_first)
    other.save(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"holds no tensor 'first\.weight'"):
        session().load(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file is no folder: "):
        session().load(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"session\.save: keep = 0 would leave no checkpoint"):
        session().save(tmp_path, keep=0)


def test_the_state_of_an_optimizer_is_neither_lost_nor_taken_for_anothers(tmp_path: Path) -> None:
    with opened(RankContext.alone(), net(), "", numbers(0), loss=both) as own:
        torch.optim.AdamW(own.parameters(), lr=0.1)  # which nobody has said is the one that updates
        own.save(tmp_path / "new")
        optimizer = own.optimizer = torch.optim.SGD(own.parameters(), lr=0.7)
        own.load(tmp_path / "new")
        assert optimizer.param_groups[0]["lr"] == 0.7  # nothing was saved of an optimizer
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.1)
        own.forward_backward(numbers(0))
        optimizer.step()
        own.save(tmp_path)
    with opened(RankContext.alone(), net(), "", numbers(0), loss=both) as own:
        with pytest.raises(ConfigError, match="state of an optimizer, and this session knows of none yet") as info:
            own.load(tmp_path)
        assert "session.optimizer = optimizer" in info.value.hint
        own.load(tmp_path, weights_only=True)
        assert own.steps == 1
        own.optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(ConfigError, match="holds the state of AdamW, and SGD updates here"):
            own.load(tmp_path)
        optimizer = own.optimizer = torch.optim.AdamW([{"params": [each]} for each in own.parameters()], lr=0.1)
        with pytest.raises(ConfigError, match="holds 1 parameter group of an optimizer, and AdamW has 12 here"):
            own.load(tmp_path)
        own.load(tmp_path, weights_only=True)
        assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.state


def test_a_closed_session_computes_nothing_more() -> None:
    own = opened(RankContext.alone(), net(), "", numbers(0), loss=both)
    own.close()
    for call in (own.forward_backward, own.evaluate):
        with pytest.raises(ConfigError, match="this session is closed and computes no batch"):
            call(numbers(0))


def test_gradients_that_a_factor_makes_infinite_change_nothing() -> None:
    with opened(RankContext.alone(), net(), "", numbers(0), loss=both, has_optimizer=True) as own:
        before = own.state_dict()
        own.forward_backward(numbers(0), scale=float("inf"))
        assert not own.step()
        assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())


def _first(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target)


def test_samples_that_depend_on_each_other_are_refused_where_the_plan_cuts_the_batch() -> None:
    with pytest.raises(PlanError, match=r"micro-batches or replicas \(plan mb=2\) would change the result"):
        opened(RankContext.alone(), net(), "mb=2", numbers(0), loss=jobs.contrastive)


@pytest.mark.long
def test_an_optimizer_of_whole_matrices_is_refused_where_they_are_split(pool: WorkerPool) -> None:
    with pytest.raises(ConfigError, match="optimizer Adafactor does not update each element by itself"):
        pool.run(jobs.adafactor, "dp=2,zero=1", world=2)


@pytest.mark.long
def test_a_pipeline_takes_the_next_batch_after_the_backward_of_the_last(pool: WorkerPool) -> None:
    with pytest.raises(ConfigError, match="called again before the backward of the call before"):
        pool.run(jobs.two_forwards, "pp=2", world=2)


def test_state_on_the_host_is_not_for_loops_of_ones_own() -> None:
    with pytest.raises(PlanError, match="offload=optimizer keeps on the host what an optimizer of your own") as caught:
        open_net(plan="mb=2,offload=activations+optimizer:0.5")
    assert "leave the optimizer out of offload" in caught.value.hint and "session.step()" in caught.value.hint
    with pytest.raises(PlanError, match="offload=parameters keeps on the host what an optimizer of your own") as caught:
        open_net(plan="mb=2,offload=parameters:1")
    assert "leave parameters out of offload" in caught.value.hint


@pytest.mark.long
def test_outputs_that_would_be_split_otherwise_than_for_the_loss_are_refused(pool: WorkerPool) -> None:
    with pytest.raises(
        PlanError, match="plan tp=2 keeps parameters elsewhere where the model's outputs leave"
    ) as caught:
        pool.run(jobs.looked_at_fused, "tp=2", world=2)
    assert "choose tp=1" in caught.value.hint


@cache
def hosted_session() -> OwnSession:
    return opened(
        RankContext.alone(), net(), "mb=2,offload=optimizer", numbers(0), loss=both, has_optimizer=True,
        optimizer="adamw", lr=0.1,
    )  # fmt: skip


def accumulates() -> None:
    hosted_session().zero_grad()
    hosted_session().forward_backward(numbers(0))
    hosted_session().forward_backward(numbers(0))


def scales() -> None:
    hosted_session().zero_grad()
    hosted_session().forward_backward(numbers(0), scale=0.5)


def freezes() -> None:
    session = hosted_session()
    session.zero_grad()
    weight = next(iter(session.parameters())).requires_grad_(False)
    try:
        session.forward_backward(numbers(0))
    finally:
        weight.requires_grad_(True)


def steps_itself() -> None:
    optimizer = hosted_session().optimizer
    assert optimizer is not None
    optimizer.step()


def brings_its_own() -> None:
    hosted_session().optimizer = torch.optim.SGD(hosted_session().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("does", "message", "hint"),
    [
        (accumulates, "where gradients of several batches do not add up", "call session.step() after every batch"),
        (scales, "scale = 0.5, where the plan keeps the optimizer's state on the host", "leave scale out"),
        (freezes, "first.weight was frozen by requires_grad_(False), where the plan", "freeze it from the beginning"),
        (steps_itself, "the optimizer of this session was asked for a step", "call session.step()"),
        (brings_its_own, "SGD: plan mb=2,offload=optimizer keeps the optimizer's state on the host", "optimizer=its"),
    ],
)
def test_a_session_whose_optimizer_is_on_the_host(does: Any, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        does()
    assert message in str(error.value) and hint in str(error.value)

"""A loop of one's own is equal to the plain one under every plan: losses, norms and every trained value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model import reference
from tests.own_loop import jobs
from tests.own_loop.jobs import LR, Trained, both, contrastive, is_vector, llama, net, numbers, words


def require_equal(found: Trained, losses: list[float], model: nn.Module) -> None:
    torch.testing.assert_close(found.losses, losses, rtol=1e-9, atol=1e-12)
    expected = model.state_dict()
    assert found.values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-9, atol=1e-11, msg=name)


def run(pool: WorkerPool, world: int, job: Any, *arguments: Any) -> Trained:
    """All ranks know the same losses, and rank 0 has the model."""
    if world == 1:
        return job(RankContext.alone(), *arguments)
    first, *others = pool.run(job, *arguments, world=world)
    assert all(other.losses == first.losses and not other.values for other in others)
    return first


def widened(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss, without the casts to float32 that HuggingFace's models carry inside."""
    with reference.default_dtype(torch.float64), reference.Widen():
        return model(**batch).loss


def plain_adamw(language: bool, steps: int = 3) -> tuple[list[float], nn.Module]:
    model = llama() if language else net()

    def loss_of(number: int) -> Tensor:
        if language:
            return widened(model, words(number))
        x, target = numbers(number)
        return both(model(x), target)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(2 * step + part)
            (0.5 * loss).backward()
            losses.append(float(loss.detach()))
        losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        losses.append(float(loss_of(100)))
    return losses, model


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (1, "mb=2"),
        (2, "pp=2,mb=4"),
        (2, "dp=2,zero=2,mb=2"),
        pytest.param(2, "tp=2,mb=2", marks=pytest.mark.long),
        pytest.param(2, "dp=2,zero=1", marks=pytest.mark.long),
        pytest.param(4, "tp=2,dp=2,zero=3,mb=2", marks=pytest.mark.long),
        pytest.param(4, "pp=2,dp=2,zero=3,mb=2,schedule=zb-h1", marks=pytest.mark.long),
    ],
)
def test_an_optimizer_of_ones_own_clipping_schedulers_and_accumulation(pool: WorkerPool, world: int, plan: str) -> None:
    require_equal(run(pool, world, jobs.clipped_adamw, plan), *plain_adamw(language=False))


@pytest.mark.long
@pytest.mark.parametrize(("world", "plan"), [(2, "pp=2,mb=2,slices=3"), (2, "tp=2"), (4, "pp=2,dp=2,zero=2,mb=2")])
def test_a_language_model_that_returns_its_loss(pool: WorkerPool, world: int, plan: str) -> None:
    require_equal(run(pool, world, jobs.clipped_adamw, plan, True), *plain_adamw(language=True))


def plain_groups(kind: str, steps: int = 3) -> tuple[list[float], nn.Module]:
    model = net()
    named = [(name, p) for name, p in model.named_parameters() if not name.startswith("layers.1.")]
    vectors = [p for name, p in named if is_vector(name, p)]
    heads = [p for name, p in named if name == "head.weight"]
    rest = [p for name, p in named if p.dim() > 1 and name != "head.weight"]
    groups: list[dict[str, Any]] = [
        {"params": rest, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.3, "lr": 0.5 * LR},
        {"params": heads, "weight_decay": 0.1, "lr": 3 * LR},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=LR)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        x, target = numbers(step)
        loss = both(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(
    ("world", "plan", "kind"),
    [
        (1, "mb=2", "adamw"),
        (2, "dp=2,zero=1,mb=2", "adamw"),
        pytest.param(2, "pp=2,mb=4", "sgd", marks=pytest.mark.long),
        pytest.param(2, "tp=2", "adamw", marks=pytest.mark.long),
        pytest.param(2, "dp=2,zero=3", "sgd", marks=pytest.mark.long),
    ],
)
def test_parameter_groups_and_a_loss_function_with_the_sessions_own_optimizer(
    pool: WorkerPool, world: int, plan: str, kind: str
) -> None:
    require_equal(run(pool, world, jobs.own_step, plan, kind), *plain_groups(kind))


def test_an_optimizer_of_whole_matrices_is_exact_where_they_are_whole(pool: WorkerPool) -> None:
    model = net()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=LR)
    losses: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        x, target = numbers(step)
        loss = both(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    require_equal(run(pool, 2, jobs.adafactor, "pp=2,mb=2"), losses, model)


def plain_outer(loss: Any, steps: int = 3, replicas: int = 1) -> tuple[list[float], nn.Module]:
    """replicas: whose losses, each of its own samples, are averaged."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        x, target = numbers(step)
        parts: list[Tensor] = [
            loss(model(mine), its) for mine, its in zip(x.chunk(replicas), target.chunk(replicas), strict=True)
        ]
        torch.stack(parts).mean().backward()
        optimizer.step()
        losses.append(float(parts[0].detach()))
    with torch.no_grad():
        losses.append(float(model(numbers(0)[0])[0].sum()))
    return losses, model


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (1, "mb=4"),
        (2, "pp=2,mb=2"),
        pytest.param(2, "dp=2,zero=3,mb=2", marks=pytest.mark.long),
        pytest.param(2, "tp=2,mb=2", marks=pytest.mark.long),
        pytest.param(4, "pp=2,tp=2,mb=2", marks=pytest.mark.long),
        pytest.param(4, "pp=2,dp=2,zero=1,mb=2,recompute=yes", marks=pytest.mark.long),
    ],
)
def test_any_loss_of_the_whole_batch_can_be_computed_outside(pool: WorkerPool, world: int, plan: str) -> None:
    require_equal(run(pool, world, jobs.outer, plan, contrastive), *plain_outer(contrastive))


@pytest.mark.parametrize(
    ("world", "plan"), [(2, "dp=2,mb=2"), pytest.param(4, "pp=2,dp=2,mb=2", marks=pytest.mark.long)]
)
def test_losses_of_replicas_are_averaged(pool: WorkerPool, world: int, plan: str) -> None:
    found = pool.run(jobs.outer, plan, contrastive, "replica", world=world)
    losses, model = plain_outer(contrastive, replicas=2)
    expected = model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[0].values[name], value, rtol=1e-9, atol=1e-11, msg=name)
    at_the_end = found[world // 2] if world == 4 else found[0]  # where the first replica's outputs lie
    torch.testing.assert_close(at_the_end.losses[:-1], losses[:-1], rtol=1e-9, atol=1e-12)


def test_a_checkpoint_of_one_plan_is_gone_on_from_under_another(pool: WorkerPool, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    losses: list[float] = []
    for step in range(3):
        optimizer.zero_grad()
        x, target = numbers(step)
        loss = both(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    require_equal(run(pool, 2, jobs.saved_and_loaded, "dp=2,zero=1", "pp=2,mb=2", tmp_path), losses, model)


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (1, "mb=2"),
        pytest.param(2, "tp=2", marks=pytest.mark.long),  # which splits the vocabulary
        pytest.param(2, "pp=2,mb=2", marks=pytest.mark.long),
        pytest.param(2, "dp=2,zero=3", marks=pytest.mark.long),
        pytest.param(2, "pp=2,mb=2,slices=2", marks=pytest.mark.long),
        pytest.param(4, "pp=2,tp=2,mb=2,sequence=yes", marks=pytest.mark.long),
        pytest.param(4, "dp=2,tp=2,zero=1,overlap=oases", marks=pytest.mark.long),
    ],
)
def test_outputs_of_a_session_that_computes_its_loss_itself(pool: WorkerPool, world: int, plan: str) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loss = widened(model, words(0))
    loss.backward()
    optimizer.step()
    with torch.no_grad(), reference.default_dtype(torch.float64), reference.Widen():
        logits = model(input_ids=words(1)["input_ids"][:, :-2]).logits
        losses = [float(loss.detach()), *logits.square().sum((1, 2)).tolist(), float(model(**words(2)).loss)]
    require_equal(run(pool, world, jobs.looked_at, plan), losses, model)


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (1, "mb=2,offload=optimizer"),
        (1, "mb=2,offload=optimizer-step"),
        (1, "mb=2,offload=parameters"),
        pytest.param(2, "dp=2,zero=2,offload=optimizer", marks=pytest.mark.long),
        pytest.param(2, "pp=2,mb=2,offload=optimizer-step:0.5", marks=pytest.mark.long),
    ],
)
def test_state_of_the_sessions_optimizer_on_the_host(pool: WorkerPool, world: int, plan: str) -> None:
    model = net()
    named = list(model.parameters())
    groups = [
        {"params": [p for p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    losses: list[float] = []
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + step)
        optimizer.zero_grad()
        x, target = numbers(step)
        loss = both(model(x), target)
        loss.backward()
        losses += [float(loss.detach()), float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))]
        optimizer.step()
    x, target = numbers(100)
    losses.append(float(both(model(x), target).detach()))
    require_equal(run(pool, world, jobs.hosted, plan), losses, model)

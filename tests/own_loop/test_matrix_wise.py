"""Optimizers that look at whole matrices give the same update under every plan: Muon, and one of torch's others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.params.optimizer_groups import is_layer_matrix
from tests.own_loop import jobs
from tests.own_loop.jobs import LR, both, net, numbers
from tests.own_loop.test_own_loop_is_exact import require_equal, run

PLANS = [
    (1, "mb=2"),
    (2, "dp=2,zero=3"),
    pytest.param(2, "tp=2", marks=pytest.mark.long),
    pytest.param(2, "dp=2", marks=pytest.mark.long),
    pytest.param(2, "pp=2,mb=2", marks=pytest.mark.long),
    pytest.param(4, "pp=2,dp=2,zero=1,mb=2", marks=pytest.mark.long),
    pytest.param(4, "tp=2,dp=2,zero=2", marks=pytest.mark.long),
]


def plain(kind: str, steps: int = 3) -> tuple[list[float], nn.Module]:
    model = net()
    named = dict(model.named_parameters())
    made: list[Any]
    if kind == "muon":
        matrices = [p for name, p in named.items() if is_layer_matrix(name, p.shape)]
        others = {name: p for name, p in named.items() if not is_layer_matrix(name, p.shape)}
        groups = [
            {"params": [p for p in others.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in others.values() if p.dim() == 1], "weight_decay": 0.0},
        ]
        made = [
            torch.optim.Muon(matrices, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95)),
        ]
    else:
        decayed = [p for p in named.values() if p.dim() > 1]
        rest = [p for p in named.values() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        made = [torch.optim.Adafactor(groups, lr=LR)]
    losses: list[float] = []
    for step in range(steps):
        x, target = numbers(step)
        model.zero_grad()
        loss = both(model(x), target)
        loss.backward()
        for optimizer in made:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(("world", "plan"), PLANS)
def test_muon_gives_the_same_update_under_every_plan(pool: WorkerPool, world: int, plan: str) -> None:
    require_equal(run(pool, world, jobs.by_matrix, plan, "muon"), *plain("muon"))


@pytest.mark.long
@pytest.mark.parametrize(("world", "plan"), [(2, "tp=2"), (2, "dp=2,zero=3"), (2, "pp=2,mb=2")])
def test_so_does_any_other_that_looks_at_whole_tensors(pool: WorkerPool, world: int, plan: str) -> None:
    require_equal(run(pool, world, jobs.by_matrix, plan, "adafactor"), *plain("adafactor"))


@pytest.mark.parametrize("other", ["tp=2", pytest.param("dp=2", marks=pytest.mark.long)])
def test_another_plan_takes_up_what_owners_keep(pool: WorkerPool, other: str, tmp_path: Path) -> None:
    require_equal(run(pool, 2, jobs.by_matrix, "dp=2,zero=1", "muon", tmp_path, other), *plain("muon"))


@pytest.mark.parametrize(
    ("world", "plan"),
    [
        (1, "mb=2"),
        pytest.param(2, "dp=2,zero=3", marks=pytest.mark.long),
        pytest.param(2, "tp=2", marks=pytest.mark.long),
    ],
)
def test_the_bytes_that_muon_keeps_are_foreseen(pool: WorkerPool, world: int, plan: str) -> None:
    alone = world == 1
    found = [jobs.kept_by_muon(RankContext.alone(), plan)] if alone else pool.run(jobs.kept_by_muon, plan, world=world)
    for foreseen, held in found:
        assert foreseen == held > 0


@pytest.mark.parametrize(
    ("name", "shape", "is_one"),
    [
        ("model.layers.3.mlp.up_proj.weight", (8, 4), True),
        ("model.layers.3.norm.weight", (4,), False),
        ("model.embed_tokens.weight", (9, 4), False),
        ("lm_head.weight", (9, 4), False),
        ("model.layers.0.mlp.experts.weight", (3, 8, 4), False),
    ],
)
def test_muon_is_for_matrices_of_layers(name: str, shape: tuple[int, ...], is_one: bool) -> None:
    assert is_layer_matrix(name, shape) is is_one

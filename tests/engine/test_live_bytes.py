"""The table of a program is what happens: after every instruction the memory of values is what it says, to the byte."""

from __future__ import annotations

import pytest

from phalanx.launch.worker_pool import WorkerPool
from tests import captured
from tests.engine.live_bytes import mismatches, on_rank

ALONE = [
    "mb=2", "mb=2,recompute=yes", "mb=2,recompute=unit", "mb=2,recompute=light", "mb=2,schedule=zb-h1",
    "mb=2,schedule=zb-h1,recompute=block+unit+light+none", "mb=2,recompute=light,offload=activations",
    "mb=2,schedule=zb-v", "mb=2,schedule=gpipe,slices=3",
]  # fmt: skip
TOGETHER = [
    (captured.GPT2, "pp=2,mb=4,schedule=zb-h1"),
    pytest.param(captured.GPT2, "tp=2,mb=2", marks=pytest.mark.long),
    (captured.LLAMA, "tp=2,mb=2,sequence=yes,save=input"),
    pytest.param(captured.LLAMA, "tp=2,mb=1,overlap=oases", marks=pytest.mark.long),  # with offload below
    pytest.param(captured.LLAMA, "pp=2,tp=2,mb=2,slices=2", marks=pytest.mark.long),  # with offload below
    (captured.LLAMA, "pp=2,mb=2,slices=2,recompute=light+unit+none+block"),
    (captured.LLAMA, "tp=2,mb=1,overlap=halves,recompute=unit+light+block*2"),
    (captured.WHISPER, "pp=2,mb=2,schedule=interleaved,v=2"),
    (captured.WHISPER, "pp=2,tp=2,slices=2,mb=2,offload=activations"),
    (captured.LLAMA, "tp=2,mb=2,overlap=oases,offload=activations:2"),
]


@pytest.mark.parametrize("plan", ALONE)
@pytest.mark.parametrize("name", [captured.GPT2, pytest.param(captured.LLAMA, marks=pytest.mark.long)])
def test_bytes_of_one_rank_are_those_of_its_table(name: str, plan: str) -> None:
    case = captured.named(name, samples=4, tokens=8)
    assert mismatches(case.session(plan), case.batch) == []


@pytest.mark.parametrize(("name", "plan"), TOGETHER)
def test_bytes_of_every_rank_are_those_of_its_table(name: str, plan: str, pool: WorkerPool) -> None:
    world = 4 if "pp=2" in plan and "tp=2" in plan else 2
    assert pool.run(on_rank, name, plan, world=world) == [[]] * world

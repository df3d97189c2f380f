"""Will it fit: budgets, refusals with what would fit, and memory that runs out all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import RunConfig
from phalanx.engine import compiled
from phalanx.engine.engine import Engine
from phalanx.errors import ConfigError, PhalanxError
from phalanx.observe.runlog import read_log
from phalanx.params import rank_state
from phalanx.plan.lighter import Needs, lighter_plans
from phalanx.plan.plan import Plan
from phalanx.prepare import budget
from phalanx.prepare.budget import Budget, is_out_of_memory
from phalanx.written import parse_bytes
from tests.run_helpers import short_run

MODEL, DATA = "phalanx-demo", "synthetic:8"
CPU = torch.device("cpu")


def wrapped(message: str) -> RuntimeError:
    error = RuntimeError("the compiler failed")
    error.__cause__ = RuntimeError(message)
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA ran out"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("NCCL error: Cuda failure 2 'out of memory'"),
        wrapped("CUDA error: out of memory"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_memory_that_ran_out_is_recognised(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2"), wrapped("shapes differ")], ids=str)
def test_other_errors_are_not_about_memory(error: RuntimeError) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", 16 * 2**30), ("16 gib", 16 * 2**30), ("1.5GB", 1_500_000_000), ("500MiB", 500 * 2**20), ("4096", 4096)],
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes("memory", text) == size


@pytest.mark.parametrize("text", ["", "16 gigs", "0GiB", "-1GiB", "GiB"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option memory = .* is not an amount of memory") as caught:
        RunConfig.create(memory=text)
    assert "16GiB" in caught.value.hint


def test_without_a_budget_what_is_free_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4 kB\n")
    monkeypatch.setattr(budget, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(budget, "_CGROUP", tmp_path)
    assert Budget.of(None, CPU) == Budget(4096, "free main memory")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    assert Budget.of(None, CPU) == Budget(100, "free main memory")
    (tmp_path / "memory.max").write_text("max\n")
    assert Budget.of(None, CPU) == Budget(4096, "free main memory")
    assert Budget.of(5, CPU) == Budget(5, "as asked for (--memory)")
    monkeypatch.setattr(budget, "_MEMINFO", tmp_path / "missing")
    assert Budget.of(None, CPU) is None


def test_the_cheapest_changes_come_first_and_pairs_only_where_single_ones_do_not_do() -> None:
    def needs(plan: Plan) -> Needs:
        again = {"none": 0, "light": 10, "unit": 20, "block": 40}[plan.policies[0]]
        return Needs(100 - again - 5 * (plan.mb - 1), 1.0 + again / 100 + 0.3 * plan.mb)

    fitting, least = lighter_plans(Plan(mb=1), 4, 90, needs, has_host=False)
    assert [own.change for own in fitting] == ["recompute=light", "recompute=unit", "recompute=block"]
    fitting, _ = lighter_plans(Plan(mb=1), 4, 50, needs, has_host=False)
    assert [own.change for own in fitting] == ["mb=4,recompute=block"]
    fitting, least = lighter_plans(Plan(mb=1), 4, 1, needs, has_host=False)
    assert fitting == [] and least is not None and least.needs.memory == 45


def test_replicas_are_told_to_share_and_gpipe_to_interleave() -> None:
    tried: list[str] = []

    def needs(plan: Plan) -> Needs:
        tried.append(plan.shown)
        return Needs(1, 1.0)

    lighter_plans(Plan(dp=2, zero=1, mb=2, schedule="gpipe", recompute=("block",)), 4, 1, needs, has_host=False)
    assert tried == [
        "dp=2,mb=2,schedule=gpipe,recompute=block,zero=2", "dp=2,mb=2,schedule=gpipe,recompute=block,zero=3",
        "dp=2,mb=2,recompute=block,zero=1",
    ]  # fmt: skip


def test_what_a_host_can_take_is_offered_where_there_is_one() -> None:
    tried: list[str] = []

    def needs(plan: Plan) -> Needs:
        tried.append(plan.shown)
        return Needs(1, 1.0)

    given = Plan(recompute=("block",), offload="activations:2")  # pyright: ignore[reportArgumentType]
    lighter_plans(given, 1, 1, needs, has_host=True)
    assert tried == [
        "recompute=block,offload=activations:2+optimizer",
        "recompute=block,offload=activations:2+optimizer-step",
        "recompute=block,offload=activations:2+parameters",
        "recompute=block,offload=activations:2+parameters+optimizer-step",
    ]
    tried.clear()
    lighter_plans(Plan(mb=2, stages=(3,), recompute=("block",)), 2, 1, needs, has_host=True)
    assert tried[-1] == ("mb=2,schedule=block-major,v=3,recompute=block,offload=activations+parameters+optimizer-step")


def test_a_plan_that_cannot_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    needed = read_log(short_run(MODEL, DATA, tmp_path / "a").folder / "log-rank0.jsonl")
    (memory,) = (record for record in needed if record["kind"] == "memory")
    assert memory["predicted_bytes"] == sum(memory["components"].values())
    assert {"parameters", "moments", "gradients", "activations"} <= memory["components"].keys()
    with pytest.raises(PhalanxError, match=r"plan mb=1 does not fit: stage 0 needs .* \(as asked for") as caught:
        short_run(MODEL, DATA, tmp_path / "b", plan="simple", memory=f"{int(0.9 * memory['predicted_bytes'])}")
    assert "on an assumed device, these would fit: " in caught.value.hint and "× the step)" in caught.value.hint


def test_a_budget_below_anything_possible_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match=r"1\.0 KiB are there") as caught:
        short_run(MODEL, DATA, tmp_path, memory="1KiB")
    assert caught.value.hint.startswith("no change of this plan would fit, the least ")


def test_memory_that_runs_out_in_a_step_is_told_with_what_was_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Engine, "run", run)
    message = r"a micro-batch of 2 samples \(batch_size 4, plan mb=2,schedule=gpipe\) does not fit in the memory of cpu"
    with pytest.raises(PhalanxError, match=f"{message}.* were predicted") as caught:
        short_run(MODEL, DATA, tmp_path, plan="mb=2,schedule=gpipe")
    assert "would fit: " in caught.value.hint and "dtype" not in caught.value.hint


def test_memory_that_runs_out_before_a_plan_was_looked_at_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def optimizer_slots(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(compiled, "optimizer_slots", optimizer_slots)
    with pytest.raises(PhalanxError, match="nothing fits in the memory of cpu: CUDA out of memory") as caught:
        short_run(MODEL, DATA, tmp_path)
    assert "--memory" in caught.value.hint


def test_a_model_that_does_not_fit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_optimizer(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(rank_state, "make_optimizer", make_optimizer)
    with pytest.raises(PhalanxError, match="the model's state does not fit in the memory of cpu"):
        short_run(MODEL, DATA, tmp_path)

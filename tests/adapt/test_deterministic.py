"""A deterministic run has the same bits under every plan, through changes of plan and across restarts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx.config import RunConfig
from phalanx.errors import ConfigError, PlanError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan
from phalanx.prepare.deterministic import changes_bits, fixed_kernels
from phalanx.training.job import pack
from phalanx.training.trainer import Trainer, fit_on_rank
from tests.adapt import jobs, walks
from tests.adapt.test_runs import stored
from tests.adapt.walks import KINDS
from tests.captured import GPT2, LLAMA
from tests.run_helpers import losses, records, short_config, short_run

# Each from the beginning on. That a run goes from one to another is in `walks.py`.
PLANS = (
    "pp=4,schedule=gpipe", "dp=4,zero=1", "pp=2,dp=2,schedule=zb-h1,recompute=light", "dp=4,zero=3,recompute=block",
    "pp=2,schedule=zb-v,dp=2,recompute=unit", "pp=1,dp=2,zero=1,offload=optimizer", "pp=3,offload=activations:1",
    "dp=4,zero=2,zero_degree=2", "pp=2,v=2,dp=2,schedule=interleaved,offload=optimizer-step",
    "dp=4,zero=1,offload=parameters",
)  # fmt: skip
QUICK = ("dp=2,zero=2", "pp=2,dp=1,zero=0,recompute=unit", "dp=2,offload=optimizer-step")


def require_bits(found: jobs.Trained, expected: jobs.Trained) -> None:
    assert found.losses == expected.losses
    assert found.values.keys() == expected.values.keys()
    assert [name for name, value in expected.values.items() if not torch.equal(found.values[name], value)] == []


def train(dtype: str = "float32", slot: int = 1) -> Any:
    return partial(jobs.train, dtype=dtype, deterministic=True, slot_size=slot)


def alone(name: str, steps: int, dtype: str = "float32", slot: int = 1) -> jobs.Trained:
    with fixed_kernels(RunConfig(deterministic=True), "cpu"):
        return train(dtype, slot)(RankContext.alone(), name, ["dp=1"], steps)


def require_same_bits(pool: WorkerPool, name: str, plans: Sequence[str], dtype: str, world: int) -> None:
    expected = alone(KINDS[name].name, len(plans), dtype)
    require_bits(pool.run(train(dtype), KINDS[name].name, plans, world=world)[0], expected)


def test_changes_of_plan_leave_every_bit(pool: WorkerPool) -> None:
    require_same_bits(pool, "GPT-2", QUICK, "float32", 2)


@pytest.mark.long
@pytest.mark.timeout(walks.SECONDS)
@pytest.mark.parametrize("name", KINDS)
def test_every_value_that_leaves_the_bits_comes_and_goes(name: str, pool: WorkerPool) -> None:
    require_same_bits(pool, name, walks.same_bits(walks.walk(KINDS[name])), "float64", walks.RANKS)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_every_plan_has_the_same_bits_from_the_beginning_on(name: str, pool: WorkerPool) -> None:
    dtype = "float32" if name == "GPT-2" else "float64"
    expected = alone(KINDS[name].name, 2, dtype)
    for plan in (*PLANS, "dp=2", "dp=4,zero=3,gather=step"):
        require_bits(pool.run(train(dtype), KINDS[name].name, [plan], 2, world=4)[0], expected)


@pytest.mark.long
def test_half_precision_and_larger_slots_have_them_too(pool: WorkerPool) -> None:
    for dtype, slot in (("bfloat16", 2), ("float64", 4)):
        expected = alone(GPT2, 3, dtype, slot)
        found = pool.run(train(dtype, slot), GPT2, ["dp=2,zero=1", "pp=2,dp=1,zero=0", "dp=2"], world=2)
        require_bits(found[0], expected)


TENSOR_PLANS = (
    "tp=2,dp=2,zero=1", "tp=2,pp=2,dp=1,zero=0,schedule=gpipe", "tp=2,dp=2,pp=1,schedule=1f1b,recompute=block",
)  # fmt: skip


def of_two_ranks(pool: WorkerPool, name: str) -> jobs.Trained:
    return pool.run(train("float64"), KINDS[name].name, ["tp=2"], len(TENSOR_PLANS), world=2)[0]


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("Llama", marks=pytest.mark.long)])
def test_plans_of_one_tensor_degree_follow_each_other_with_the_same_bits(name: str, pool: WorkerPool) -> None:
    found = pool.run(train("float64"), KINDS[name].name, TENSOR_PLANS, world=4)[0]
    require_bits(found, of_two_ranks(pool, name))


@pytest.mark.long
@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_every_plan_of_one_tensor_degree_has_the_same_bits_from_the_beginning_on(name: str, pool: WorkerPool) -> None:
    expected = of_two_ranks(pool, name)
    for plan in TENSOR_PLANS:
        require_bits(pool.run(train("float64"), KINDS[name].name, [plan], len(TENSOR_PLANS), world=4)[0], expected)


def test_exact_sums_are_those_of_the_model(pool: WorkerPool) -> None:
    plain = jobs.train(RankContext.alone(), GPT2, ["mb=2"], 2)
    found = pool.run(jobs.train, GPT2, ["dp=2,mb=2,zero=2,sums=exact"], 2, world=2)[0]
    assert found.losses == pytest.approx(plain.losses, rel=1e-12)
    for name, value in plain.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-7, atol=1e-10, msg=name)


OPTIONS = {
    "batch_size": 4, "seq_len": 8, "steps": 4, "clip": 0.5, "export": False, "device": "cpu", "deterministic": True,
    "eval_data": "synthetic:3", "eval_samples": 3, "eval_every": 2,
}  # fmt: skip
DATA = "synthetic:9"


def fit(pool: WorkerPool, out: Path, world: int, **options: Any) -> None:
    with pack(Trainer(LLAMA, DATA, short_config(out, **{**OPTIONS, **options})).job) as payload:
        pool.run(fit_on_rank, payload, world=world)


def test_a_run_that_is_resumed_under_other_plans_has_the_same_bits(pool: WorkerPool, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    short_run(LLAMA, DATA, tmp_path / "one", **OPTIONS)
    assert torch.get_num_threads() == threads
    fit(pool, tmp_path / "two", 2, plan="pp=2", steps=2, lr_steps=4)
    fit(pool, tmp_path / "two", 2, plan="dp=2", plan_at="4:tp=2", resume="auto", lr_steps=4)
    first, second = tmp_path / "one", tmp_path / "two"
    assert [losses(second)[step] for step in (1, 2, 3)] == [losses(first)[step] for step in (1, 2, 3)]
    evaluated = [next(r["eval_loss"] for r in records(out, "step") if "eval_loss" in r) for out in (first, second)]
    assert evaluated[0] == evaluated[1]
    # Another tensor degree rounds otherwise: that is said, and within tolerance.
    (changed,) = records(second, "change")
    assert changed["bits"] == ["tp"]
    assert losses(second)[4] == pytest.approx(losses(first)[4], rel=1e-6)
    with pytest.raises(ConfigError, match=r"slot_size: was 1, now 2"):
        short_run(LLAMA, DATA, second, **{**OPTIONS, "slot_size": 2, "resume": "auto", "lr_steps": 4})
    assert stored(second).keys() == stored(first).keys()


def test_a_loop_of_ones_own_is_deterministic_too() -> None:
    threads, ids = torch.get_num_threads(), torch.arange(32).view(4, 8)
    batch = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"tiny": True, "optimizer": "adamw", "deterministic": True, "device": "cpu"}
    with phalanx.open("gpt2", example=batch, slot_size=2, **options) as session:
        assert (session.plan.mb, session.plan.sums, torch.get_num_threads()) == (2, "exact", 1)
        assert float(session.forward_backward(batch)) > 0
        session.step()
    assert torch.get_num_threads() == threads
    with pytest.raises(PlanError, match="deterministic slots of 3 samples do not divide a batch of 4"):
        phalanx.open("gpt2", example=batch, slot_size=3, **options)
    assert torch.get_num_threads() == threads


# What is said where bits cannot be promised.

COSTS = [1.0] * 4


@pytest.mark.parametrize(("plan", "slot", "said", "hint"), [
    ("dp=2,mb=2", 1, "mb=2 makes micro-batches of 2 samples, and a deterministic slot has 1", "use mb=4 or leave it"),
    ("dp=2,mb=2", 1, "mb=2 makes", "or slot_size=2 in every run"),
    ("dp=3", 1, "deterministic slots of 1 sample do not divide a batch of 8 over dp=3", "use dp=1, 2, 4 or 8, or"),
    ("dp=4", 16, "deterministic slots of 16 samples do not divide a batch of 8", "use another slot_size"),
    ("tp=2,overlap=halves", 1, "needs a multiple of 2 samples in every micro-batch", "use"),
])  # fmt: skip
def test_a_plan_that_would_compute_other_samples_together_is_refused(
    plan: str, slot: int, said: str, hint: str
) -> None:
    with pytest.raises(PlanError) as refused:
        complete(plan, world=None, batch_size=8, costs=COSTS, slot=slot)
    assert said in refused.value.message and hint in refused.value.hint


def test_micro_batches_follow_from_the_slots_and_the_reason_is_said() -> None:
    plan, reasons = complete("dp=2", world=None, batch_size=8, costs=COSTS, slot=2)
    assert (plan.mb, plan.sums) == (2, "exact")
    assert reasons["mb"] == "micro-batches 2: 2 samples each, as the run is deterministic"


@pytest.mark.parametrize(("options", "said", "hint"), [
    ({"slot_size": 2}, "slot_size = 2 does nothing with deterministic = False", "set deterministic"),
    ({"deterministic": True, "compile": "inductor"}, "does not go with compile = 'inductor'", "leave compile out"),
    ({"deterministic": True, "measure_top": 2}, "does not go with measure_top = 2", "leave measure_top out"),
])  # fmt: skip
def test_options_that_cannot_be_kept_are_refused(options: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig.create(**options)
    assert said in refused.value.message and hint in refused.value.hint


def test_a_collate_of_ones_own_is_refused(tmp_path: Path) -> None:
    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    with pytest.raises(ConfigError, match="deterministic does not go with collate") as refused:
        short_run("gpt2", samples, tmp_path, deterministic=True, collate=lambda rows: rows[0])
    assert "samples of one length" in refused.value.hint


def test_kernels_that_are_not_deterministic_are_named() -> None:
    with (
        pytest.raises(
            ConfigError, match="cannot be kept on this device: put_ does not have a deterministic"
        ) as refused,
        fixed_kernels(RunConfig(deterministic=True), "cuda"),
    ):
        torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
    assert "--device cpu" in refused.value.hint
    assert not torch.are_deterministic_algorithms_enabled()


def test_plans_differ_in_bits_by_what_kernels_see() -> None:
    old = Plan.parse("dp=2,mb=4")
    assert changes_bits(old, Plan.parse("pp=4,mb=8,zero=0,recompute=block")) == ()
    assert changes_bits(old, Plan.parse("tp=2,mb=8,sequence=yes,overlap=halves")) == ("tp", "sequence", "overlap")
    assert changes_bits(old, Plan.parse("mb=8,slices=2")) == ("slices",)

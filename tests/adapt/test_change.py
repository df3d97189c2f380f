"""A session that changes its plan goes on as if it had never had another."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.plan import Plan
from phalanx.session.session import Session
from tests.adapt import jobs
from tests.captured import GPT2, LLAMA, T5


def require_same(found: jobs.Trained, expected: jobs.Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-9, abs=0.0)
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-7, atol=1e-10, msg=name)


def require_changes(pool: WorkerPool, name: str, plans: Sequence[str], world: int = 4) -> list[jobs.Trained]:
    """A step under each plan is a step of the one process that never changes its own."""
    expected = jobs.train(RankContext.alone(), name, ["mb=2"], len(plans))  # first: it captures for all
    found = pool.run(jobs.train, name, plans, world=world)
    require_same(found[0], expected)
    assert all(each.losses == found[0].losses for each in found)
    return found


# Every field of a plan comes, changes and goes; four stages become three, tensor parallelism becomes replicas.
WALK = (
    "pp=2,dp=2,mb=2", "pp=4,mb=4,schedule=gpipe", "pp=3,mb=4", "pp=4,mb=2,schedule=zb-h1,sums=exact",
    "pp=2,v=2,dp=2,mb=2,schedule=interleaved", "pp=2,dp=2,mb=4,schedule=zb-v,recompute=block", "dp=4,recompute=unit",
    "dp=4,zero=1", "dp=4,zero=3,gather=step", "dp=4,zero=2,zero_degree=2,reduce=step,mb=2", "tp=4,mb=2", "dp=4",
    "tp=2,dp=2,sequence=yes,save=input,zero=3", "pp=2,tp=2,mb=2,degrees=2:1", "tp=4,degrees=2,overlap=oases",
    "tp=4,mb=2,pairs=yes,overlap=halves,replicate=yes", "pp=1,dp=2,zero=1,offload=optimizer",
    "pp=2,dp=2,mb=2,offload=optimizer-step", "pp=2,dp=2,zero=3,mb=2,offload=parameters",
    "pp=2,dp=2,mb=2,offload=activations:1,recompute=light", "pp=1,dp=1", "pp=2,dp=2,mb=2",
)  # fmt: skip
SLICES = ("pp=2,dp=2,slices=2,mb=2", "tp=2,dp=2,slices=3-5", "pp=4,mb=2")
NAMES = {"Llama": LLAMA, "GPT-2": GPT2, "BERT": "bert-base-cased", "T5": T5}


def test_stages_replicas_and_tensor_splits_follow_each_other(pool: WorkerPool) -> None:
    require_changes(pool, GPT2, ["pp=4,mb=4", "dp=4", "tp=2,dp=2", "pp=2,dp=2,zero=1,offload=optimizer", "pp=3,mb=2"])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_plan_can_change(name: str, pool: WorkerPool) -> None:
    plans = [*WALK, *(SLICES if name in ("Llama", "GPT-2") else ())]
    if name == "T5":  # whose decoder's layers have another unit
        plans = [plan.replace("degrees=2:1", "degrees=1") for plan in plans]
    require_changes(pool, NAMES[name], plans)


def test_the_walk_changes_every_field_up_and_down() -> None:
    plans = [Plan.parse(text) for text in (*WALK, *SLICES)]
    for each in dataclasses.fields(Plan):
        if each.name == "stages":
            continue  # they follow from the others
        values = [getattr(plan, each.name) for plan in plans]
        changes = sum(old != new for old, new in pairwise(values))
        assert changes >= 2, each.name


def test_ranks_without_a_place_wait_and_come_back(pool: WorkerPool) -> None:
    require_changes(pool, GPT2, ["pp=4,mb=4", "pp=3,mb=4", "pp=1,dp=1", "dp=3,zero=3", "tp=4"])


@pytest.mark.parametrize(("dtype", "frozen"), [
    ("bfloat16", "mlp"), pytest.param("float16", "", marks=pytest.mark.long),
    pytest.param("float32", "attn", marks=pytest.mark.long),
])  # fmt: skip
def test_not_a_bit_of_the_state_changes_on_the_way(dtype: str, frozen: str, pool: WorkerPool) -> None:
    """Master weights, moments, counters, frozen parameters; into ZeRO, out of it and to the host."""
    plans = ["pp=2,mb=2", "dp=2,zero=1", "tp=2,zero=0", "dp=2,zero=3", "dp=2,zero=1,offload=optimizer"]
    assert pool.run(jobs.bits, GPT2, plans, dtype, frozen, world=2) == [[], []]


PLANS = st.sampled_from([*WALK, *SLICES])


@settings(max_examples=1, derandomize=True, phases=[Phase.generate])
@given(st.lists(PLANS, min_size=3, max_size=4))
def test_any_plans_may_follow_each_other(pool: WorkerPool, plans: list[str]) -> None:
    require_changes(pool, GPT2, plans)


@pytest.mark.long
@settings(max_examples=2, derandomize=True, phases=[Phase.generate])
@given(st.lists(PLANS, min_size=20, max_size=20))
def test_twenty_plans_may_follow_each_other(pool: WorkerPool, plans: list[str]) -> None:
    require_changes(pool, LLAMA, plans)


def test_the_memory_of_a_plan_is_free_once_its_state_has_moved() -> None:
    of = jobs.case(GPT2)
    member = jobs.opened(RankContext.alone(), of, "mb=2")
    jobs.step(member, of, 0)
    assert isinstance(member, Session)
    parameters = member.state.parameters
    buffers = [flat.full for index in parameters.held() for flat in parameters.bucket(index).buffers]
    slots = [tensor for _, _, tensor in member.state.optimizer.tensors()]
    known = [weakref.ref(tensor) for tensor in (*buffers, *slots) if tensor is not None]
    del buffers, slots, parameters
    held = member.give_up_state()
    assert len(held) > 10 and len(known) > 10
    held.clear()
    assert not [one for one in known if one() is not None]
    member.connected.close()

"""A session that changes its plan goes on as if it had never had another."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from phalanx.errors import PlanError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.session.session import Session
from tests.adapt import jobs, walks
from tests.adapt.walks import KINDS
from tests.captured import GPT2


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


def test_stages_replicas_and_tensor_splits_follow_each_other(pool: WorkerPool) -> None:
    require_changes(pool, GPT2, ["pp=4,mb=4", "dp=4", "tp=2,dp=2", "pp=2,dp=2,zero=1,offload=optimizer", "pp=3,mb=2"])


@pytest.mark.long
@pytest.mark.timeout(walks.SECONDS)
@pytest.mark.parametrize("name", KINDS)
def test_every_value_of_every_field_of_a_plan_comes_and_goes(name: str, pool: WorkerPool) -> None:
    require_changes(pool, KINDS[name].name, walks.walk(KINDS[name]))


@pytest.mark.long
@pytest.mark.timeout(walks.SECONDS)
@pytest.mark.parametrize("name", KINDS)
def test_all_axes_change_at_once(name: str, pool: WorkerPool) -> None:
    require_changes(pool, KINDS[name].name, walks.wide(), walks.WIDE_RANKS)


CANNOT = [(name, field) for name, kind in KINDS.items() for field in kind.cannot]


@pytest.mark.parametrize(("name", "field"), CANNOT)
def test_what_a_walk_leaves_out_is_refused(name: str, field: str) -> None:
    plan, reason = KINDS[name].cannot[field]
    assert f"{field}=" in plan
    with pytest.raises(PlanError) as refused:
        jobs.opened(RankContext.alone(), jobs.case(KINDS[name].name), plan)
    assert reason in refused.value.message


def test_ranks_without_a_place_wait_and_come_back(pool: WorkerPool) -> None:
    require_changes(pool, GPT2, ["pp=4,mb=4", "pp=3,mb=4", "pp=1,dp=1", "dp=3,zero=3", "tp=4"])


@pytest.mark.parametrize(("dtype", "frozen"), [
    ("bfloat16", "mlp"), pytest.param("float16", "", marks=pytest.mark.long),
    pytest.param("float32", "attn", marks=pytest.mark.long),
])  # fmt: skip
def test_not_a_bit_of_the_state_changes_on_the_way(dtype: str, frozen: str, pool: WorkerPool) -> None:
    """Master weights, moments, counters, frozen parameters; into ZeRO, out of it and to the host."""
    plans = ["pp=2,mb=2", "dp=2,zero=1", "tp=2,zero=0", "dp=2,zero=3", "dp=2,zero=1,offload=optimizer"]
    plans += ["pp=2,mb=2,offload=optimizer:0.4+optimizer-step:0.6"]
    assert pool.run(jobs.bits, GPT2, plans, dtype, frozen, world=2) == [[], []]


SEEDS = st.integers(0, 2**32)  # of plans: what is drawn first has the least of everything, and so the same plan again


@settings(max_examples=1, derandomize=True, phases=[Phase.generate])
@given(SEEDS)
def test_any_plans_may_follow_each_other(pool: WorkerPool, seed: int) -> None:
    require_random_changes(pool, "GPT-2", seed, 4)


@pytest.mark.long
@pytest.mark.timeout(walks.SECONDS)
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=2, derandomize=True, phases=[Phase.generate])
@given(seed=SEEDS)
def test_twenty_plans_may_follow_each_other(name: str, pool: WorkerPool, seed: int) -> None:
    require_random_changes(pool, name, seed, 20)


def require_random_changes(pool: WorkerPool, name: str, seed: int, length: int) -> None:
    """Some are refused, as what they say does nothing for this model; the run goes on under the plan before."""
    kind = KINDS[name]
    plans = walks.random_walk(kind, seed, length)
    note("\n".join(plans))
    expected = jobs.train(RankContext.alone(), kind.name, ["mb=2"], length)
    found = pool.run(jobs.train, kind.name, plans, 1, True, world=walks.RANKS)
    require_same(found[0], expected)
    assert all(each.losses == found[0].losses and each.refused == found[0].refused for each in found)
    assert all(text.startswith("plan: ") for text in found[0].refused) and len(found[0].refused) <= length // 4


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

"""A step that loses its links is one that counts or one that does not, on all ranks alike, to the last bit."""

from __future__ import annotations

import pytest

from phalanx.adapt.mirrors import missing, stays
from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.plan import Plan
from phalanx.plan.shrink import leaner, shapes
from phalanx.planning.fewer import in_order
from phalanx.session.held import Word, newest_step, sums_of
from phalanx.state.layout import Box, StateShard
from tests.survive import jobs


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("dp=2,zero=1", marks=pytest.mark.long),
                                  pytest.param("dp=2,offload=optimizer", marks=pytest.mark.long)])  # fmt: skip
@pytest.mark.parametrize(("where", "steps"), [("after", 2), ("before", 1)])
def test_a_rank_that_did_not_hear_of_the_norm_ends_the_step_like_the_others(
    plan: str, where: str, steps: int, pool: WorkerPool
) -> None:
    """Before anyone knows the norm the step does not count, and nothing of it is left."""
    found = pool.run(jobs.interrupted, plan, where, world=2)
    expected = pool.run(jobs.made, plan, steps, world=2)
    assert [counted for counted, _ in found] == [steps, steps]
    assert all(jobs.equal(mine[1], theirs[1]) for mine, theirs in zip(found, expected, strict=True))


def test_the_newest_step_of_those_that_hold_state_counts() -> None:
    words = [Word(True, [("dp=2", 0, None)], 7, sums=[1.0]), Word(True, [("dp=2", 1, None)], 6, completes=True)]
    words.append(Word(False))
    assert newest_step(words) == 7 and sums_of(words, 7) == [1.0] and sums_of(words, 6) is None
    assert newest_step([Word(False)]) == -1


def test_what_only_lost_ranks_held_is_missing() -> None:
    def shard(*rows: int) -> StateShard:
        return StateShard("w", (4, 2), "float32", tuple(Box((row, 0), (1, 2)) for row in rows), True)

    whole = StateShard("w", (4, 2), "float32", (Box((0, 0), (4, 2)),), True)
    after = {0: (whole,)}
    assert missing({0: (shard(0, 1),), 1: (shard(2, 3),)}, after) == []
    assert missing({0: (shard(0, 1),)}, after) == ["w"]
    assert missing({}, {0: ()}) == []
    assert missing(after, {0: (shard(2),), 1: (shard(3, 1),)}) == []


def test_ranks_that_have_what_they_are_to_have_move_nothing() -> None:
    def state(rank: int, owned: bool, *names: str) -> dict[int, tuple[StateShard, ...]]:
        return {rank: tuple(StateShard(name, (2,), "float32", (Box((0,), (2,)),), owned) for name in names)}

    assert stays({**state(0, True, "a"), **state(1, False, "a"), **state(2, True, "b")}, state(1, True, "a"))
    assert not stays(state(0, True, "a"), {**state(0, True, "a"), **state(1, False, "a")})
    assert not stays(state(0, True, "a"), state(0, True, "a", "b"))


def test_plans_for_fewer_ranks_keep_what_they_can() -> None:
    plans = in_order(Plan(pp=2, dp=2, mb=2, stages=(2, 3)), 3)
    assert plans[0] == "pp=1,dp=3,mb=2,schedule=1f1b,tp=1"  # micro-batches are not larger than before
    assert any(text.startswith("pp=2,dp=1,mb=4,schedule=1f1b,stages=2-3") for text in plans)
    assert in_order(Plan(dp=4, zero=1), 2)[0] == "pp=1,dp=2,mb=2,schedule=1f1b,zero=1,tp=1"


def test_plans_for_fewer_ranks_that_lack_memory_keep_less() -> None:
    whole, two = Plan(pp=2, dp=2, mb=2), Plan(dp=2, zero=1)
    plans = list(leaner(whole, shapes(whole, 3)))
    assert plans[0] == "pp=1,dp=3,mb=2,schedule=1f1b,tp=1,recompute=block"
    assert plans[-2] == "pp=1,dp=2,mb=2,schedule=1f1b,tp=1,recompute=block,zero=3"  # last: as much as can be
    assert "pp=1,dp=3,mb=2,tp=1,recompute=block,zero=1" in plans
    alone = list(leaner(two, shapes(two, 1)))
    assert alone[0] == "pp=1,dp=1,mb=2,schedule=1f1b,tp=1,recompute=block"
    assert not any("zero" in text for text in alone)  # there is nobody to share with
    assert in_order(two, 1)[-1] == alone[-1]

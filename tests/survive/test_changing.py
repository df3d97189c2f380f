"""Ranks are killed while state moves to another plan: it comes from those that are left, as each has it by then."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.adapt import migrate as migrate_module
from phalanx.adapt import portions
from phalanx.adapt.exchange import Message
from phalanx.adapt.holdings import Part, Place, present
from phalanx.adapt.migrate import _Stream
from phalanx.adapt.portions import Migration, Portion
from phalanx.errors import LinkError
from phalanx.launch.context import RankContext
from phalanx.launch.renewal import OnLoss
from phalanx.launch.worker_pool import WorkerPool
from phalanx.plan.plan import Plan
from phalanx.session import change as change_module
from phalanx.session.restoring import lost_with_mirrors
from phalanx.training.trainer import fit_on_rank
from tests.run_helpers import records
from tests.survive.runs import Strike, fit, in_phase, losses_of_ranks, require_same_run, stored

LEFT = "the ranks that were left"
NUM_PORTIONS = 7  # of the model, with a bucket in each


@dataclass(frozen=True)
class Dies:
    """rank: kills itself when it is to move a portion of this number, or `after` it has; where there is none, when it
    puts in place what has moved. deaf: a rank that does not hear any more that all have the portion before. damages: a
    portion of which what rank 0 sends comes damaged, so that portions are counted which move back."""

    rank: int
    at: int
    after: bool = False
    deaf: int | None = None
    damages: int | None = None


def dies(context: RankContext, payload: Any, how: Dies) -> Any:
    """Every bucket is a portion. What else moves state than the first change is left alone, and so is who comes in the
    place of the lost rank."""
    is_new, rank = context.membership is not None and context.membership.is_fresh, context.rank
    ways = list[list[None]]()  # the portions that have begun to move, on the way there and back
    move, agree, back, pack = _Stream._move, migrate_module.agree, Migration.back, Message.pack
    migrate, made = change_module.migrate, change_module.made

    def is_at(number: int) -> bool:
        return len(ways) == (1 if how.damages is None else 2) and len(ways[-1]) == number

    def die(is_now: bool) -> None:
        if rank == how.rank and is_now:
            os.kill(os.getpid(), signal.SIGKILL)

    def moves(self: _Stream, *arguments: Any) -> Any:
        die(is_at(how.at) and not how.after)
        ways[-1].append(None)
        found = move(self, *arguments)
        die(is_at(how.at + 1) and how.after)
        return found

    def hears(*arguments: Any) -> None:
        agree(*arguments)
        if rank == how.deaf and is_at(how.at):
            time.sleep(0.3)  # until the others have heard it
            raise LinkError("the connection broke")

    def packs(self: Message, buffer: Any, held: Any) -> None:
        pack(self, buffer, held)
        if self.moves and rank == 0 and len(ways) == 1 and len(ways[0]) - 1 == how.damages:
            buffer[-1] += 1

    def goes_back(self: Migration, moved: Sequence[Portion]) -> Migration:
        ways.append([])
        return back(self, moved)

    def makes(*arguments: Any) -> Any:
        die(is_at(how.at))
        time.sleep(1.0)  # until the others know that it is dead
        return made(*arguments)

    def changes(*arguments: Any, **options: Any) -> None:
        if ways or is_new:
            return migrate(*arguments, **options)
        ways.append([])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Stream, "_move", moves)
            patch.setattr(migrate_module, "agree", hears)
            patch.setattr(Message, "pack", packs)
            patch.setattr(Migration, "back", goes_back)
            return migrate(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions, "PORTION_BYTES", 0)
        patch.setattr(change_module, "migrate", changes)
        if how.at == NUM_PORTIONS:
            patch.setattr(change_module, "made", makes)
        return fit_on_rank(context, payload)


def lost(
    pool: WorkerPool, out: Path, plans: tuple[str, str], how: Dies, on_loss: OnLoss = "replace", **options: Any
) -> dict[str, Any]:
    """What is said of a rank that is lost in the change from one plan to another before step 4."""
    world, options = 2 if plans == STAGES else 4, {"plan": plans[0], "plan_at": f"4:{plans[1]}", **options}
    fit(pool, out, world, on_loss, target=partial(dies, how=how), **options)
    (loss,) = losses_of_ranks(out)
    assert loss["lost"][0].startswith(f"rank {how.rank} ")
    assert "was killed by signal SIGKILL during compile" in loss["lost"][0]
    if on_loss == "replace":
        assert loss["plan"] == plans[how.at == NUM_PORTIONS]
        assert [each["step"] for each in records(out, "change") if "refused" not in each] == [4]
    return loss


REPLICAS, STAGES = ("pp=2,dp=2,mb=2", "tp=2,dp=2"), ("pp=2,mb=2", "dp=2")


def test_what_ranks_that_are_left_have_in_two_plans_is_gone_on_from(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    """Rank 0 has a portion in both: it did not hear that it might let go of the old one."""
    loss = lost(pool, tmp_path, REPLICAS, Dies(3, at=3, deaf=0))
    assert (loss["step"], loss["source"], loss["repeated"]) == (4, LEFT, 0) and "why" not in loss
    require_same_run(tmp_path, alone)


CASES: dict[str, tuple[tuple[str, str], Dies, OnLoss]] = {
    "first portion": (REPLICAS, Dies(0, at=0), "replace"),
    "a portion that came": (REPLICAS, Dies(2, at=1, after=True), "replace"),
    "on the way back": (REPLICAS, Dies(1, at=1, deaf=2, damages=2), "replace"),
    "with fewer": (REPLICAS, Dies(1, at=2), "shrink"),
    "shards in groups": (("pp=2,dp=2,mb=2", "dp=4,zero=1,zero_degree=2"), Dies(2, at=2, deaf=1), "replace"),
    "shards become stages": (("dp=4,zero=3,zero_degree=2", "pp=2,dp=2,mb=2"), Dies(1, at=3, deaf=3), "replace"),
    "from the host": (("pp=2,dp=2,mb=2,offload=optimizer", "tp=2,dp=2"), Dies(1, at=2, deaf=0), "replace"),
    "to ranks that had no place": (("pp=1,dp=2", "pp=2,dp=2,mb=2"), Dies(3, at=2, deaf=1), "shrink"),
    "of ranks that lose their place": (("pp=2,dp=2,mb=2", "pp=1,dp=2"), Dies(1, at=2, deaf=3), "shrink"),
    "stages that all have come": (STAGES, Dies(0, at=NUM_PORTIONS - 1, after=True), "replace"),
    "shards that all have come": (("pp=2,dp=2,mb=2", "dp=4,zero=1,zero_degree=2"), Dies(2, NUM_PORTIONS), "replace"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_whenever_one_is_lost_that_others_hold_all_of(name: str, pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    loss = lost(pool, tmp_path, *CASES[name])
    assert (loss["step"], loss["source"], loss["repeated"]) == (4, LEFT, 0)
    require_same_run(tmp_path, alone)


@pytest.mark.long
def test_another_is_lost_while_what_is_left_is_put_together(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    """What ranks 1 and 2 have then is mixed as it was: the first recovery let go of nothing."""
    strike, how = Strike(0, in_phase("recover")), partial(dies, how=Dies(3, at=3, deaf=1))
    before, after = REPLICAS
    fit(pool, tmp_path, 4, "replace", strikes=[strike], target=how, plan=before, plan_at=f"4:{after}")
    found = [(loss["step"], loss["source"], loss["repeated"]) for loss in losses_of_ranks(tmp_path)]
    assert found in ([(4, LEFT, 0)], [(4, LEFT, 0)] * 2)
    require_same_run(tmp_path, alone)


@pytest.mark.long
def test_not_a_bit_of_masters_and_moments_is_another(pool: WorkerPool, tmp_path: Path) -> None:
    before, after = REPLICAS
    fit(pool, tmp_path / "whole", 4, "replace", dtype="bfloat16", plan=before, plan_at=f"4:{after}")
    assert lost(pool, tmp_path / "struck", REPLICAS, Dies(3, at=2, deaf=2), dtype="bfloat16")["source"] == LEFT
    found, expected = stored(tmp_path / "struck"), stored(tmp_path / "whole")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_was_in_its_old_place_alone_comes_from_the_checkpoint(
    pool: WorkerPool, tmp_path: Path, alone: Path
) -> None:
    """A stage of which some portions had not moved yet."""
    loss = lost(pool, tmp_path, STAGES, Dies(1, at=1), checkpoint_every=2)
    assert "checkpoints/step-0000000" in loss["source"] and loss["why"].startswith("nobody else held ")
    require_same_run(tmp_path, alone)


@pytest.mark.long
def test_what_was_in_its_old_place_alone_comes_from_its_mirror(pool: WorkerPool, tmp_path: Path, alone: Path) -> None:
    loss = lost(pool, tmp_path, STAGES, Dies(1, at=1), mirror_every=0)
    assert loss["source"] == f"{LEFT}; of rank 1 from the mirror on rank 0" and loss["repeated"] == 0
    require_same_run(tmp_path, alone)


@pytest.mark.light
def test_a_mirrored_rank_that_has_changed_its_plan_already_is_not_lost() -> None:
    """Ranks keep their numbers in a change."""
    old, new, names = Plan(pp=3, mb=2), Plan(dp=3), frozenset(["wte.weight"])
    changing = Place((Part(old, 1, names), Part(new, 1, names)), Part(old, 0))
    assert lost_with_mirrors([changing, Place((Part(new, 0),))]) == ["no mirror of rank 2 was left"]
    assert lost_with_mirrors([changing, Place((Part(new, 0),)), Place((Part(new, 2),))]) == []
    assert present([changing, Place((Part(new, 0),))], {old}) == {1}

"""Where ranks go back to after a loss, when nobody has copies: a checkpoint of this run, or what it went on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.state import checkpoint
from phalanx.state.snapshot import Mark, Snapshot
from phalanx.training import going_back
from phalanx.training.folder import RunFolder
from phalanx.training.going_back import RankGoingBack

MARK = Mark("synthetic", "abc")


@pytest.fixture(autouse=True)
def valueless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which checkpoint is opened is asked here, not what is read of it."""
    monkeypatch.setattr(going_back, "open_weights", lambda *_: (None, ""))


def saved(folder: Path, *steps: int, passed_over: int = 0) -> Path:
    """The checkpoint that was written last."""
    for step in steps:
        snapshot = Snapshot(RunConfig().model_dump(mode="json"), MARK, MARK, 10, step=step, passed_over=passed_over)
        checkpoint.save(folder / "checkpoints", step, [("model/w", torch.zeros(2))], snapshot.to_json(), keep=9)
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    return newest


def rank(folder: Path, resume: Path | str, has_saved: bool = False, passed_over: int = 0) -> RankGoingBack:
    own: Any = RankGoingBack.__new__(RankGoingBack)
    own.config, own.has_saved = RunConfig(resume=str(resume)), has_saved
    own.folder = RunFolder(folder, own.config, RankContext.alone("cpu"))
    own.job = SimpleNamespace(model=None, passed_over=passed_over)
    own.run = SimpleNamespace(model_mark=MARK, data_mark=MARK, total_steps=10, spec=None)
    own.snapshot = Snapshot({}, MARK, MARK, 10)
    return own


def went_back(own: RankGoingBack, newest: int) -> dict[str, Any]:
    opening = SimpleNamespace(context=RankContext.alone("cpu"))
    restoring: Any = SimpleNamespace(opening=opening, from_reader=lambda _: None, member=lambda _: None)
    return own._from_checkpoint(restoring, [], newest)


def test_until_the_run_has_saved_something_it_goes_back_to_what_it_went_on_from(tmp_path: Path) -> None:
    there = saved(tmp_path / "other", 6)
    own = rank(tmp_path / "own", there)
    found = went_back(own, 7)
    assert (found["source"], found["step"], found["repeated"]) == (f"the checkpoint {there}", 7, 1)
    assert own._saved_step() == 6


def test_a_newer_checkpoint_of_another_way_is_left_alone_until_the_run_has_its_own(tmp_path: Path) -> None:
    older, _ = saved(tmp_path, 2), saved(tmp_path, 6)
    own = rank(tmp_path, older)
    assert went_back(own, 3)["repeated"] == 1 and own._saved_step() == 2
    saved(tmp_path, 4)
    own.has_saved = True
    assert went_back(own, 5)["repeated"] == 1 and own._saved_step() == 4


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_where_no_checkpoint_is_named_it_is_the_newest_if_there_is_one(resume: str, tmp_path: Path) -> None:
    own = rank(tmp_path, resume)
    found = went_back(own, 2)
    assert (found["source"], found["repeated"]) == ("the beginning: there was no checkpoint", 2)
    assert own._saved_step() == -1
    saved(tmp_path, 1)
    assert went_back(own, 2)["repeated"] == 1 and own._saved_step() == 1


def test_samples_that_were_passed_over_do_not_come_back(tmp_path: Path) -> None:
    there = saved(tmp_path, 2, passed_over=8)
    own = rank(tmp_path, there, passed_over=24)  # by a spike since then
    went_back(own, 3)
    assert own.snapshot.passed_over == 24
    saved(tmp_path, 4, passed_over=32)
    own.has_saved = True
    went_back(own, 5)
    assert own.snapshot.passed_over == 32


def test_a_checkpoint_that_is_gone_is_no_reason_to_leave_copies_alone(tmp_path: Path) -> None:
    assert rank(tmp_path, tmp_path / "gone")._saved_step() == -1

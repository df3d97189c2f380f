"""Guards, which a launcher started and which are no ranks: all of them learn what came of the run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from phalanx.errors import LinkError
from phalanx.launch.abort import AbortEvent
from phalanx.training.guarded import fit_guarded, told
from phalanx.training.job import Summary

SUMMARY = Summary(3, 1.5, None, (2.0, 1.75, 1.5), 0, Path("runs/x"), Path("runs/x/checkpoints/step-3"), None, None)


class Store(dict[str, str]):
    """What a job's keys are, in one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def waiting(ended: dict[str, Any] | None, abort: AbortEvent | None = None) -> Summary:
    store = Store() if ended is None else Store(ended=json.dumps(ended))
    context: Any = SimpleNamespace(
        rank=1, world=2, node=0, local_rank=1, store=store, abort=abort or AbortEvent(), name="rank 1"
    )
    job: Any = SimpleNamespace(model=nn.Linear(1, 1), config=None)
    return fit_guarded(context, job, "cpu", lambda pool: pytest.fail("only the first guard runs ranks"))


def test_a_guard_that_waits_learns_what_came_of_the_run() -> None:
    assert waiting(told(SUMMARY)) == SUMMARY


def test_a_guard_leaves_as_the_first_one_does() -> None:
    with pytest.raises(SystemExit) as left:
        waiting({"left": 143})
    assert left.value.code == 143
    with pytest.raises(KeyboardInterrupt):
        waiting({"left": None})


def test_a_guard_does_not_wait_for_a_run_that_failed() -> None:
    abort = AbortEvent()
    abort.set("rank 0 failed")
    with pytest.raises(LinkError, match="rank 1 stopped waiting for the run: rank 0 failed"):
        waiting(None, abort)


class Gone(Store):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


def test_a_guard_whose_store_is_gone_says_who_had_it(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(
        rank=1, world=2, node=1, local_rank=1, store=Gone(), abort=AbortEvent(), name="rank 1"
    )  # fmt: skip
    with pytest.raises(LinkError) as lost:
        job: Any = SimpleNamespace(folder=tmp_path, config=SimpleNamespace(silence=0.1))
        fit_guarded(context, job, "cpu", pytest.fail, pytest.fail)  # pyright: ignore[reportArgumentType]
    assert lost.value.message == "rank 1 lost the store of its job: the first process of the run is gone"
    assert lost.value.hint == "see what became of it; go on with --resume auto"

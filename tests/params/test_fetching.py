"""Parameters come from the host when they are updated, and other things let them pass."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch

from phalanx.params.fetching import Fetching
from phalanx.params.host_memory import Copying

CPU = torch.device("cpu")


def test_what_is_still_being_updated_comes_when_that_is_done() -> None:
    fetching, updated = Fetching(CPU), Future[Copying]()
    source, target = torch.zeros(4), torch.full((4,), -1.0)
    coming = fetching.bring(target, source, [updated])
    assert target.tolist() == [-1.0] * 4  # and whoever asked for it goes on
    source.fill_(7.0)
    updated.set_result(Copying())
    coming.wait()
    assert target.tolist() == [7.0] * 4
    fetching.close()


def test_what_is_not_being_updated_comes_at_once() -> None:
    source, target = torch.arange(4.0), torch.zeros(4)
    Fetching(CPU).bring(target, source).wait()
    assert torch.equal(target, source)


def test_an_update_that_failed_is_told_to_whoever_waits_for_its_parameters() -> None:
    fetching, updated = Fetching(CPU), Future[Copying]()
    coming = fetching.bring(torch.zeros(1), torch.zeros(1), [updated])
    updated.set_exception(RuntimeError("the host ran out of memory"))
    with pytest.raises(RuntimeError, match="the host ran out of memory"):
        coming.wait()
    fetching.close()


class Moment:
    """Of a device, passed or still to come."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


class Watched(Copying):
    def __init__(self, done: bool) -> None:
        super().__init__()
        self.done, self.waits = done, 0

    @property
    def is_done(self) -> bool:
        return self.done

    def wait(self, what: str = "") -> None:
        self.waits += 1


def test_other_copies_wait_for_parameters_that_have_room_and_for_no_others() -> None:
    fetching, room, no_room = Fetching(CPU), cast(Any, Moment(True)), cast(Any, Moment(False))
    arrived, coming, later = Watched(done=True), Watched(done=False), Watched(done=False)
    for moment, copying in ((room, arrived), (room, coming), (no_room, later)):
        assert fetching.pass_by(moment, copying) is copying
    fetching.let_pass()
    assert (arrived.waits, coming.waits, later.waits) == (0, 1, 0)
    no_room.passed, coming.done = True, True
    fetching.let_pass()
    assert (coming.waits, later.waits) == (1, 1)

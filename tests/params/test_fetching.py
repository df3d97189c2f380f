"""Parameters come from the host, and other things let them pass."""

from __future__ import annotations

from typing import Any, cast

import torch

from phalanx.params.fetching import Fetching
from phalanx.params.host_memory import Copying

CPU = torch.device("cpu")


def test_what_is_asked_for_comes() -> None:
    source, target = torch.arange(4.0), torch.zeros(4)
    Fetching(CPU).bring(target, source).wait()
    assert torch.equal(target, source)


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


def test_what_has_arrived_is_forgotten_although_nobody_lets_it_pass() -> None:
    fetching = Fetching(CPU)
    for _ in range(3):
        fetching.pass_by(cast(Any, Moment(True)), Watched(done=True))
    assert len(fetching._passing) == 1

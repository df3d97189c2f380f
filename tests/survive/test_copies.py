"""Which state only one rank holds, who keeps a copy of it, and how often copies are taken."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.adapt.mirrors import beside, lone, mirrored
from phalanx.config import RunConfig
from phalanx.errors import ConfigError
from phalanx.launch.membership import Generation
from phalanx.launch.newcomers import Newcomers
from phalanx.launch.status_board import StatusBoard
from phalanx.observe.story import mirror_words
from phalanx.session.mirror import Mirror, seldom_enough
from phalanx.state.layout import Box, StateShard

pytestmark = pytest.mark.light


def shard(name: str, *rows: int) -> StateShard:
    return StateShard(name, (4, 2), "float32", tuple(Box((row, 0), (1, 2)) for row in rows), True)


def rows(shards: tuple[StateShard, ...]) -> dict[str, list[int]]:
    return {each.name: [row for box in each.boxes for row in range(box.offset[0], box.end[0])] for each in shards}


def test_what_only_one_rank_holds_is_found() -> None:
    layout = {0: (shard("w", 0, 1), shard("b", 0)), 1: (shard("w", 1, 2, 3), shard("b", 0)), 2: (shard("v", 3),)}
    assert {rank: rows(own) for rank, own in lone(layout).items()} == {0: {"w": [0]}, 1: {"w": [2, 3]}, 2: {"v": [3]}}


def test_replicas_hold_nothing_alone() -> None:
    same = (shard("w", 0, 1, 2, 3),)
    assert not any(lone({0: same, 1: same}).values()) and not any(mirrored({0: same}).values())


def test_every_rank_keeps_what_the_one_before_it_holds_alone() -> None:
    layout = {0: (shard("w", 0),), 1: (shard("w", 1),), 2: (shard("w", 2),)}
    kept = mirrored(layout)
    assert {rank: rows(own) for rank, own in kept.items()} == {0: {"w": [2]}, 1: {"w": [0]}, 2: {"w": [1]}}
    assert rows(beside(layout[1], (*kept[1], shard("v", 3)))) == {"w": [1, 0], "v": [3]}


def test_copies_are_as_far_apart_as_their_share_of_the_time_asks() -> None:
    assert seldom_enough(0.1, trained=10.0, steps=100) == 200  # 0.1 s beside steps of 0.1 s
    assert seldom_enough(0.0001, trained=10.0, steps=100) == 1
    assert seldom_enough(0.1, trained=0.0, steps=0) == 1


def test_a_copy_is_due_after_so_many_steps_and_at_once_after_a_loss() -> None:
    mirror = Mirror(5)
    assert mirror.is_due(1) and not mirror.is_due(0)
    mirror.renew()
    assert mirror.is_due(0)


def test_copies_are_told_in_words() -> None:
    told = mirror_words({"step": 4, "every": 2, "bytes": 2**21, "moved": 1, "seconds": 0.1})
    assert told == "what one rank alone holds is copied into other ranks' memory every 2 steps (2.0 MiB on rank 0)"
    assert mirror_words({"step": 4, "none": "why"}) == "no copies in other ranks' memory: why"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mirror_every": 2}, "option mirror_every = 2 does nothing where a lost rank ends the run"),
        ({"min_ranks": 2}, "option min_ranks = 2 does nothing with on_loss = 'stop'"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig.create(**options)
    assert said in str(refused.value) and "set on_loss to shrink" in str(refused.value)


class _Process:
    gone, how_ended = False, "left with exit code 3"


class _Processes:
    def __init__(self) -> None:
        self.alive: dict[int, _Process] = {}

    def can_start(self, rank: int) -> bool:
        return True

    def hears_of(self, rank: int) -> bool:
        return True

    def start_one(self, rank: int) -> None:
        self.alive[rank] = _Process()

    def bury(self, rank: int) -> None:
        del self.alive[rank]


def test_a_process_that_is_lost_again_and_again_is_waited_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("phalanx.launch.newcomers.time.monotonic", lambda: now)
    processes, board, started = _Processes(), StatusBoard.private(2), list[int]()
    newcomers = Newcomers(processes, board, lambda process, generation: started.append(process), 15.0)  # pyright: ignore
    generation = Generation(1, (0,))
    newcomers.expect([1])
    assert newcomers.start_due(generation) == [1] and newcomers.is_coming(1) and not newcomers.ready()
    waits: list[float] = []
    for _ in range(4):
        processes.alive[1].gone = True
        began = now
        newcomers.start_due(generation)  # sees that it is gone
        while not newcomers.is_coming(1):
            now += 0.5
            newcomers.start_due(generation)
        waits.append(now - began)
    assert waits == [1.0, 2.0, 4.0, 8.0] and started == [1] * 5
    board.slots[1].await_generation(2)
    assert newcomers.ready() == [1] == newcomers.take_ready() and not newcomers.ready()
    newcomers.dismiss()
    words = "a process that was to take part left with exit code 3; it is started again later"
    assert capsys.readouterr().err.count(words) == 1


def test_a_process_that_held_something_for_a_minute_is_started_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that it is waited with, however long it prepared itself."""
    now = 100.0
    monkeypatch.setattr("phalanx.launch.newcomers.time.monotonic", lambda: now)
    board = StatusBoard.private(2)
    newcomers = Newcomers(_Processes(), board, lambda process, generation: None, 15.0)  # pyright: ignore

    def is_due(seconds: float) -> bool:
        """Once it was lost so many seconds after it came, which took it ten minutes."""
        nonlocal now
        now += 600.0
        board.slots[1].guard(True)
        newcomers.note([0, 1])
        now += seconds
        newcomers.expect([1])
        return newcomers.due() == [1]

    newcomers.expect([1])
    assert newcomers.due() == [1] and is_due(61.0) and not is_due(59.0) and is_due(61.0)

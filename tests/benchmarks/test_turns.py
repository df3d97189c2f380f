"""Two runs that take turns: whose turn it is."""

from __future__ import annotations

import struct
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from turns import _NEVER, Turns, _Place


def test_turns_begin_after_so_many_steps():
    turns = Turns("", world=2, first=15, steps=10)
    assert [turns.number_after(step) for step in (5, 14, 15, 16, 25, 35)] == [None, None, 0, None, 1, 2]


def test_one_run_waits_while_the_other_has_its_turn(tmp_path: Path):
    turns = Turns(str(tmp_path / "turns"), world=2, first=0, steps=1)
    Path(turns.path).write_bytes(struct.pack("q", -1) * 4)
    seen: list[tuple[int, int]] = []  # number, side

    def run(side: int, rank: int) -> None:
        place = _Place(turns, side, rank)
        for number in range(3):
            time.sleep(0.01 * rank)
            place.wait(number)
            seen.append((number, side))
        place.leave(_NEVER)

    ranks = [threading.Thread(target=run, args=(side, rank)) for side in (1, 0) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(10.0)
    assert seen == [(number, side) for number in range(3) for side in (0, 1) for _ in range(2)]

"""The benchmark of what mirrors cost: what it counts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

import mirrors


def test_a_row_has_a_cell_for_every_header() -> None:
    own = {
        "plan": "pp=4", "batch": 16, "processor_off": 0.1, "processor_on": 0.12, "step_off": 0.05, "step_on": 0.05,
    }  # fmt: skip
    assert mirrors.row(own) == ["pp=4", "16", "100.0", "120.0", "+20.0%", "50.0", "50.0", "+0.0%"]
    assert len(mirrors.HEADERS) == 8


def test_processor_time_is_that_of_the_processes() -> None:
    before = mirrors.processor_seconds([os.getpid()])
    sum(range(3_000_000))
    assert 0.0 < mirrors.processor_seconds([os.getpid()]) - before < 30.0

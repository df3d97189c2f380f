"""What holds for every test that loses ranks: nothing is left of them; and the run that most are held against."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import children
from tests.run_helpers import short_run
from tests.survive.left import Seen
from tests.survive.runs import DATA, OPTIONS

_SECONDS = 10.0  # that the end of killed processes may take on a busy machine


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, which nobody leaves."""
    out = tmp_path_factory.mktemp("alone")
    short_run("gpt2", DATA, out, **OPTIONS)
    return out


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Neither processes nor ports, shared memory or open files of the supervisor, once the ranks were ended."""
    if sys.platform != "linux":
        yield
        return
    children._zygote()  # which stays
    pool = request.getfixturevalue("pool") if "pool" in request.fixturenames else None
    before = Seen.now(pool)
    yield
    if pool is not None:
        pool.processes.end()
    deadline = time.monotonic() + _SECONDS
    while (left := Seen.now(pool).left_since(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []

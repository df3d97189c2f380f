"""Joined ranks on a link so slow that a message takes many seconds: signs of life queue behind it, and nobody is lost;
and when a rank does fail, all processes end at once, whatever is still on its way."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from phalanx.lab.run import Lab
from tests.lab.labs import needs_namespaces

pytestmark = needs_namespaces
LINK = "nodes=2,ranks_per_node=1,link=1mbit"
SILENCE = 5  # seconds that a rank may be silent
BYTES_FOR_7_SECONDS = 875_000


def joiner(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "tests.launch.joiner", name, *(json.dumps(argument) for argument in arguments)]


def test_a_healthy_rank_on_a_slow_link_lives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SILENCE", str(SILENCE))
    with Lab(LINK, logs=tmp_path) as lab:
        assert lab.run(joiner("sends_much", BYTES_FOR_7_SECONDS, -1)) == 0
    rank, _, seconds = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert rank == 0 and seconds > SILENCE


def test_after_an_error_on_a_slow_link_ranks_leave_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with Lab(LINK, logs=tmp_path, grace=60) as lab:
        code = lab.run(joiner("sends_much", 20_000_000, 1))
        ended = time.monotonic()
    failed = float((tmp_path / "rank-1.log").read_text().split("fails at ")[1].split()[0])
    assert code != 0 and ended - failed < 20
    assert "error: rank 1 failed in step 1: ValueError: enough" in capfd.readouterr().err

"""`phalanx launch`: a script as several ranks on this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.errors import ConfigError
from phalanx.launch.script import launch_script

WRITES = """
import os, pathlib, sys
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
pathlib.Path(sys.argv[1], rank).write_text(f"{world} {os.environ['LOCAL_RANK']} {sys.argv[2:]}")
"""
FAILS = """
import os, sys, time
sys.exit(3) if os.environ["RANK"] == "1" else time.sleep(600)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def test_every_rank_finds_its_place_and_the_scripts_arguments(tmp_path: Path) -> None:
    assert main(["launch", "--ranks", "2", script(tmp_path, WRITES), str(tmp_path), "--steps", "3"]) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == [f"2 {rank} ['--steps', '3']" for rank in "01"]


def test_all_ranks_end_when_one_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.launch.script._LEAVE_SECONDS", 0.2)
    assert launch_script(script(tmp_path, FAILS), [], 2) == 3


WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path(sys.argv[1], "left" + os.environ["RANK"]).touch()))
pathlib.Path(sys.argv[1], "began" + os.environ["RANK"]).touch()
time.sleep(600)
"""


def test_a_signal_to_end_comes_to_all_ranks(tmp_path: Path) -> None:
    def send() -> None:
        while len(list(tmp_path.glob("began*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(SystemExit) as left:
        launch_script(script(tmp_path, WAITS), [str(tmp_path)], 2)
    sender.join()
    assert left.value.code == 143 and len(list(tmp_path.glob("left*"))) == 2


def test_a_script_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"there is no script 'nowhere\.py'") as info:
        launch_script("nowhere.py", [], 2)
    assert "path of a Python file" in info.value.hint

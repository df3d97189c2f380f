"""examples/own_loop.py: a plain script with at most five changed lines, and the plain script's losses under every
plan."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.launch import script
from tests import children

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "own_loop.py"
CHANGED = re.compile(r"^( *)(\S.*)  # was: (.*)$")


def plain_script() -> str:
    """As it was before it was changed."""
    lines: list[str] = []
    for line in SCRIPT.read_text("utf-8").splitlines():
        changed = CHANGED.match(line)
        if changed is None:
            lines.append(line)
        elif changed[3] != "nothing":
            lines.append(changed[1] + changed[3])
    return "\n".join(lines) + "\n"


def losses(said: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", said)]


@cache
def plain_losses() -> list[float]:
    environment = children.environment(OMP_NUM_THREADS="1")
    done = children.run([sys.executable, "-c", plain_script()], cwd=ROOT, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


def test_at_most_five_lines_are_changed() -> None:
    assert sum(CHANGED.match(line) is not None for line in SCRIPT.read_text("utf-8").splitlines()) <= 5
    assert "phalanx" not in plain_script().partition('"""\n\n')[2]


@pytest.mark.parametrize(
    "plan",
    [
        "pp=2,mb=4",
        pytest.param("tp=2", marks=pytest.mark.long),
        pytest.param("dp=2,zero=2", marks=pytest.mark.long),
        pytest.param("pp=2,mb=2,slices=4", marks=pytest.mark.long),
        pytest.param("pp=2,mb=4,offload=activations", marks=pytest.mark.long),
    ],
)
def test_the_losses_are_those_of_the_plain_script(
    plan: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `phalanx launch` starts it, with ranks that have imported torch already."""
    monkeypatch.setattr(script, "subprocess", SimpleNamespace(Popen=children.Popen))
    for name, value in children.environment(OMP_NUM_THREADS="1").items():
        monkeypatch.setenv(name, value)
    assert script.launch_script(str(SCRIPT), [plan], 2) == 0
    found = losses(capfd.readouterr().out)
    assert len(found) == 6 and found == pytest.approx(plain_losses(), rel=1e-9)

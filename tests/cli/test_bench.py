"""`phalanx bench`: lists the benchmarks of a checkout and becomes the one that is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli import bench
from phalanx.cli.main import main


def checkout(folder: Path, **files: str) -> Path:
    (folder / "benchmarks").mkdir()
    (folder / "pyproject.toml").touch()
    for name, text in {"report": '"""No benchmark."""', **files}.items():
        (folder / "benchmarks" / f"{name}.py").write_text(text)
    return folder


ECHO = '''"""Says what it was given,
in one line.

    python benchmarks/echo.py [WORDS]
"""

import sys

print(sys.argv[1:])
sys.exit(7)
'''


def test_without_a_name_the_benchmarks_are_listed_without_importing_torch():
    code = (
        "import sys; from phalanx.cli.main import main; code = main(['bench']);"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *lines, last = done.stdout.splitlines()
    assert last == "[] 0", done.stderr
    listed = {line.split()[0] for line in lines}
    assert {"scaling", "schedules", "single_gpu", "data_parallel", "pipeline_vs_torch"} <= listed
    assert not {"report", "pages", "compare", "scaling_page", "scaling_ranks"} & listed


def test_a_benchmark_is_a_file_that_shows_how_it_is_called(tmp_path: Path):
    folder = checkout(tmp_path, echo=ECHO, other='"""Uses python benchmarks/other.py in passing."""', bare="x = 1")
    assert bench.benchmarks(folder / "benchmarks") == {"echo": "Says what it was given, in one line."}


def test_the_benchmark_gets_its_options_and_gives_its_exit_code(tmp_path: Path):
    checkout(tmp_path, echo=ECHO)
    code = (
        "import sys, pathlib; from phalanx.cli import bench, main;"
        "bench.CHECKOUT = pathlib.Path(sys.argv[1]); sys.exit(main.main(['bench', 'echo', '--', '--quick', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (7, "['--quick', 'x']"), done.stderr


def test_an_unknown_benchmark_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "scalin"]) == 2
    shown = capsys.readouterr().err
    assert "there is no benchmark 'scalin'" in shown and "did you mean 'scaling'" in shown


@pytest.mark.parametrize("left_out", ["pyproject.toml", "benchmarks/report.py"])
def test_an_installed_package_says_that_a_checkout_is_needed(
    left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (checkout(tmp_path, echo=ECHO) / left_out).unlink()
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert main(["bench"]) == 2
    shown = capsys.readouterr().err
    assert "no benchmarks beside the phalanx package" in shown and "source checkout" in shown

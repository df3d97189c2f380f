"""`phalanx bench`: the benchmarks of a source checkout, listed or run.

They are programs of their own in the folder `benchmarks/`, which is no part of the installed package. What they do is
read from their docstrings, so that listing them imports none of what they measure.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import phalanx
from phalanx.errors import ConfigError, PhalanxError, nearest

CHECKOUT = Path(phalanx.__file__).parent.parent


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    name: Annotated[str | None, typer.Argument(help="which one (default: list them)", show_default=False)] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="after --: its own options, such as --help")] = None,
) -> None:
    """List the benchmarks, or run one."""
    folder = _folder(CHECKOUT)
    found = benchmarks(folder)
    if name is None:
        width = max(map(len, found))
        for one, does in found.items():
            typer.echo(f"{one.ljust(width)}  {does}")
        return
    if name not in found:
        raise ConfigError(f"there is no benchmark {name!r}", nearest(name, found))
    _become(folder / f"{name}.py", arguments or [])


def benchmarks(folder: Path) -> dict[str, str]:
    """Name → what it measures. A benchmark is a file whose docstring shows, indented, how it is called."""
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.py")):
        text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        if f"\n    python benchmarks/{file.name}" in text:
            found[file.stem] = " ".join(text.split("\n\n")[0].split())
    return found


def _folder(checkout: Path) -> Path:
    # Next to an installed package there may be a folder `benchmarks` of somebody else's.
    if not (checkout / "pyproject.toml").is_file() or not (checkout / "benchmarks" / "report.py").is_file():
        raise PhalanxError(
            f"there are no benchmarks beside the phalanx package in {checkout}: they are not installed with it",
            "use a source checkout: pip install -e . in it, then phalanx bench",
        )
    return checkout / "benchmarks"


def _become(file: Path, arguments: list[str]) -> NoReturn:
    """The benchmark takes this process's place, so that Ctrl-C reaches it and nobody else, and its exit code counts."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(file), *arguments])

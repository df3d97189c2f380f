"""`phalanx history`: what happened in a run, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command("history")(history)


def history(run: Annotated[Path, typer.Argument(help="folder of a run")]) -> None:
    """Tell what happened in a run: its plans and their changes, checkpoints, errors, its end."""
    from phalanx.observe.runlog import read_log
    from phalanx.observe.story import story

    log = run / "log-rank0.jsonl"
    if not log.is_file():
        raise ConfigError(f"{run} holds no log of a run ({log.name})", "name the folder of a run (its --out)")
    for line in story(read_log(log)):
        typer.echo(line)

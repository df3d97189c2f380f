"""`phalanx lab`: any command on a virtual cluster on this machine.

The first rank's output passes through; what the lab itself has to say goes to the error output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("lab")(lab)


def lab(
    spec: Annotated[
        str, typer.Argument(help="nodes=2,link=1gbit,device=cpu:1thread or ranks=4,gpu_share=25%; or a file of these")
    ],
    command: Annotated[list[str] | None, typer.Argument(help="after --: what every rank runs")] = None,
    script: Annotated[
        str, typer.Option(help="disturbances, or a file of them: '5s slow_link node=1 rate=100mbit; 20s kill rank=0'")
    ] = "",
    logs: Annotated[
        Path | None, typer.Option(help="folder for the output of the other ranks and the log of events")
    ] = None,
) -> int:
    """Run a command on a virtual cluster: nodes joined by slow links, or ranks that share a GPU."""
    from phalanx.lab.run import Lab, find_command
    from phalanx.lab.script import read_script
    from phalanx.lab.spec import LabSpec

    cluster = LabSpec.read(spec)
    events = read_script(script, cluster)
    find_command(command or [])
    with Lab(cluster, logs=logs) as running:
        for line in running.describe():
            typer.echo(f"lab: {line}", err=True)
        return running.run(command or [], events)

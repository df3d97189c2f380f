"""`phalanx launch`: a script of the user's own, as several ranks on this machine; the machines of a cluster."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command("launch", context_settings=settings)(launch)


def launch(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(help="Python file, and its own arguments; or hosts, or run COMMAND (each has its own --help)."),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Processes to start.", min=1)] = 1,
) -> int:
    """Start a script that calls phalanx.open or phalanx.train as several ranks on this machine.

    phalanx launch hosts: the addresses of a cluster's machines. phalanx launch run COMMAND: a command on all of them.
    """
    from phalanx.launch import hosts

    if script in hosts.WORDS:
        return hosts.main(script, context.args)
    from phalanx.launch.script import launch_script

    return launch_script(script, context.args, ranks)

"""The `phalanx` command: gathers the verbs and turns errors into messages.

A verb is one module of this package with a function `register(app)`, and one entry in VERBS. Verbs import torch and
everything that does inside their functions, so that help stays instant.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import phalanx
from phalanx.cli import (
    bench,
    calibrate,
    change,
    env,
    history,
    inspect,
    lab,
    launch,
    plan,
    profile,
    program,
    train,
    verify,
)  # fmt: skip
from phalanx.errors import PhalanxError
from phalanx.launch.torch_defaults import set_torch_defaults
from phalanx.spellings import said_here

VERBS = (train, change, history, launch, verify, inspect, plan, profile, calibrate, program, lab, bench, env)

# Newer typers carry their own copy of click, older ones use click itself; BadParameter leads to the base of either.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="phalanx",
    help="Train any HuggingFace model across any devices.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"phalanx {phalanx.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (anywhere on the line; PHALANX_DEBUG=1).")
    ] = False,
) -> None:
    if debug:
        # An environment variable reaches the ranks this process starts as well.
        os.environ["PHALANX_DEBUG"] = "1"


for verb in VERBS:
    verb.register(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, 2 for a user's mistake, 130 for Ctrl-C, or what the verb returned."""
    code = _run(_debug_first(sys.argv[1:] if arguments is None else arguments))
    if arguments is None and (join := sys.modules.get("phalanx.launch.join")) is not None:
        join.leave(code)
    return code


def _run(line: list[str]) -> int:
    set_torch_defaults()
    try:
        code = app(args=line, prog_name="phalanx", standalone_mode=False)
        sys.stdout.flush()
    except PhalanxError as error:
        if os.environ.get("PHALANX_DEBUG", "0") not in ("", "0"):
            raise
        return _report(error.message, error.hint)
    except UsageError as error:
        return _report_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail once more at the end
        return _report(f"nothing more can be written: {error.strerror}", "make room, or print to another place")
    return code if isinstance(code, int) else 0


def _debug_first(arguments: Sequence[str]) -> list[str]:
    # People append --debug to the line that failed, where typer would take it for an option of the verb.
    rest = [argument for argument in arguments if argument != "--debug"]
    return ["--debug", *rest] if len(rest) < len(arguments) else rest


def _report_usage(error: Any) -> int:
    if not (message := error.format_message()):
        return 0  # nothing was asked for, and the help was shown
    command = error.ctx.command_path if error.ctx else "phalanx"
    hint = f"{command} --help lists what there is"
    if exact := said_here(getattr(error, "option_name", None) or "", flags=True):
        message, hint = message.partition(" (Possible options")[0], exact  # what is not meant would only confuse
    elif "unexpected extra argument" in message and re.search(r"\(.*\w=", message):
        hint = 'a plan is one word, without spaces (--plan pp=2,mb=4), or in quotes (--plan "pp=2, mb=4")'
    return _report(message, hint)


def _report(message: str, hint: str) -> int:
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(("error: ", "bold red"), message, f"\n  → {hint}" if hint else "")
    Console(stderr=True).print(text, soft_wrap=True)
    return 2

"""`phalanx train`: every field of RunConfig is an option of the command line, written once, in config.py.

Options stay texts here; RunConfig reads and checks them, so a mistake gets the same words from a file, from Python and
from the command line.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from phalanx.config import RunConfig
from phalanx.written import named_values

FLAGS = {"json_output": "--json"}  # where the option's name is not the field's: `json` would hide the module


def register(app: typer.Typer) -> None:
    train.__signature__ = signature()  # pyright: ignore[reportFunctionMemberAccess]
    app.command("train")(train)


def train(**options: Any) -> None:
    """Train a model.

    Everything can also stand in a YAML or JSON file given with --config; options on the command line win over it.
    """
    file = options.pop("config")
    given = {name: _read(name, value) for name, value in options.items() if value not in (None, [], ())}
    if file:
        config = RunConfig.load(file, optimizer=given.get("optimizer")).override(**given)
    else:
        config = RunConfig.create(**given)

    from phalanx.launch.early import early_server
    from phalanx.prepare.early import require_usable

    require_usable(config.model, config.data, config.eval_data, config)
    from phalanx.observe.phases import process_began
    from phalanx.training.trainer import Trainer

    with early_server():
        Trainer.from_config(config, process_began()).fit()


def signature() -> inspect.Signature:
    """The command's parameters: --config and one per field, all optional, so that only what was given overrides."""
    file = typer.Option("--config", metavar="FILE", help="YAML or JSON file of options", show_default=False)
    parameters = [_parameter("config", Annotated[Path | None, file])]
    parameters += [_parameter(name, _annotation(name, field)) for name, field in RunConfig.model_fields.items()]
    return inspect.Signature(parameters)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(name: str, field: FieldInfo) -> Any:
    flag = FLAGS.get(name, "--" + name.replace("_", "-"))
    extra = field.json_schema_extra
    assert isinstance(extra, dict)
    look: dict[str, Any] = {
        "help": f"{field.description} {_shown(field.default)}".rstrip(),
        "rich_help_panel": str(extra["group"]),
        "show_default": False,
    }
    if field.annotation is bool:
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", **look)]
    look["metavar"] = metavar(field.annotation)
    if name == "betas":
        return Annotated[tuple[str, str] | None, typer.Option(flag, **look)]
    if get_origin(field.annotation) in (tuple, dict):
        return Annotated[list[str] | None, typer.Option(flag, **look)]
    return Annotated[str | None, typer.Option(flag, **look)]


def metavar(kind: Any) -> str:
    """What stands for the value in the help: the choices, or the kind of value."""
    members = [member for member in get_args(kind) if member is not type(None)]
    if get_origin(kind) is Annotated:
        return metavar(members[0])
    if get_origin(kind) is Literal:
        return "|".join(members)
    if get_origin(kind) is dict:
        return "NAME=VALUE"
    if get_origin(kind) is tuple:
        return " ".join(metavar(member) for member in members if member is not Ellipsis)
    if members:
        return "|".join(metavar(member) for member in members)
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}[kind]


def _shown(default: Any) -> str:
    if default in (None, "", (), {}, False):
        return ""
    if default is True:
        return r"[dim]\[on][/dim]"
    text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return rf"[dim]\[{text}][/dim]"


def _read(name: str, value: Any) -> Any:
    """Options that are a mapping are given as NAME=VALUE; all others are what RunConfig expects already."""
    if get_origin(RunConfig.model_fields[name].annotation) is not dict:
        return value
    return named_values(name, value)

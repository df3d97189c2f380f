"""`phalanx env`: what is installed and usable on this machine, for people and (with --json) for bug reports.

It only looks; nothing is measured here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
from typing import Annotated, Any

import typer

import phalanx
from phalanx.config import cache_folder
from phalanx.observe.format import bytes_text

# The modules that the extra of that name in pyproject.toml installs.
EXTRAS = {"plots": ("matplotlib",)}


def register(app: typer.Typer) -> None:
    app.command("env")(env)


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Report what is installed and usable here."""
    facts = gather()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print_table(facts)


def gather() -> dict[str, Any]:
    """Everything `phalanx env` reports, as plain data."""
    return {
        "phalanx": phalanx.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{package: _version(package) for package in ("torch", "transformers", "safetensors", "numpy")},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        **_torch_facts(),
        "extras": {extra: all(map(_importable, modules)) for extra, modules in EXTRAS.items()},
        "cache": str(cache_folder()),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _torch_facts() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    distributed = dist.is_available()
    return {
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "nccl": distributed and dist.is_nccl_available() and torch.cuda.is_available(),
        "gloo": distributed and dist.is_gloo_available(),
        "threads": torch.get_num_threads(),
        "devices": [{"name": device.name, "memory_bytes": device.total_memory} for device in found],
    }


def _print_table(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in _rows(facts):
        table.add_row(name, Text(value))
    Console().print(table, soft_wrap=True)


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    devices = [f"{device['name']}, {bytes_text(device['memory_bytes'])}" for device in facts["devices"]]
    missing = [extra for extra, installed in facts["extras"].items() if not installed]
    shown = {
        **facts,
        "memory_bytes": bytes_text(facts["memory_bytes"]),
        "devices": "; ".join(devices) or "cpu only",
        "extras": ", ".join(f"{extra} {'yes' if ok else 'no'}" for extra, ok in facts["extras"].items()),
    }
    if missing:
        shown["extras"] += f"   (pip install 'phalanx[{','.join(missing)}]')"
    return [(name.removesuffix("_bytes"), _text(value)) for name, value in shown.items()]


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)

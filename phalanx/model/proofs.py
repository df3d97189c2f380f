"""What was proven of which model, remembered on disk; and what can be said about a module's state and code.

A proof holds for as long as the graph, the module's attributes, the user's code, ours and the batches stay the same.
Where the code has no file to be recognised by, nothing is remembered.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phalanx
from phalanx.config import cache_folder
from phalanx.model.captured import Captured
from phalanx.model.our_code import our_code
from phalanx.model.zoo.zoo import ModelSpec
from phalanx.records import read_json
from phalanx.tasks.base import Batch

_INSTALLED = tuple({str(Path(path).resolve()) for path in (sys.prefix, sys.base_prefix, *torch.__path__)})
_CONTENTS = ("_parameters", "_buffers", "_modules")  # of a module; the rest are its attributes


def key(spec: ModelSpec, module: nn.Module | None, captured: Captured, batches: Sequence[Batch]) -> str | None:
    """Equal only for what needs no other proof; None where that cannot be known. module: of the user's own, None for
    one that its configuration describes."""
    code = "" if module is None else _own_code()
    if code is None:
        return None
    digest = hashlib.blake2b(digest_size=16)
    blocks = captured.blocks
    config = spec.config.to_json_string(use_diff=False) if spec.config is not None else ""
    graph = [[block.template, block.ports, block.outputs] for block in blocks.blocks]
    for part in (
        spec.name, spec.task, config, code, our_code(), graph, blocks.prologue, sorted(blocks.templates),
        sorted(captured.shapes.items()), attributes_of(module) if module is not None else "",
    ):  # fmt: skip
        digest.update(repr(part).encode())
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _own_code() -> str | None:
    """Of every file that is loaded and neither installed nor ours. None where a script has no file."""
    digest = hashlib.blake2b(digest_size=8)
    ours = str(Path(phalanx.__file__).parent)
    for name, module in list(sys.modules.items()):  # where libraries also put what is no module
        file = getattr(module, "__file__", None)
        if name == "__main__" and (file is None or not Path(file).is_file()):
            return None
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith((*_INSTALLED, ours)):
            continue
        if Path(file).is_file():
            digest.update(file.encode() + Path(file).read_bytes())
    return digest.hexdigest()


def read(key: str | None) -> str | None:
    try:
        return str(read_json(_path(key).read_text())["said"]) if key is not None else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(key: str | None, said: str) -> None:
    if key is None:
        return
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{id(path)}.tmp")
    temporary.write_text(json.dumps({"said": said}))
    temporary.replace(path)


def _path(key: str) -> Path:
    return cache_folder() / "proofs" / f"{key}.json"


def attributes_of(module: nn.Module) -> dict[str, str]:
    """What each part of a module keeps besides tensors and parts, as text without addresses."""
    found = {}
    for path, part in module.named_modules():
        for name, value in sorted(vars(part).items()):
            if name not in _CONTENTS:
                found[f"'{path}.{name}'" if path else f"'{name}'"] = _shown(value)
    return found


def _shown(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return f"{value.__qualname__} {code.co_firstlineno} {code.co_code.hex()} {_without_addresses(code.co_consts)}"
    try:
        return _without_addresses(value)
    except Exception as error:  # a repr of the user's own may fail
        return type(error).__name__


def _without_addresses(value: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", repr(value))[:2000]


def available_memory() -> float:
    """Bytes that this machine could give, as far as it says so."""
    try:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024.0 * int(rows["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return float("inf")

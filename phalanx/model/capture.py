"""From a model specification to blocks: build on meta, export shallow, cut, stamp out, check, cache.

A check is part of it where only an architecture is named: a tiny model of it is captured too and must give the loss and
gradients of the unpatched model, at two shapes, one of them padded. It catches dropped masks and wrong constants in
seconds and is remembered per architecture. Before training, `selfcheck.prove` asks more, with the user's own batches.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.config import cache_folder
from phalanx.errors import CaptureError
from phalanx.model.captured import Captured
from phalanx.model.graph import graphs, hooks, stamp
from phalanx.model.graph.blocks import Block, Blocks, Port, Template, cut
from phalanx.model.graph.export import NotReadable, export
from phalanx.model.graph.functionalise import FlatGraph
from phalanx.model.graph.units import find_layers
from phalanx.model.our_code import our_code
from phalanx.model.selfcheck import self_check
from phalanx.model.weights.weights import tied_names
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.records import read_json
from phalanx.tasks.base import Input


def capture(
    spec: ModelSpec,
    inputs: tuple[Input, ...],
    *,
    dtype: torch.dtype = torch.float32,
    dropout: float | None = None,
    check: bool = True,
    use_cache: bool = True,
) -> Captured:
    """The blocks of a model called with `inputs`. Cached per machine; `check` compares with the unpatched model."""
    model = build(spec, dtype=dtype, device="meta", attention=hooks.NAME, dropout=dropout)
    described = _describe(model, dtype)
    path = _cache_path(spec, inputs, dtype, dropout) if use_cache else None
    stored = _read(path)
    if stored is None:
        with _alone(path):
            if (stored := _read(path)) is None:
                stored = _capture(spec, model, inputs, dtype, dropout)
                if check:
                    self_check(spec, lambda other, ins: capture_for_check(other, ins, torch.float64), stored[1])
                _write(path, *stored)
    blocks, notes = stored
    return Captured(blocks, inputs, notes=tuple(notes), **described)


def _describe(model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise CaptureError(
                f"parameter '{name}' is complex ({_dtype_name(parameter.dtype)}), which training cannot hold",
                "keep its real and imaginary parts as one parameter of real numbers and use torch.view_as_complex",
            )
    widen = dtype == torch.float64  # as the graph's casts are
    return {
        "shapes": {name: tuple(p.shape) for name, p in parameters.items()},
        "aliases": tied_names(model),
        "trainable": tuple(name for name, p in parameters.items() if p.requires_grad),
        "integers": {n: _dtype_name(p.dtype) for n, p in parameters.items() if not p.is_floating_point()},
        "buffers": {n: b.double() if widen and b.is_floating_point() else b for n, b in model.named_buffers()},
    }


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def capture_for_check(spec: ModelSpec, inputs: tuple[Input, ...], dtype: torch.dtype) -> Captured:
    """For a comparison with the plain model: no dropout where it can be set, no cache."""
    model = build(spec, dtype=dtype, device="meta", attention=hooks.NAME, dropout=_no_dropout(spec))
    described = _describe(model, dtype)
    blocks, notes = _capture(spec, model, inputs, dtype, _no_dropout(spec))
    return Captured(blocks, inputs, notes=tuple(notes), **described)


def _no_dropout(spec: ModelSpec) -> float | None:
    return None if spec.factory is not None else 0.0


def _capture(
    spec: ModelSpec, model: nn.Module, inputs: tuple[Input, ...], dtype: torch.dtype, dropout: float | None
) -> tuple[Blocks, list[str]]:
    """Shallow, or at full depth where layers don't repeat and for modules of the user's own: their code may look at its
    depth (`len(self.layers)`), which the truncated module would answer wrongly."""
    if spec.factory is None:
        try:
            return _shallow(model, inputs, dtype)
        except (stamp.NotRepeating, NotReadable):
            model = build(spec, dtype=dtype, device="meta", attention=hooks.NAME, dropout=dropout)
    return _full(model, inputs, dtype)


def _shallow(model: nn.Module, inputs: tuple[Input, ...], dtype: torch.dtype) -> tuple[Blocks, list[str]]:
    classes = stamp.truncate(model, find_layers(model))
    blocks, notes = _full(model, inputs, dtype)
    return stamp.stamp(blocks, classes), notes


def _full(model: nn.Module, inputs: tuple[Input, ...], dtype: torch.dtype) -> tuple[Blocks, list[str]]:
    config = getattr(model, "config", None)
    if config is not None:
        config._attn_implementation = hooks.NAME
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
    flat = export(model, inputs, dtype)
    return cut(flat, find_layers(model)), _own_attention(flat)


def _own_attention(flat: FlatGraph) -> list[str]:
    """A softmax over (queries, keys) means that some module attends by itself, with masks that are really made."""
    for node in flat.graph.nodes:
        if node.target in (torch.ops.aten.softmax.int, torch.ops.aten._softmax.default):
            *_, queries, keys = node.meta["val"].shape
            if isinstance(queries, torch.SymInt) and isinstance(keys, torch.SymInt):
                path = node.meta.get("path", "")
                return [f"attention of '{path}' is computed by the model's own code, with materialised masks"]
    return []


def _cache_path(spec: ModelSpec, inputs: tuple[Input, ...], dtype: torch.dtype, dropout: float | None) -> Path | None:
    """None for modules built by the user: their code cannot be fingerprinted."""
    if spec.factory is not None or spec.config is None:
        return None
    identity = [
        spec.task,
        spec.config.to_json_string(use_diff=False),
        repr(inputs),
        str(dtype),
        dropout,
        repr(spec.lora),
        our_code(),
    ]
    return cache_folder() / "captures" / f"{graphs.fingerprint(json.dumps(identity))}.json"


@contextlib.contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """All ranks of a machine want the same capture at once: one makes it, and the others wait for what it writes."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_suffix(".lock")
    with lock.open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: each makes its own
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _read(path: Path | None) -> tuple[Blocks, list[str]] | None:
    if path is None or not path.exists():
        return None
    try:
        stored = read_json(path.read_text())
        return blocks_from_json(stored["blocks"]), stored["notes"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None  # damaged: capture again


def _write(path: Path | None, blocks: Blocks, notes: list[str]) -> None:
    if path is None:
        return
    temporary = path.with_suffix(f".{id(blocks)}.tmp")
    temporary.write_text(json.dumps({"blocks": blocks_to_json(blocks), "notes": notes}))
    temporary.replace(path)


def blocks_to_json(blocks: Blocks) -> dict[str, Any]:
    return {
        "blocks": [asdict(block) for block in blocks.blocks],
        "templates": {key: asdict(template) for key, template in blocks.templates.items()},
        "prologue": blocks.prologue,
        "prologue_ports": [asdict(port) for port in blocks.prologue_ports],
        "values": blocks.values,
        "loss": blocks.loss,
        "count": blocks.count,
        "conditions": blocks.conditions,
        "never_ignored": blocks.never_ignored,
        "assumed": blocks.assumed,
        "constants": {name: _constant_to_json(value) for name, value in blocks.constants.items()},
    }


def blocks_from_json(data: dict[str, Any]) -> Blocks:
    return Blocks(
        blocks=tuple(Block(b["name"], b["template"], _ports(b["ports"]), tuple(b["outputs"])) for b in data["blocks"]),
        templates={key: Template(t["text"], tuple(t["units"]), t["flops"]) for key, t in data["templates"].items()},
        prologue=data["prologue"],
        prologue_ports=_ports(data["prologue_ports"]),
        values=tuple(data["values"]),
        loss=data["loss"],
        count=data["count"],
        conditions=tuple(data["conditions"]),
        never_ignored=tuple((name, value) for name, value in data["never_ignored"]),
        assumed=data["assumed"],
        constants={name: _constant_from_json(value) for name, value in data["constants"].items()},
    )


def _ports(rows: list[dict[str, str]]) -> tuple[Port, ...]:
    return tuple(Port(row["kind"], row["name"]) for row in rows)


def _constant_to_json(value: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "values": value.flatten().tolist(),
    }


def _constant_from_json(row: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(row["values"], dtype=getattr(torch, row["dtype"])).reshape(row["shape"])

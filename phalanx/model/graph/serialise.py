"""Blocks as JSON and back, for the capture cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from phalanx.model.graph.blocks import Block, Blocks, Port, Template


def blocks_to_json(blocks: Blocks) -> dict[str, Any]:
    return {
        "blocks": [asdict(block) for block in blocks.blocks],
        "templates": {key: asdict(template) for key, template in blocks.templates.items()},
        "prologue": blocks.prologue,
        "prologue_ports": [asdict(port) for port in blocks.prologue_ports],
        "values": blocks.values,
        "loss": blocks.loss,
        "count": blocks.count,
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

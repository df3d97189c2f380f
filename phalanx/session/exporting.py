"""The trained model, out of the ranks that hold it: as a HuggingFace folder, or as whole tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from phalanx.errors import CheckpointError
from phalanx.launch.context import RankContext
from phalanx.model.lora import Lora, adapted_layers, merged
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.params.gather_full import SLOW_DISK, gather_full
from phalanx.session.spare import Member
from phalanx.state.adapters import has_own_adapters, write_adapters, write_own_adapters
from phalanx.state.dcp import write_dcp
from phalanx.state.huggingface import export


def whole_parameters(
    session: Member, context: RankContext, name: str = "whole", timeout: float = SLOW_DISK
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter on rank 0, one at a time; the other ranks must exhaust it too, and get nothing. name, timeout:
    see `gather_full`."""
    state, device = session.state, torch.device(context.device)
    return gather_full(state.layout.all_parameters(), state.values(), context, device, name, timeout)


def export_model(
    session: Member, context: RankContext, spec: ModelSpec, folder: Path, tokenizer: Any = None, *,
    name: str = "whole", merges: bool = False,
) -> Path:  # fmt: skip
    """Rank 0 writes; the others hand it what they hold, one tensor at a time. Of a model with adapters these alone,
    unless they are to be merged into it."""
    tensors = whole = whole_parameters(session, context, name)
    if context.rank > 0:
        for _ in tensors:
            raise AssertionError("only rank 0 gets tensors")
        return folder
    try:
        if spec.lora is not None and not merges:
            return _write_adapters(folder, tensors, spec, spec.lora)
        if spec.lora is not None:
            tensors = merged(tensors, adapted_layers(build(spec, device="meta")), spec.lora)
        plain = build(replace(spec, lora=None), device="meta")
        if has_own_adapters(plain):
            return write_own_adapters(folder, tensors, plain)
        return export(
            folder, model=plain, tensors=tensors, config=spec.config, tokenizer=tokenizer, base_folder=spec.folder
        )
    except OSError as error:
        _exhaust(whole)
        raise CheckpointError(
            f"the trained model could not be exported to {folder}: {error}",
            "the last checkpoint holds all of it: make room, then run the same command with --resume auto",
        ) from error


def export_dcp(
    session: Member, context: RankContext, spec: ModelSpec, folder: Path, tokenizer: Any = None
) -> Path:  # fmt: skip
    """The same as a torch.distributed.checkpoint folder, adapters merged."""
    tensors = whole = whole_parameters(session, context, "whole-dcp")
    if context.rank > 0:
        for _ in tensors:
            raise AssertionError("only rank 0 gets tensors")
        return folder
    if spec.lora is not None:
        tensors = merged(tensors, adapted_layers(build(spec, device="meta")), spec.lora)
    try:
        return write_dcp(folder, tensors, spec.config, tokenizer)
    except OSError as error:
        _exhaust(whole)
        raise CheckpointError(
            f"the trained model could not be written to {folder}: {error}",
            "the last checkpoint holds all of it: make room, then run the same command with --resume auto",
        ) from error


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """The others would wait to be rid of what is left."""
    for _ in tensors:
        pass


def _write_adapters(folder: Path, tensors: Iterator[tuple[str, Tensor]], spec: ModelSpec, lora: Lora) -> Path:
    model = build(spec, device="meta")
    linear = [path for path, part in model.named_modules() if isinstance(part, nn.Linear | Conv1D)]
    return write_adapters(
        folder, tensors, layers=adapted_layers(model), linear=linear, base=str(spec.folder or spec.name),
        task=spec.task, r=lora.r, alpha=lora.alpha, dropout=lora.dropout,
    )  # fmt: skip

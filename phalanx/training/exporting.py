"""The trained model, out of the ranks that hold it: as a HuggingFace folder, or as whole tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.launch.context import RankContext
from phalanx.model.zoo.zoo import ModelSpec, build
from phalanx.params.gather_full import gather_full
from phalanx.state.huggingface import export
from phalanx.training.session import Session


def whole_parameters(session: Session, context: RankContext, name: str = "whole") -> Iterator[tuple[str, Tensor]]:
    """Every parameter on rank 0, one at a time; the other ranks must exhaust it too, and get nothing. name: another one
    each time."""
    state = session.state
    return gather_full(state.layout.all_parameters(), state.values(), context, torch.device(context.device), name)


def export_model(
    session: Session, context: RankContext, spec: ModelSpec, folder: Path, tokenizer: Any = None, name: str = "whole"
) -> Path:
    """Rank 0 writes; the others hand it what they hold, one tensor at a time."""
    tensors = whole_parameters(session, context, name)
    if context.rank > 0:
        for _ in tensors:
            raise AssertionError("only rank 0 gets tensors")
        return folder
    try:
        return export(
            folder, model=build(spec, device="meta"), tensors=tensors, config=spec.config, tokenizer=tokenizer,
            base_folder=spec.folder,
        )  # fmt: skip
    except OSError as error:
        raise CheckpointError(
            f"the trained model could not be exported to {folder}: {error}",
            "the last checkpoint holds all of it: make room, then run the same command with --resume auto",
        ) from error

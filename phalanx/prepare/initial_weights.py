"""Where the initial values of a model come from: a module, a folder, a checkpoint of torch's, or a seed; and that in
words, because nobody should take a model that knows nothing for one that was trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from phalanx.errors import DataError
from phalanx.model.captured import Captured
from phalanx.model.lora import AdaptedWeights
from phalanx.model.weights.init_recipe import record
from phalanx.model.weights.weights import ModuleWeights, SafetensorsWeights, SeededWeights, Weights
from phalanx.model.zoo.zoo import Model, ModelSpec, build
from phalanx.state.dcp import DcpWeights, is_dcp


def open_weights(model: Model, spec: ModelSpec, seed: int, init: str = "auto") -> tuple[Weights, str]:
    """Where the initial values come from, and that in words."""
    if spec.lora is not None:
        shapes = {name: tuple(p.shape) for name, p in build(spec, device="meta").named_parameters()}
        base, said = open_weights(model, replace(spec, lora=None), seed, init)
        return AdaptedWeights(base, shapes, seed), f"{said}; adapters from seed {seed}"
    if isinstance(model, nn.Module):
        return ModuleWeights(model), "the module's own values"
    seeded = SeededWeights(record(lambda: build(spec)), seed)
    folder = spec.folder
    if init == "fresh" or folder is None or not _has_weights(folder):
        return seeded, f"FRESH, from seed {seed}: {_why_fresh(model, spec, init)}"
    if is_dcp(folder):
        return DcpWeights(folder, build(spec, device="meta")), f"from {folder} (torch.distributed.checkpoint)"
    stored = SafetensorsWeights(folder, build(spec, device="meta"), missing_from=seeded)
    said = f"from {folder}"
    if stored.missing:
        said += f"; {len(stored.missing)} that it lacks from seed {seed}: {', '.join(stored.missing[:3])}"
    return stored, said


def load_buffers(captured: Captured, weights: Weights | None, device: torch.device) -> dict[str, Tensor]:
    """The model's buffers on the device; those that the weights' source holds come from there."""
    stored = set(weights.buffer_names()) if weights else set()
    return {
        name: (weights.read(name, dtype=buffer.dtype) if weights and name in stored else buffer).to(device)
        for name, buffer in captured.buffers.items()
    }


def _has_weights(folder: Path) -> bool:
    return is_dcp(folder) or any((*folder.glob("model*.safetensors*"), *folder.glob("pytorch_model*.bin")))


def _why_fresh(model: Model, spec: ModelSpec, init: str) -> str:
    """Nobody should take a model that knows nothing for one that was trained."""
    if init == "fresh":
        return "as asked for (init=fresh)"
    if spec.folder is not None:
        return f"{spec.folder} holds none"
    if not isinstance(model, str | Path):
        return "a configuration or factory has none"
    if spec.name.endswith("-tiny"):
        return "a shrunken model has none"
    return f"none of {spec.name!r} are on this machine (hf download {spec.name} fetches them where the hub has them)"


def require_no_weights(folder: Path, init: str) -> None:
    """Weights that were trained on other tokens would be taught nonsense."""
    if init != "fresh" and _has_weights(folder):
        raise DataError(
            f"{folder} holds weights, but not the tokenizer that they were trained with",
            "put its files (tokenizer.json, tokenizer_config.json …) there, or name their folder with tokenizer=FOLDER "
            "(--tokenizer); tokenizer=bytes only for a model of bytes",
        )

"""Adapters as `peft` stores and loads them: a folder with their two matrices per layer and how they are to be used."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.errors import ConfigError

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_TASKS = {
    "causal-lm": "CAUSAL_LM", "text-to-text": "SEQ_2_SEQ_LM", "speech-to-text": "SEQ_2_SEQ_LM",
    "text-classification": "SEQ_CLS",
}  # fmt: skip


def write_adapters(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    layers: Mapping[str, bool],
    linear: Sequence[str],
    base: str,
    task: str,
    r: int,
    alpha: float,
    dropout: float,
) -> Path:
    """tensors: `lora_A` and `lora_B` of each layer by the model's own names; others are passed over. layers: the path
    of each, and whether its weight is [in, out]. linear: the paths of all layers that could have one."""
    found = {_PREFIX + name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors if ".lora_" in name}
    settings: dict[str, Any] = {
        "peft_type": "LORA", "task_type": _TASKS.get(task), "base_model_name_or_path": base, "revision": None,
        "inference_mode": True, "r": r, "lora_alpha": alpha if alpha % 1 else int(alpha), "lora_dropout": dropout,
        "target_modules": targets(list(layers), linear), "bias": "none", "fan_in_fan_out": all(layers.values()),
        "modules_to_save": None, "init_lora_weights": True, "use_rslora": False, "use_dora": False,
        "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "layers_pattern": None,
        "auto_mapping": None,
    }  # fmt: skip
    with _replacing(folder) as partial:
        save_file(found, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
    return folder


def has_own_adapters(model: nn.Module) -> bool:
    """Whether the user's model came with adapters of `peft`. Nobody has one who has not imported it."""
    peft: Any = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def write_own_adapters(folder: Path, tensors: Iterable[tuple[str, Tensor]], model: nn.Module) -> Path:
    """What `peft` itself writes of a model of its own: what is trained. tensors: by the model's names."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors if name in trained}
    own: Any = model
    with _replacing(folder) as partial:
        own.save_pretrained(str(partial), state_dict=found)
    return folder


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of earlier adapters when all is written."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / SETTINGS).is_file()):
        raise ConfigError(f"cannot write adapters to {folder}: something else is there", "give a new folder")
    partial = folder.parent / f".{folder.name}.writing"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def targets(layers: Sequence[str], linear: Sequence[str]) -> list[str]:
    """What peft finds exactly these layers by: the ends of their names, where no others end so, else whole names."""
    ends = sorted({path.rpartition(".")[2] for path in layers})
    meant = {path for path in linear if path.rpartition(".")[2] in ends}
    return ends if meant == set(layers) else sorted(layers)

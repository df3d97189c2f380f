"""Models by name, without torch: where a name leads, and that it leads nowhere."""

from __future__ import annotations

import difflib
from pathlib import Path

from phalanx.errors import ModelError
from phalanx.model.zoo import zoo_table


def cached_folder(name: str) -> Path | None:
    """The hub's files of this name that are on this machine."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def require_found(model: str | Path) -> None:
    """A name must be that of a model folder, a zoo model or a hub model in the cache."""
    path, name = Path(model).expanduser(), str(model)
    if (path / "config.json").is_file() or (isinstance(model, str) and zoo_table.lookup(name) is not None):
        return
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"folder {name!r} holds adapters, not a model",
            hint="give the model that they were trained beside; train with merge_lora to get a whole model; or load "
            "both with peft in Python and give phalanx.train what it returns",
        )
    if path.is_dir():
        raise ModelError(
            f"folder {name!r} holds no config.json, so it is not a HuggingFace model folder",
            hint="give the folder that save_pretrained wrote (config.json, *.safetensors)",
        )
    if path.is_file():
        raise ModelError(f"{name!r} is a file, not a model folder", hint=f"give the folder: {str(path.parent)!r}")
    if cached_folder(name) is not None:
        return
    close = difflib.get_close_matches(name, zoo_table.names(), n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ModelError(
        f"unknown model {name!r}: neither a zoo name, nor a folder, nor a hub id in the local cache{meant}",
        hint="download a hub model beforehand (hf download NAME): nothing is fetched while training; "
        "phalanx inspect lists the zoo",
    )

"""Tasks: what a model is trained to do, and the batches it is called with.

A task is a class in a small file and a row in `TASKS`. Names are known without importing torch; `get` imports the file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from phalanx.errors import ConfigError, nearest

if TYPE_CHECKING:
    from phalanx.tasks.base import Task

# name → module in this package and the class in it
TASKS: dict[str, tuple[str, str]] = {
    "causal-lm": ("causal_lm", "CausalLM"),
    "masked-lm": ("masked_lm", "MaskedLM"),
    "text-classification": ("classification", "TextClassification"),
    "image-classification": ("classification", "ImageClassification"),
    "speech-to-text": ("sequence_to_sequence", "SpeechToText"),
    "text-to-text": ("sequence_to_sequence", "TextToText"),
}


def get(name: str) -> Task:
    """The task of this name."""
    if name not in TASKS:
        raise ConfigError(f"there is no task named {name!r}", nearest(name, TASKS))
    module, class_name = TASKS[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), class_name)()

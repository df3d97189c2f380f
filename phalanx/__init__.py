"""Phalanx trains any HuggingFace model across any devices.

The public names are below and nowhere else. Each is imported when it is first used, so that `import phalanx` and
`phalanx --help` stay fast: torch and transformers take seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.config import RunConfig
    from phalanx.errors import PhalanxError
    from phalanx.own_loop.open import open
    from phalanx.params.groups import ParameterGroup
    from phalanx.plan.plan import Plan
    from phalanx.training.trainer import Trainer, train
    from phalanx.verification.verify import verify

__version__ = "0.1.0"

__all__ = [
    "ParameterGroup", "Plan", "PhalanxError", "RunConfig", "Trainer", "__version__", "open", "train", "verify",
]  # fmt: skip

_HOMES = {
    "train": "phalanx.training.trainer",
    "Trainer": "phalanx.training.trainer",
    "open": "phalanx.own_loop.open",
    "ParameterGroup": "phalanx.params.groups",
    "RunConfig": "phalanx.config",
    "Plan": "phalanx.plan.plan",
    "verify": "phalanx.verification.verify",
    "PhalanxError": "phalanx.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

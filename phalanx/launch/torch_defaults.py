"""What torch reads when it is imported, set before: for every command (`cli/main.py`), and for the process that starts
ranks where a script of the user's own does so (`processes.py`). What the user set stays.

torch's C++ would say pages about each connection of a rank that is lost, which is told in words. Its allocator would
keep memory of a GPU in pieces that later steps cannot use, of a plan that fills it as many as decide whether it fits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_LOG, _ALLOCATOR = "TORCH_CPP_LOG_LEVEL", "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"  # which the newer name would stand before


def torch_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Of the settings, those that this environment leaves open."""
    found = {_LOG: "FATAL"}
    if _OLD_ALLOCATOR not in environment:
        found[_ALLOCATOR] = "expandable_segments:True"
    return {name: value for name, value in found.items() if name not in environment}


def set_torch_defaults() -> None:
    """Here and in what is started from here."""
    os.environ.update(torch_defaults(os.environ))

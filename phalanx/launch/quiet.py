"""What torch's C++ says is not for the users of a command: pages about each connection of a rank that is lost, which is
told in words.

torch reads it when it is imported, so it is set before: for every command (`cli/main.py`), and for the process that
starts ranks where a script of the user's own does so (`processes.py`).
"""

from __future__ import annotations

import os

QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}


def quiet_torch() -> None:
    """Here and in what is started from here, unless the user wants to hear it."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)

"""Operators of our own: a node in a graph for torch, and the function behind it for whoever runs graphs as they are.

torch's way to such a function (autograd's key, a check of aliases, guards of the compiler) takes a tenth of a
millisecond, as much as a small attention itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # by operator


def own_op(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Makes a function that changes none of its arguments an operator: `phalanx::name`."""

    def made(function: Callable[..., Any]) -> CustomOpDef:
        operator = torch.library.custom_op(f"phalanx::{name}", function, mutates_args=(), schema=schema)
        FUNCTIONS[getattr(torch.ops.phalanx, name).default] = function
        return operator

    return made

"""Parameter groups: which parameters are decayed, trained faster or slower, or not at all, by name and by tensor.

A condition is a glob pattern of names, or a function of a name and a tensor (which has shape and dtype, but no values).
The first group whose condition holds has the parameter; the rest are updated as usual.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.errors import ConfigError, nearest

Condition = str | Callable[[str, Tensor], bool]
_KEYS = ("lr", "decay", "freeze")
_FORM = "write PATTERN:lr=FACTOR, PATTERN:decay=NUMBER, PATTERN:freeze, or several of them with commas"


@dataclass(frozen=True)
class ParameterGroup:
    """lr: what the learning rate is multiplied by. decay: instead of the usual weight decay; None leaves it."""

    which: Condition
    lr: float = 1.0
    decay: float | None = None
    freeze: bool = False

    def __post_init__(self) -> None:
        if self.lr < 0 or (self.decay is not None and self.decay < 0):
            raise ConfigError(f"{self.shown}: lr and decay must not be negative", "to leave values alone, use freeze")
        if self.freeze and (self.lr != 1.0 or self.decay is not None):
            raise ConfigError(f"{self.shown}: what is frozen has neither learning rate nor decay", "leave them out")

    @property
    def shown(self) -> str:
        name = self.which if isinstance(self.which, str) else getattr(self.which, "__name__", repr(self.which))
        return f"parameter group {name!r}"

    @classmethod
    def read(cls, text: str) -> ParameterGroup:
        """From 'PATTERN:lr=0.1,decay=0'."""
        pattern, colon, settings = text.rpartition(":")
        found: dict[str, float | bool] = {}
        for setting in settings.split(",") if colon else ():
            key, equals, value = (part.strip() for part in setting.partition("="))
            if key not in _KEYS or bool(equals) is (key == "freeze"):
                raise ConfigError(f"option groups: {text!r}: {setting.strip()!r} is no setting of a group", _FORM)
            found[key] = True if key == "freeze" else _number(text, value)
        if not pattern or not found:
            raise ConfigError(f"option groups: {text!r} is no parameter group", _FORM)
        return cls(pattern, **found)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Groups:
    """number: the group of each parameter that is in one. frozen: those that are not trained."""

    settings: tuple[ParameterGroup, ...] = ()
    number: Mapping[str, int] = field(default_factory=dict[str, int])
    frozen: frozenset[str] = frozenset()


def group_parameters(
    groups: Sequence[ParameterGroup], shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str],
    dtype: torch.dtype,
) -> Groups:  # fmt: skip
    """Every parameter to the first group that wants it, under any of its names. A group without any is refused."""
    number: dict[str, int] = {}
    for index, group in enumerate(groups):
        chosen = _chosen(group, shapes, aliases, dtype)
        if not chosen:
            hint = nearest(group.which.strip("*"), [*shapes, *aliases]) if isinstance(group.which, str) else ""
            names = list(shapes)
            near = hint if hint.startswith("did you mean") else f"names look like {names[0]!r} or {names[-1]!r}"
            raise ConfigError(f"{group.shown}: no parameter is in it", near)
        number |= {name: index for name in chosen if name not in number}
    return Groups(tuple(groups), number, frozenset(name for name, index in number.items() if groups[index].freeze))


def _chosen(
    group: ParameterGroup, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], dtype: torch.dtype
) -> Collection[str]:
    known = {**{name: name for name in shapes}, **aliases}
    if isinstance(group.which, str):
        return {known[name] for name in fnmatch.filter(known, group.which)}
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    try:
        return {canonical for name, canonical in known.items() if group.which(name, empty[canonical])}
    except Exception as error:
        raise ConfigError(
            f"{group.shown}: its condition failed: {type(error).__name__}: {error}",
            "it is called with the name of a parameter and a tensor that has a shape but no values",
        ) from error


def _number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"option groups: {text!r}: {value!r} is not a number", _FORM) from None

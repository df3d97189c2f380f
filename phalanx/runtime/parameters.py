"""The parameters of this rank: what the engine computes with and, where that is another thing, what is updated.

In bfloat16 the optimizer works on float32 master weights, of which the engine's parameters are rounded copies.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import ConfigError, nearest


@dataclass(frozen=True)
class Parameters:
    """values: every parameter in the dtype of training; masters: float32 weights of trainable ones, where kept."""

    values: dict[str, Tensor]
    masters: dict[str, Tensor]
    trainable: tuple[str, ...]

    @property
    def weights(self) -> dict[str, Tensor]:
        """What the optimizer updates."""
        return {name: self.masters.get(name, self.values[name]) for name in self.trainable}

    def exact(self, name: str) -> Tensor:
        """A parameter in the highest precision there is."""
        return self.masters.get(name, self.values[name])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds: `master/<name>` where there is one, else `model/<name>`."""
        for name, value in self.values.items():
            yield (f"master/{name}", self.masters[name]) if name in self.masters else (f"model/{name}", value)


def load_parameters(
    names: Iterable[str],
    read: Callable[[str, bool], Tensor],
    *,
    trainable: Sequence[str],
    dtype: torch.dtype,
    master_weights: bool,
    device: torch.device,
) -> Parameters:
    """Reads one parameter at a time. `read` gives the values of a name, and is told whether they become a master."""
    values: dict[str, Tensor] = {}
    masters: dict[str, Tensor] = {}
    learns = set(trainable)
    keeps_masters = master_weights and dtype == torch.bfloat16
    for name in names:
        has_master = keeps_masters and name in learns
        value = read(name, has_master)
        if has_master:
            masters[name] = value.to(device, torch.float32)
        # Integer parameters exist (tables of quantised modules); they are not trained and keep their type.
        values[name] = value.to(device, dtype if value.is_floating_point() else value.dtype)
    return Parameters(values, masters, tuple(trainable))


def choose_trainable(
    trainable: Sequence[str], names: Iterable[str], aliases: Mapping[str, str], freeze: Sequence[str]
) -> tuple[str, ...]:
    """The parameters that require gradients and match none of the `freeze` patterns; a tied one matches by any name."""
    known = [*names, *aliases]
    frozen: set[str] = set()
    for pattern in freeze:
        matches = fnmatch.filter(known, pattern)
        if not matches:
            raise ConfigError(f"option freeze: no parameter matches {pattern!r}", _closest(pattern, known))
        frozen.update(aliases.get(name, name) for name in matches)
    left = tuple(name for name in trainable if name not in frozen)
    if not left:
        reason = f"option freeze = {list(freeze)} leaves" if freeze and trainable else "the model has"
        raise ConfigError(f"{reason} no parameter to train", "let at least one parameter require gradients")
    return left


def _closest(pattern: str, known: list[str]) -> str:
    """A model has too many names to list them all."""
    close = nearest(pattern.strip("*"), known)
    return close if close.startswith("did you mean") else f"names look like {known[0]!r} or {known[-1]!r}"

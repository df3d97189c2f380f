"""What the options of a run say about its update, as far as memory and time show it: what state a parameter has.

Torch's own optimizers keep so many numbers of each; a test holds that against what they make (`params/optimizer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from phalanx.contradictions import require_known_optimizer
from phalanx.errors import ConfigError
from phalanx.model.facts.facts import DTYPE_BYTES
from phalanx.written import plain_value


class _Kept(NamedTuple):
    """Numbers that are kept of each element of a parameter, and the options that make it one more each."""

    numbers: int
    more: tuple[str, ...] = ()


_KEPT = {
    "AdamW": _Kept(2, ("amsgrad",)), "Adam": _Kept(2, ("amsgrad",)), "SGD": _Kept(0, ("momentum",)),
    "Adagrad": _Kept(1), "Adadelta": _Kept(2), "Adamax": _Kept(2), "NAdam": _Kept(2), "RAdam": _Kept(2),
    "RMSprop": _Kept(1, ("momentum", "centered")), "Rprop": _Kept(2), "ASGD": _Kept(1),
}  # fmt: skip
_NAMED = {"adamw": "AdamW", "sgd": "SGD"}


@dataclass(frozen=True)
class Update:
    """numbers: that the optimizer keeps of each element of a parameter."""

    optimizer: str = "adamw"
    numbers: int = 2
    master_weights: bool = True

    @staticmethod
    def of(optimizer: str, options: Mapping[str, Any], master_weights: bool) -> Update:
        """As the options of a run of these names say."""
        require_known_optimizer(optimizer)
        kept = _KEPT.get(_NAMED.get(optimizer, optimizer.removeprefix("torch.optim.")))
        if kept is None or not re.fullmatch(r"\w+|torch\.optim\.\w+", optimizer):
            raise _unknown(optimizer)
        values = {name: plain_value(value) for name, value in options.items()}
        for name in values:
            if name not in kept.more:
                raise ConfigError(
                    f"option optimizer_options: {name} changes neither memory nor time of a step of {optimizer}",
                    f"leave it out; {', '.join(kept.more)} would" if kept.more else "leave it out",
                )
        return Update(optimizer, kept.numbers + sum(map(bool, values.values())), master_weights)

    @property
    def shown(self) -> str:
        return _NAMED.get(self.optimizer, self.optimizer)

    @property
    def words(self) -> str:
        count = ("no", "one", "two", "three")[self.numbers]
        return f"{count} moment{'' if self.numbers == 1 else 's'}"


def _unknown(optimizer: str) -> ConfigError:
    if optimizer == "muon":
        why = "its state and update depend on the shapes of matrices, which facts do not hold"
        hint = "plan with adamw, which keeps more; `phalanx train --optimizer muon` says what a rank will hold"
    else:
        why = "what it keeps of a parameter is known of a run alone, which makes it"
        hint = f"choose one of adamw, sgd, {', '.join(f'torch.optim.{name}' for name in _KEPT)}"
    return ConfigError(f"option optimizer = {optimizer!r} cannot be foreseen: {why}", hint)


class TrainingBytes(NamedTuple):
    """Bytes that training keeps of each parameter beside it: the sum of its gradients, its master, and what the
    optimizer knows of it."""

    gradient: int
    master: int
    moments: int

    @staticmethod
    def of(dtype: str, update: Update) -> TrainingBytes:
        """Weights narrower than float32 have masters where that is asked for, and the optimizer's state is as wide."""
        width = DTYPE_BYTES[dtype]
        wide = max(4, width)
        has_masters = update.master_weights and width < wide
        return TrainingBytes(wide, wide if has_masters else 0, update.numbers * (wide if has_masters else width))


ADAMW = Update()

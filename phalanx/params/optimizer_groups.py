"""The parameter groups of a run's optimizer: by the user's groups, by what decays, and by which kind of optimizer
updates it, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.config import RunConfig
from phalanx.params.groups import Groups
from phalanx.params.matrix_wise import KIND, Kind
from phalanx.params.parameters import Weight

LR_SCALE = "lr_scale"  # of a group: what the run's learning rate is multiplied by
MUON, REST = "muon", "adamw"  # kinds, where there are two


def decays(shape: Sequence[int]) -> bool:
    """Matrices decay; biases, norms and other vectors do not."""
    return len(shape) >= 2


@dataclass(frozen=True)
class Entry:
    """A parameter group of the optimizer: of which of the user's groups, whether of what decays (None: of both), of
    which kind."""

    number: int | None
    decays: bool | None
    kind: str
    options: dict[str, Any]

    def has(self, name: str, shape: Sequence[int], groups: Groups, kinds: Mapping[str, Kind]) -> bool:
        mine = groups.number.get(name) == self.number and self.decays in (None, decays(shape))
        return mine and kind_of(name, shape, kinds) == self.kind

    def group(self, weights: Mapping[str, Weight], groups: Groups, kinds: Mapping[str, Kind]) -> dict[str, Any]:
        mine = [w.exact for name, w in weights.items() if self.has(name, w.piece.shape, groups, kinds)]
        own = {KIND: self.kind, **kinds[self.kind].arguments} if len(kinds) > 1 or kinds[""].by_matrix else {}
        return {**own, "params": mine, **self.options}


def entries_of(config: RunConfig, decayed: bool, groups: Groups, kinds: Mapping[str, Kind]) -> list[Entry]:
    """The same groups on every rank, even where one of them has nothing in it."""
    found: list[Entry] = []
    for number, group in ((None, None), *enumerate(groups.settings)):
        if group is not None and group.freeze:
            continue
        own = {} if group is None or group.lr == 1.0 else {LR_SCALE: group.lr, "lr": config.lr * group.lr}
        for kind in kinds:
            if not decayed:
                found.append(Entry(number, None, kind, own))
            elif group is not None and group.decay is not None:
                found.append(Entry(number, None, kind, {"weight_decay": group.decay, **own}))
            else:
                found.append(Entry(number, True, kind, {"weight_decay": config.weight_decay, **own}))
                found.append(Entry(number, False, kind, {"weight_decay": 0.0, **own}))
    return found


def entry_number(
    name: str, shape: Sequence[int], entries: Sequence[Entry], groups: Groups, kinds: Mapping[str, Kind]
) -> int:
    return next(index for index, entry in enumerate(entries) if entry.has(name, shape, groups, kinds))


def kind_of(name: str, shape: Sequence[int], kinds: Mapping[str, Kind]) -> str:
    if len(kinds) == 1:
        return ""
    return MUON if is_layer_matrix(name, shape) else REST


def is_layer_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether it is a matrix of one of several layers, which have numbers in their names: embeddings and heads are
    not, for which Muon is not meant."""
    return len(shape) == 2 and any(part.isdigit() for part in name.split(".")) and "embed" not in name

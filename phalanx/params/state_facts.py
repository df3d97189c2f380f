"""What must be known of a model to say which rank keeps what of its state: plain data, JSON, no torch.

It holds for every plan with the same tensor split (tp, degrees, sequence split), whatever its stages, replicas and
ZeRO: how tensors are split decides which parameters share a bucket. Which rank keeps what is `layout_of`'s work.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phalanx.program.shape import ModelShape
from phalanx.state.local import Local


@dataclass(frozen=True)
class Slot:
    """A tensor that the optimizer keeps for every trained parameter: as large as the parameter, or one number."""

    name: str
    dtype: str
    is_counter: bool = False


@dataclass(frozen=True)
class ParameterFacts:
    """bucket: after the last of the model's, those that no block uses. integer: the dtype of a table of integers, which
    is neither trained nor sharded by ZeRO; empty for numbers in the precision of training. locals: what lies at each tp
    index; empty where all of it does at each."""

    name: str
    shape: tuple[int, ...]
    bucket: int
    trained: bool = True
    integer: str = ""
    locals: tuple[Local, ...] = ()

    def __post_init__(self) -> None:
        assert not (self.trained and self.integer), f"{self.name}: integers are not trained"
        for local in self.locals:
            assert local.shape == self.shape, f"{self.name} of shape {self.shape} is split as {local}"

    @property
    def sharded(self) -> bool:
        """Whether ZeRO shards it, where there is any."""
        return not self.integer

    def local(self, tp_index: int) -> Local:
        return self.locals[tp_index] if self.locals else Local(self.shape)

    def keeper(self, tp_index: int) -> int:
        """The first tp index with the same part of it."""
        return self.locals.index(self.locals[tp_index]) if self.locals else 0


@dataclass(frozen=True)
class StateFacts:
    """parameters: in the order in which they lie in buckets. masters: whether trained parameters are kept in float32
    besides. slots: of the optimizer; None where its state is not laid out as its parameters are."""

    num_blocks: int
    shared: tuple[tuple[int, ...], ...]  # the blocks that use each bucket after those of single blocks
    parameters: tuple[ParameterFacts, ...]
    dtype: str  # the precision of training
    tp: int = 1
    masters: bool = False
    slots: tuple[Slot, ...] | None = ()

    def __post_init__(self) -> None:
        names = [parameter.name for parameter in self.parameters]
        assert len(set(names)) == len(names), f"a parameter occurs twice: {sorted(names)}"
        for parameter in self.parameters:
            assert 0 <= parameter.bucket <= self.num_buckets, f"{parameter.name} is in bucket {parameter.bucket}"
            assert len(parameter.locals) in (0, self.tp), f"{parameter.name} is split for another tp than {self.tp}"

    @property
    def num_buckets(self) -> int:
        """Without that of parameters that no block uses."""
        return self.num_blocks + len(self.shared)

    @cached_property
    def buckets(self) -> Mapping[int, tuple[ParameterFacts, ...]]:
        """The parameters of each bucket that has any."""
        found: dict[int, tuple[ParameterFacts, ...]] = {}
        for parameter in self.parameters:
            found[parameter.bucket] = (*found.get(parameter.bucket, ()), parameter)
        return found

    @cached_property
    def shape(self) -> ModelShape:
        """The buckets as programs know them."""
        of = [self.buckets.get(bucket, ()) for bucket in range(self.num_buckets)]
        trained = tuple(any(parameter.trained for parameter in parameters) for parameters in of)
        return ModelShape(self.num_blocks, self.shared, tuple(map(bool, of)), trained)

    def to_json(self) -> str:
        slots = None if self.slots is None else [[slot.name, slot.dtype, slot.is_counter] for slot in self.slots]
        record = {
            "num_blocks": self.num_blocks, "shared": self.shared, "dtype": self.dtype, "tp": self.tp,
            "masters": self.masters, "slots": slots, "parameters": [_to_json(each) for each in self.parameters],
        }  # fmt: skip
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> StateFacts:
        record = json.loads(text)
        slots = None if record["slots"] is None else tuple(Slot(*slot) for slot in record["slots"])
        parameters = tuple(_from_json(each) for each in record["parameters"])
        return cls(
            record["num_blocks"], tuple(map(tuple, record["shared"])), parameters, record["dtype"], record["tp"],
            record["masters"], slots,
        )  # fmt: skip


def state_facts(
    shape: ModelShape,
    names: Iterable[Iterable[str]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    trainable: Iterable[str],
    dtype: str,
    integers: Mapping[str, str] | None = None,
    locals: Mapping[str, tuple[Local, ...]] | None = None,
    tp: int = 1,
    masters: bool = False,
    slots: tuple[Slot, ...] | None = (),
) -> StateFacts:
    """names: of the parameters of each bucket; those of `shapes` that are in none are used by no block. integers: the
    dtypes of those that are no fractions. locals: what of each lies at each tp index, where they are split."""
    buckets = [tuple(group) for group in names]
    used = {name for group in buckets for name in group}
    learns, tables, split = set(trainable), integers or {}, locals or {}
    parameters = tuple(
        ParameterFacts(
            name, tuple(shapes[name]), bucket, name in learns, "" if name in learns else tables.get(name, ""),
            split.get(name, ()),
        )
        for bucket, group in enumerate((*buckets, (name for name in shapes if name not in used)))
        for name in group
    )  # fmt: skip
    return StateFacts(shape.num_blocks, shape.shared, parameters, dtype, tp, masters, slots)


def _to_json(parameter: ParameterFacts) -> dict[str, Any]:
    return {
        "name": parameter.name, "shape": parameter.shape, "bucket": parameter.bucket, "trained": parameter.trained,
        "integer": parameter.integer, "locals": [[local.dim, local.ranges] for local in parameter.locals],
    }  # fmt: skip


def _from_json(record: Mapping[str, Any]) -> ParameterFacts:
    shape = tuple(record["shape"])
    locals = tuple(Local(shape, dim, tuple((a, b) for a, b in ranges)) for dim, ranges in record["locals"])
    return ParameterFacts(record["name"], shape, record["bucket"], record["trained"], record["integer"], locals)

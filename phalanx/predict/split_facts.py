"""A model as a rank has it that splits its tensors with others, or runs on slices, as plain data: its chains of
segments and redistributions, with the bytes of all that they write, keep and need as expressions over the dims of a
micro-batch. `engine/describe.py` makes it from a graph; that of zoo models is shipped, so that a plan is compiled,
simulated and its memory told without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, cast

from phalanx.model.facts.facts import shipped_text
from phalanx.plan.fields import Degrees, Policies
from phalanx.plan.plan import Plan
from phalanx.program.shape import Backward, BlockOp, ModelShape, Partition

FOLDER = "splits"  # among what is shipped
TP = (2, 4, 8)  # what is shipped of some models, as far as they can be split so
Key = tuple[tuple[int, ...], Partition]  # the blocks that use a bucket, and over whom it is summed


@dataclass(frozen=True)
class Split:
    """What of a plan decides how its tensors lie and what segments keep. degrees: empty where every unit is split over
    all `tp` ranks. recompute: empty where segments are whole blocks that keep what they need. by_unit: every block is
    cut between its units all the same."""

    tp: int = 1
    degrees: Degrees = ()
    sequence: bool = False
    replicate: bool = False
    sliced: bool = False
    recompute: Policies = ()
    by_unit: bool = False

    @staticmethod
    def of(plan: Plan) -> Split:
        degrees = () if all(d == plan.tp for units in plan.degrees for d in units) else plan.degrees
        matters = "light" in plan.policies or (plan.tp == 1 and "unit" in plan.policies)
        recompute = plan.policies if matters else ()
        by_unit = plan.sums_exactly and plan.tp == 1
        return Split(plan.tp, degrees, plan.sequence, plan.replicate, bool(plan.slices), recompute, by_unit)

    @property
    def plan(self) -> Plan:
        """A plan with nothing else in it."""
        return Plan(
            tp=self.tp, degrees=self.degrees, sequence=self.sequence, replicate=self.replicate,
            slices=((1, 1),) if self.sliced else (), recompute=self.recompute, sums="exact" if self.by_unit else "",
        )  # fmt: skip


@dataclass(frozen=True)
class SplitFacts:
    """As the first tensor-parallel rank has the model, which never has less than the others. eager, compiled: its shape
    where operators run one by one, and as a compiler that fuses them leaves it. elements: of each bucket; frozen: of
    these, () where all are trained, as in all that is shipped. parameters: elements that each block uses."""

    split: Split
    dtype: str
    eager: ModelShape
    compiled: ModelShape
    elements: tuple[int, ...]
    parameters: tuple[int, ...]
    frozen: tuple[int, ...] = ()

    def learns(self, block: int) -> float:
        """Of the parameters that a block uses, the share that is trained."""
        shape, used = self.eager, self.parameters[block]
        if not self.frozen or not used:
            return 1.0
        shared = (shape.num_blocks + place for place, users in enumerate(shape.shared) if block in users)
        return 1 - sum(self.frozen[bucket] for bucket in (block, *shared)) / used

    def shape(self, compiled: bool) -> ModelShape:
        learning = [own - still for own, still in zip(self.elements, self.frozen or [0] * len(self.elements))]
        return replace(self.compiled if compiled else self.eager, elements=tuple(learning))


def splits_of(name: str, dtype: str) -> Splits:
    """All that is shipped of the zoo model of exactly this name in this precision."""
    text = shipped_text(name, dtype, FOLDER)
    return Splits({"splits": ()}) if text is None else read_all(text)


@lru_cache(maxsize=4)
def read_all(text: str) -> Splits:
    return Splits(json.loads(text))


class Splits:
    """All that is known of a model, each part read when it is asked for."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data
        self._places = {_split(row["split"]): row for row in data["splits"]}
        self._known: dict[Split, SplitFacts] = {}

    def get(self, split: Split) -> SplitFacts | None:
        if split in self._places and split not in self._known:
            self._known[split] = _Reader(self._data, self._places[split]).facts(split)
        return self._known.get(split)


def write_all(all_facts: Sequence[SplitFacts], blocks: Sequence[str]) -> str:
    """blocks: their names. What several have in common, ops and whole chains, stands there once."""
    writer = _Writer(blocks)
    rows = [writer.row(facts) for facts in all_facts]
    first = all_facts[0]
    names = {"blocks": list(blocks), "layers": list(first.eager.layers), "dtype": first.dtype}
    head = json.dumps(names, ensure_ascii=False)
    return f'{head[:-1]},\n"ops": {_listed(writer.ops.rows)},\n"splits": {_listed(rows)}}}\n'


def _listed(rows: Sequence[Any]) -> str:
    return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows) + "\n]"


def _split(row: Mapping[str, Any]) -> Split:
    return Split(**{name: _tuples(value) for name, value in row.items()})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, cast(list[Any], value))) if isinstance(value, list | tuple) else value


def _unlike_default(of: Any, without: Iterable[str] = ()) -> dict[str, Any]:
    return {
        f.name: value for f in fields(of)
        if f.name not in without and (value := getattr(of, f.name)) != f.default
    }  # fmt: skip


@dataclass
class _Table:
    """Rows without doubles."""

    rows: list[Any] = field(default_factory=list[Any])
    _places: dict[str, int] = field(default_factory=dict[str, int])

    def place(self, row: Any) -> int:
        key = json.dumps(row)
        if key not in self._places:
            self._places[key] = len(self.rows)
            self.rows.append(row)
        return self._places[key]


class _Writer:
    def __init__(self, blocks: Sequence[str]) -> None:
        self._blocks, self.ops = blocks, _Table()

    def row(self, facts: SplitFacts) -> dict[str, Any]:
        shape, chains = facts.eager, _Table()
        keys = _keys(shape)
        places = [chains.place(self._chain(facts, keys, block)) for block in range(shape.num_blocks)]
        together = [(users, sums, n) for (users, sums), n in zip(keys, facts.elements, strict=True) if len(users) > 1]
        row = {
            "split": _unlike_default(facts.split), "inputs": [shape.inputs, facts.compiled.inputs],
            "together": together, "chains": chains.rows, "blocks": places, "granularities": shape.num_whole_blocks,
            "per_micro_batch": sorted(shape.per_micro_batch),
        }  # fmt: skip
        return {name: value for name, value in row.items() if value or name in ("split", "chains", "blocks")}

    def _chain(self, facts: SplitFacts, keys: Sequence[Key], block: int) -> dict[str, Any]:
        own = [bucket for bucket, (users, _) in enumerate(keys) if block in users]
        names = _Relative(self._blocks[block], self._blocks[block - 1] if block else "")
        pairs = zip(facts.eager.ops_of(block), facts.compiled.ops_of(block), strict=True)
        return {
            "ops": [self.ops.place(names.op(*pair, own)) for pair in pairs],
            "parameters": facts.parameters[block],
            "buckets": [(keys[bucket][1], facts.elements[bucket]) for bucket in own if keys[bucket][0] == (block,)],
        }


def _keys(shape: ModelShape) -> list[Key]:
    users = [shape.users(bucket) for bucket in range(shape.num_buckets)]
    return [(own, shape.cells(bucket)) for bucket, own in enumerate(users)]


class _Relative:
    """Names of activations as seen from a block: `:0` and `/3` are its own, `<:0` is of the block before it."""

    def __init__(self, block: str, before: str) -> None:
        self._block, self._before = block, before

    def op(self, eager: BlockOp, compiled: BlockOp, buckets: Sequence[int]) -> dict[str, Any]:
        row = _unlike_default(eager, without=("traced", "working", "buckets"))
        row |= {name: self.names(row[name]) for name in ("reads", "writes") if name in row}
        if eager.kind == "segment":
            row["buckets"] = [buckets.index(bucket) for bucket in eager.buckets or ()]
            plain, fused = self._backward(eager), self._backward(compiled)
            row["eager"] = {name: value for name, value in plain.items() if value != _DEFAULTS[name]}
            row["compiled"] = {name: value for name, value in fused.items() if value != plain[name]}
        return row

    def _backward(self, op: BlockOp) -> dict[str, Any]:
        return {**{name: self.names(value) for name, value in asdict(op.bw).items()}, "working": op.working}

    def names(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self.names(own) for own in cast(list[Any], value)]
        if not isinstance(value, str):
            return value
        for mark, block in (("", self._block), ("<", self._before)):
            if block and value.startswith((f"{block}:", f"{block}/")):
                return mark + value.removeprefix(block)
        return value

    def absolute(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(self.absolute(own) for own in cast(list[Any], value))
        if isinstance(value, str) and value.startswith((":", "/")):
            return self._block + value
        return self._before + value[1:] if isinstance(value, str) and value.startswith("<") else value


_DEFAULTS: dict[str, Any] = {
    f.name: list[Any]() if f.default in (MISSING, ()) else f.default for f in fields(Backward)
} | {"working": ()}  # fmt: skip


class _Reader:
    def __init__(self, data: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        self._data, self._row, self._names = data, row, data["blocks"]

    def facts(self, split: Split) -> SplitFacts:
        row, num_blocks = self._row, len(self._names)
        chains = [row["chains"][place] for place in row["blocks"]]
        elements: dict[Key, int] = {}
        for block, chain in enumerate(chains):
            elements |= {((block,), _tuples(sums)): number for sums, number in chain["buckets"]}
        elements |= {(tuple(users), _tuples(sums)): number for users, sums, number in row.get("together", ())}
        own: list[Key] = [((block,), ()) for block in range(num_blocks)]
        keys = [*own, *sorted(set(elements) - set(own))]
        held = tuple(elements[key] > 0 for key in keys)
        whole = row.get("granularities", 0)
        shapes = [
            ModelShape(
                num_blocks, tuple(users for users, _ in keys[num_blocks:]), held, held,
                tuple(self._ops(block, chain, keys, kind) for block, chain in enumerate(chains)),
                sums=tuple(sums for _, sums in keys) if split.tp > 1 else (),
                granularities=("micro-batch",) * whole + ("slice",) * (num_blocks - whole) if split.sliced else (),
                per_micro_batch=frozenset(row.get("per_micro_batch", ())), inputs=inputs,
                layers=tuple(self._data["layers"]),
            )
            for kind, inputs in zip(("eager", "compiled"), row["inputs"], strict=True)
        ]  # fmt: skip
        parameters = tuple(chain["parameters"] for chain in chains)
        eager, compiled = shapes
        sizes = tuple(elements[key] for key in keys)
        return SplitFacts(split, self._data["dtype"], eager, compiled, sizes, parameters)

    def _ops(self, block: int, chain: Mapping[str, Any], keys: Sequence[Key], kind: str) -> tuple[BlockOp, ...]:
        names = _Relative(self._names[block], self._names[block - 1] if block else "")
        own = [bucket for bucket, (users, _) in enumerate(keys) if block in users]
        return tuple(self._op(self._data["ops"][place], names, own, kind) for place in chain["ops"])

    @staticmethod
    def _op(row: Mapping[str, Any], names: _Relative, buckets: Sequence[int], kind: str) -> BlockOp:
        plain = {n: _tuples(v) for n, v in row.items() if n not in ("eager", "compiled", "buckets", "reads", "writes")}
        plain |= {name: names.absolute(row.get(name, ())) for name in ("reads", "writes")}
        if "eager" not in row:
            return BlockOp(**plain)
        traced = _DEFAULTS | row["eager"] | (row["compiled"] if kind == "compiled" else {})
        working = tuple(traced.pop("working"))
        backward = Backward(**{name: names.absolute(value) for name, value in traced.items()})
        used = tuple(buckets[int(place)] for place in row["buckets"])
        return BlockOp(**plain, buckets=used, traced=backward, working=working)

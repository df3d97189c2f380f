"""Small models as each rank of a tensor-parallel group would see them, made by hand: parameters whole, split evenly or
not, fused, or kept by several ranks; some with a sum, some without."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from phalanx.engine.compose import bucket_names
from phalanx.engine.layout import RankLayout
from phalanx.model.graph.blocks import Block, Blocks, Port
from phalanx.model.shard.sharded import LocalParameter, Part, Redistribution, Sharded
from phalanx.params.layout_of import StateLayout
from phalanx.params.parameters import Parameters, load_parameters
from phalanx.params.state_facts import Slot, StateFacts, state_facts
from phalanx.plan.plan import Plan
from phalanx.program.shape import BlockOp, Partition
from phalanx.state.local import Local

CPU = torch.device("cpu")


def blocks_of(*uses: Sequence[str]) -> Blocks:
    """One block for each list of parameters."""
    found = tuple(
        Block(f"block{index}", "", tuple(Port("parameter", name) for name in names), ())
        for index, names in enumerate(uses)
    )
    return Blocks(found, {}, "", (), (), "loss", "count")


@dataclass(frozen=True)
class Split:
    """A parameter whose sections (sizes along `dim`) are cut into `cells` parts as even as they can be; `keeper` is the
    part of each tp index. No sections: every rank keeps all of it."""

    shape: tuple[int, ...]
    dim: int
    sections: tuple[int, ...]
    keeper: tuple[int, ...]
    summed: bool

    def at(self, tp_index: int) -> LocalParameter:
        parts = max(self.keeper) + 1
        holders = tuple(tuple(i for i, part in enumerate(self.keeper) if part == cell) for cell in range(parts))
        return LocalParameter(tuple(map(self._local, self.keeper)), tp_index, holders if self.summed else ())

    def _local(self, part: int) -> Local:
        parts = max(self.keeper) + 1
        ranges: list[tuple[int, int]] = []
        for number, size in enumerate(self.sections):
            begin = sum(self.sections[:number])
            ranges.append((begin + size * part // parts, begin + size * (part + 1) // parts))
        return Local(self.shape, self.dim, tuple(ranges))


@dataclass(frozen=True)
class Model:
    """uses: the parameters of each block; a block's second segment uses those after the first half of them."""

    uses: tuple[tuple[str, ...], ...]
    splits: Mapping[str, Split]
    tp: int
    unused: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()  # which are frozen, too

    @property
    def blocks(self) -> Blocks:
        return blocks_of(*self.uses)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: split.shape for name, split in self.splits.items()} | dict.fromkeys(self.unused, (3, 5))

    def sharded(self, tp_index: int, *cells: Partition) -> Sharded:
        """cells: of the redistribution between the two segments of each block."""
        halves = [half for names in self.uses for half in (names[: len(names) // 2], names[len(names) // 2 :])]
        redistributions = tuple(Part(redistribution=Redistribution("all_reduce", "a", "b", each)) for each in cells)
        parts = tuple((Part(segment=2 * b), *redistributions, Part(segment=2 * b + 1)) for b in range(len(self.uses)))
        local = {name: split.at(tp_index) for name, split in self.splits.items()}
        steps = tuple(
            tuple(BlockOp("redistribution" if p.redistribution else "segment", (), (), 2) for p in chain)
            for chain in parts
        )
        return Sharded(blocks_of(*halves), parts, steps, local, ())

    @property
    def trainable(self) -> list[str]:
        return [name for name in self.shapes if name not in (*self.frozen, *self.integers)]

    def facts(self, dtype: str = "float32", slots: tuple[Slot, ...] = ()) -> StateFacts:
        sharded = self.sharded(0) if self.tp > 1 else None
        buckets = bucket_names(self.blocks, self.trainable, sharded)
        locals = {name: each.locals for name, each in sharded.parameters.items()} if sharded else None
        return state_facts(
            buckets.shape, buckets.names, self.shapes, trainable=self.trainable, dtype=dtype, locals=locals,
            integers=dict.fromkeys(self.integers, "int64"), tp=self.tp, masters=dtype == "bfloat16", slots=slots,
        )  # fmt: skip

    def formation(self, plan: Plan, rank: int, *cells: Partition, dtype: str = "float32") -> RankLayout:
        sharded = self.sharded(rank % self.tp, *cells) if self.tp > 1 else None
        shape = bucket_names(self.blocks, self.trainable, sharded).shape
        return RankLayout(plan, shape, self.facts(dtype), rank, sharded)

    def values(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        found = {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
        return found | {name: (100 * found[name]).long() for name in self.integers}


def parameters_of(state: StateLayout, rank: int, values: Mapping[str, Tensor]) -> Parameters:
    """What a rank would keep, without the groups over which it would gather it."""
    return load_parameters(
        state, rank, lambda name, is_master, piece: piece.of(values[name]), device=CPU,
        zero=None,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip


@st.composite
def splits(draw: st.DrawFn, tp: int) -> Split:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(shape) - 1))
    degree = draw(st.sampled_from([k for k in range(1, tp + 1) if tp % k == 0]))
    parts = draw(st.integers(1, degree))
    keeper = tuple((index % degree) * parts // degree for index in range(tp))
    size = shape[dim]
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
    sections = tuple(b - a for a, b in itertools.pairwise(cuts)) if parts > 1 else ()
    return Split(shape, dim, sections, keeper, draw(st.booleans()))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, Plan]:
    """A model of three blocks with a tied parameter, and a plan for it."""
    pp, dp, tp = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    zero = draw(st.integers(0, 3)) if dp > 1 else 0
    degrees = [0, *(d for d in range(2, dp + 1) if dp % d == 0)]
    names = [[f"block{b}.{n}" for n in range(draw(st.integers(0, 3)))] for b in range(3)]
    uses = (("tied", *names[0]), tuple(names[1]), (*names[2], "tied"))
    found = {name: draw(splits(tp)) for name in dict.fromkeys(name for block in uses for name in block)}
    unused = draw(st.sampled_from([(), ("unused",)]))
    stages = {1: (3,), 2: (1, 2), 3: (1, 1, 1)}[pp]
    degree = draw(st.sampled_from(degrees)) if zero else 0
    return Model(uses, found, tp, unused), Plan(pp=pp, dp=dp, tp=tp, zero=zero, zero_degree=degree, stages=stages)


@st.composite
def plans_of(draw: st.DrawFn, model: Model) -> Plan:
    """A plan for a model of three or four blocks, without virtual stages."""
    pp, dp, last = draw(st.integers(1, 3)), draw(st.integers(1, 4)), len(model.uses) - 2
    stages = {1: (last + 2,), 2: (1, last + 1), 3: (1, 1, last)}[pp]
    zero = draw(st.integers(0, 3)) if dp > 1 else 0
    return Plan(pp=pp, dp=dp, tp=model.tp, zero=zero, stages=stages)


@st.composite
def varied_cases(draw: st.DrawFn) -> tuple[Model, Plan]:
    """Some of the parameters are frozen, some of those integers, and a rank may hold several stages."""
    model, plan = draw(cases())
    kinds = {name: draw(st.sampled_from(["trained", "trained", "frozen", "integer"])) for name in model.shapes}
    model = replace(
        model,
        frozen=tuple(name for name, kind in kinds.items() if kind == "frozen"),
        integers=tuple(name for name, kind in kinds.items() if kind == "integer"),
    )
    if draw(st.booleans()):
        uses = (*model.uses, ("last", "tied"))
        model = replace(model, uses=uses, splits={**model.splits, "last": draw(splits(plan.tp))})
        turns = {1: [("1f1b", 1)], 2: [("interleaved", 2), ("zb-v", 2)], 3: [("1f1b", 1)]}[plan.pp]
        schedule, v = draw(st.sampled_from(turns))
        stages = {1: (4,), 2: (1, 1, 1, 1), 3: (1, 1, 2)}[plan.pp]
        plan = replace(plan, schedule=schedule, v=v, stages=stages, mb=2 * plan.pp)
    return model, plan

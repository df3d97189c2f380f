"""Small models as each rank of a tensor-parallel group would see them, made by hand: parameters whole, split evenly or
not, fused, or kept by several ranks; some with a sum, some without."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from phalanx.model.graph.blocks import Block, Blocks, Port
from phalanx.model.shard.sharded import Exchange, LocalParameter, Part, Sharded
from phalanx.plan.plan import Plan
from phalanx.program.shape import Partition
from phalanx.runtime.formation import Formation
from phalanx.runtime.model_shape import bucket_names
from phalanx.runtime.parameters import Parameters, load_parameters
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
        ranges: list[tuple[int, int]] = []
        for number, size in enumerate(self.sections):
            begin, part = sum(self.sections[:number]), self.keeper[tp_index]
            ranges.append((begin + size * part // parts, begin + size * (part + 1) // parts))
        return LocalParameter(Local(self.shape, self.dim, tuple(ranges)), holders, holders if self.summed else ())


@dataclass(frozen=True)
class Model:
    """uses: the parameters of each block; a block's second segment uses those after the first half of them."""

    uses: tuple[tuple[str, ...], ...]
    splits: Mapping[str, Split]
    tp: int
    unused: tuple[str, ...] = ()

    @property
    def blocks(self) -> Blocks:
        return blocks_of(*self.uses)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: split.shape for name, split in self.splits.items()} | dict.fromkeys(self.unused, (3, 5))

    def sharded(self, tp_index: int, *cells: Partition) -> Sharded:
        """cells: of the exchange between the two segments of each block."""
        halves = [half for names in self.uses for half in (names[: len(names) // 2], names[len(names) // 2 :])]
        exchanges = tuple(Part(exchange=Exchange("sum", "a", "b", each)) for each in cells)
        parts = tuple((Part(segment=2 * b), *exchanges, Part(segment=2 * b + 1)) for b in range(len(self.uses)))
        local = {name: split.at(tp_index) for name, split in self.splits.items()}
        return Sharded(blocks_of(*halves), parts, ((),) * len(self.uses), local, ())

    def formation(self, plan: Plan, rank: int, *cells: Partition) -> Formation:
        sharded = self.sharded(rank % self.tp, *cells) if self.tp > 1 else None
        return Formation(plan, bucket_names(self.blocks, self.shapes, sharded), self.unused, rank, sharded)

    def values(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}


def parameters_of(
    formation: Formation, model: Model, values: Mapping[str, Tensor], *, frozen: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> Parameters:  # fmt: skip
    """What a rank would keep, without the groups over which it would gather it."""
    return load_parameters(
        formation.held(), formation.locals(model.shapes), lambda name, is_master, piece: piece.of(values[name]),
        trainable=[name for name in model.shapes if name not in frozen], dtype=dtype, master_weights=True,
        device=CPU, sharding=formation.sharding(), zero=None,  # pyright: ignore[reportArgumentType]
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

"""Mutations: whatever small thing is wrong in a table, the check of values finds it and names the place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest

from phalanx.plan.plan import Plan
from phalanx.program.check_values import Broken, check_values
from phalanx.program.compile import CompiledPlan, compile_plan
from phalanx.program.instructions import Op
from phalanx.program.shape import BlockOp, ModelShape
from phalanx.program.values import Row, Table
from tests.program.random_plans import chain, simple_shape
from tests.program.sliced_plans import encoder_decoder
from tests.program.tensor_shapes import segment, stack

NUM_ALIKE = 3  # mutations of a kind that are tried: the same thing, with the same kind of value, at the same operation


class Mutation(NamedTuple):
    """What was done to which row with which value, and the table after it."""

    name: str
    position: int
    value: int
    table: Table

    @property
    def kind(self) -> str:
        return self.table.values[self.value].kind

    @property
    def op(self) -> Op:
        return self.table.rows[self.position].instruction.op

    def __str__(self) -> str:
        return f"{self.name} {self.table.values[self.value]} at {self.table.rows[self.position].instruction}"


def attending(num_blocks: int) -> ModelShape:
    """Blocks that keep keys and values of earlier slices."""
    steps = tuple((BlockOp("segment", (f"h{n}",) if n else (), (f"h{n + 1}",), 1, pasts=1),) for n in range(num_blocks))
    return replace(simple_shape(num_blocks), ops=steps)


def by_units(num_blocks: int) -> ModelShape:
    """Blocks of two segments, the second of which reads what the block was given, too."""
    plain = simple_shape(num_blocks)
    steps = [
        (segment(f"h{n}" if n else "", f"r{n}"), segment(f"r{n} h{n}" if n else f"r{n}", f"h{n + 1}"))
        for n in range(num_blocks)
    ]
    return replace(plain, ops=tuple(steps))


PLANS = {
    "1f1b": ("pp=2,mb=3,stages=2-1", chain(3, "1", "1", "1")),
    "recompute": ("mb=2,recompute=yes,stages=2", simple_shape(2)),
    "units": ("mb=2,recompute=unit,stages=2", by_units(2)),
    "policies": ("pp=2,mb=2,recompute=unit+light+block,stages=2-2", replace(by_units(4), layers=(1, 2, 3))),
    "policies of split layers": (
        "tp=2,mb=1,recompute=block+unit,sequence=yes,save=input,stages=2",
        replace(stack(2, sequence=True), layers=(0, 1)),
    ),
    "zb-h1": ("pp=2,mb=3,schedule=zb-h1,stages=2-1", chain(3, "1", "1", saved_w="1")),
    "zb-v": ("pp=2,mb=2,schedule=zb-v,stages=1-1-1-1", simple_shape(4)),
    "interleaved": ("pp=2,mb=2,schedule=interleaved,v=2,stages=1-1-1-1", simple_shape(4)),
    "tied": ("pp=2,dp=2,mb=2,stages=2-1", simple_shape(3, (0, 2))),
    "zero=1": ("dp=4,mb=2,zero=1,zero_degree=2,stages=3", simple_shape(3)),
    "zero=2": ("dp=2,mb=3,zero=2,stages=3", simple_shape(3)),
    "zero=3": ("dp=2,mb=2,zero=3,stages=4", simple_shape(4, (0, 3))),
    "oases": ("pp=2,tp=2,overlap=oases,sequence=yes,stages=1-1", stack(2, sequence=True, sums=True)),
    "slices": ("pp=2,mb=2,slices=3,stages=1-1", attending(2)),
    "halves of slices": ("tp=2,slices=2,overlap=halves,stages=1", stack(1)),
    "offload": ("mb=2,stages=6,offload=activations", chain(6, "1", "1", "1")),
    "offload in a pipeline": ("pp=2,mb=2,recompute=unit,stages=3-3,offload=activations:1", by_units(6)),
    "optimizer": ("dp=2,mb=2,zero=1,stages=3,offload=optimizer", replace(simple_shape(3), elements=(3, 1, 1))),
    "optimizer-step": ("mb=2,stages=3,offload=optimizer-step:0.7", replace(simple_shape(3), elements=(3, 1, 1))),
    "gradients of ranks leave": ("dp=2,mb=2,zero=2,stages=3,offload=optimizer-step", simple_shape(3)),
    "parameters": ("mb=2,stages=3,offload=parameters:2", replace(simple_shape(3), elements=(3, 1, 1))),
    "parameters of shards": ("dp=2,mb=2,zero=3,stages=3,offload=parameters+optimizer-step", simple_shape(3)),
    "block by block": ("mb=2,schedule=block-major,v=3,stages=1-1-1,offload=activations+parameters", chain(3, "1", "1")),
    "encoder-decoder": ("pp=2,tp=2,mb=2,slices=2,stages=2-1", encoder_decoder(1, 2)),
}  # fmt: skip


def mutations(table: Table) -> Iterator[Mutation]:
    for position, row in enumerate(table.rows):
        for name in ("reads", "writes", "adds", "frees", "waits", "collects"):
            ids = getattr(row, name)
            for n, i in enumerate(ids):
                shorter = row._replace(**{name: ids[:n] + ids[n + 1 :]})
                yield Mutation(
                    f"omit {name}", position, i[0] if name == "collects" else i, _with(table, {position: shorter})
                )
        for name in ("writes", "adds", "frees"):
            for i in (ids := getattr(row, name)):
                longer = row._replace(**{name: (*ids, i)})
                yield Mutation(f"double {name}", position, i, _with(table, {position: longer}))
        for i in row.frees:
            yield from _freed_elsewhere(table, position, i)


def _freed_elsewhere(table: Table, position: int, i: int) -> Iterator[Mutation]:
    """One touch earlier, and once more with the next row."""
    row = table.rows[position]
    touched = [p for p in range(position) if i in (*table.rows[p].reads, *table.rows[p].writes, *table.rows[p].adds)]
    if touched:
        before = table.rows[touched[-1]]
        without = row._replace(frees=tuple(own for own in row.frees if own != i))
        changed = {position: without, touched[-1]: before._replace(frees=(*before.frees, i))}
        yield Mutation("free early", position, i, _with(table, changed))
    if position + 1 < len(table.rows):
        after = table.rows[position + 1]
        again = {position + 1: after._replace(frees=(*after.frees, i))}
        yield Mutation("free again", position + 1, i, _with(table, again))


def _with(table: Table, rows: dict[int, Row]) -> Table:
    return Table(tuple(rows.get(position, row) for position, row in enumerate(table.rows)), table.values)


def sampled(table: Table) -> Iterator[Mutation]:
    """Some of each kind, over the whole program."""
    alike: defaultdict[tuple[str, str, Op], list[Mutation]] = defaultdict(list)
    for mutation in mutations(table):
        alike[mutation.name, mutation.kind, mutation.op].append(mutation)
    for own in alike.values():
        yield from own[:: max(1, len(own) // NUM_ALIKE)][:NUM_ALIKE]


def changes_nothing(compiled: CompiledPlan, mutation: Mutation) -> bool:
    """Whether the table means the same as before. What is added to is read with it; and of what outlives the step only
    parameters that are shared at its end may be on their way when the next begins."""
    row = mutation.table.rows[mutation.position]
    if mutation.name == "omit reads":
        return mutation.kind in ("state", "host.state") and mutation.value in row.adds
    shared = {it.block for program in compiled.programs for it in program if it.op is Op.SHARE}
    on_its_way = mutation.kind == "parameters" and int(mutation.table.values[mutation.value].what) in shared
    earlier = (row for row in mutation.table.rows[: mutation.position] if row.instruction.op is Op.OUT)
    on_its_way = on_its_way or any(mutation.value in row.adds for row in earlier)
    resident = mutation.kind in ("parameters", "state", "host.state")
    return mutation.name == "omit waits" and resident and not on_its_way


HOLES = {
    "totals": "what NORM and STEP read of losses and of sums is held against nothing",
    "losses": "a training step may leave losses behind, although only an evaluation is run for them",
    "parts": "parts that arrive for a sum over ranks are not counted: one may be lost",
    "senders": "what a collective sends may be freed while it is on its way",
    "shared": "parameters that the step before left on their way need not be waited for",
}


def hole_of(mutation: Mutation) -> str:
    """Which known hole of the check of values it falls through; empty: it must be found."""
    name, kind, op = mutation.name, mutation.kind, mutation.op
    if name == "omit reads" and op in (Op.NORM, Op.STEP) and kind in ("loss", "d_parameters", "reduced"):
        return "totals"
    if name == "omit frees" and kind == "loss":
        return "losses"
    if name in ("omit adds", "omit collects", "omit reads") and kind == "reduced":
        return "parts"
    row = mutation.table.rows[mutation.position]
    if name == "free early" and mutation.value not in (*row.reads, *row.writes, *row.adds):
        return "senders"
    return "shared" if name == "omit waits" and kind == "parameters" else ""


@cache
def compiled_of(name: str) -> CompiledPlan:
    text, shape = PLANS[name]
    return compile_plan(Plan.parse(text), shape)


def breaks(compiled: CompiledPlan, index: int, mutation: Mutation) -> Broken | None:
    try:
        check_values(compiled.plan, compiled.shape, index, mutation.table)
    except Broken as broken:
        return broken
    return None


LIGHT = ("1f1b", "zero=3", "slices", "offload")  # in `make check`


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in LIGHT else pytest.mark.heavy) for name in PLANS]
)
def test_every_mutation_is_found_where_it_is(name: str) -> None:
    compiled = compiled_of(name)
    for index, table in enumerate(compiled.tables):
        check_values(compiled.plan, compiled.shape, index, table)
        for mutation in sampled(table):
            broken = breaks(compiled, index, mutation)
            if broken is None:
                assert changes_nothing(compiled, mutation) or hole_of(mutation), f"{mutation} is not found"
                continue
            assert broken.index == index
            brought = mutation.kind in ("gathered", "fetched")  # of which no more than two may be there
            if mutation.name == "omit frees" and (not brought or broken.position is None):
                assert broken.position is None and str(table.values[mutation.value]) in broken.words, str(mutation)
            elif mutation.name in ("omit writes", "omit frees"):  # here, or where it is noticed
                assert broken.position is not None and broken.position >= mutation.position, str(mutation)
            else:
                assert broken.position is not None and broken.position <= mutation.position, str(mutation)
                assert broken.words.endswith(f"at {table.rows[broken.position].instruction}")


@pytest.mark.heavy
@pytest.mark.parametrize("hole", HOLES)
def test_no_mutation_falls_through(hole: str) -> None:
    for compiled in map(compiled_of, PLANS):
        for index, table in enumerate(compiled.tables):
            for mutation in sampled(table):
                if hole_of(mutation) == hole and not changes_nothing(compiled, mutation):
                    assert breaks(compiled, index, mutation), f"{HOLES[hole]}: {mutation} is not found"

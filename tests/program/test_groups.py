"""The ranks a collective runs over follow from the plan's mesh, ZeRO and what is shared."""

from __future__ import annotations

import pytest
from hypothesis import given

from phalanx.plan.plan import Plan
from phalanx.program.compile import compile_plan
from phalanx.program.groups import group_of
from phalanx.program.instructions import COLLECTIVES, from_text
from phalanx.program.shape import ModelShape
from tests.program.random_plans import cases, simple_shape
from tests.program.tensor_shapes import redistribution, tensor_cases


@pytest.mark.parametrize("plan, rank, word, group", [
    ("pp=2,dp=4,stages=2-1", 5, "COUNT", (4, 5, 6, 7)),
    ("pp=2,dp=2,stages=2-1", 1, "NORM", (0, 1, 2, 3)),
    ("pp=2,dp=4,stages=2-1", 5, "R1.0/2", (4, 5, 6, 7)),
    ("pp=2,dp=4,zero=1,stages=2-1", 5, "R1.0/2", (4, 5, 6, 7)),
    ("pp=2,dp=4,zero=2,zero_degree=2,stages=2-1", 5, "R1.0/2", (4, 5)),
    ("pp=2,dp=4,zero=2,zero_degree=2,stages=2-1", 5, "S/2", (5, 7)),
    ("pp=2,dp=4,zero=3,zero_degree=2,stages=2-1", 6, "G1.0/2", (6, 7)),
    ("pp=2,dp=4,zero=1,zero_degree=2,stages=2-1", 3, "P/0", (2, 3)),
    ("pp=2,dp=2,stages=2-1", 3, "T/3", (1, 3)),
    ("pp=1,dp=1,stages=3", 0, "NORM", (0,)),
])  # fmt: skip
def test_each_kind_of_collective_has_its_groups(plan: str, rank: int, word: str, group: tuple[int, ...]) -> None:
    (instruction,) = from_text(word)
    assert group_of(Plan.parse(plan), simple_shape(3, (0, 2)), rank, instruction) == group


TENSOR = ModelShape(
    3, (), (True,) * 3, (True,) * 3,
    ops=((redistribution("a", "b", ((0, 1), (2, 3)), "all_reduce"),
          redistribution("b", "c", ((0, 1, 2, 3),), "", "all_reduce")),
         (redistribution("a", "b", (), "all_reduce"),), ()),
    sums=(((0, 1), (2, 3)), (), ((0, 2), (1, 3))),
)  # fmt: skip


@pytest.mark.parametrize("plan, rank, word, group", [
    ("tp=4,stages=3", 2, "CF0.0/0:0", (2, 3)),
    ("dp=2,tp=4,stages=3", 5, "CA0.0a/0:0", (4, 5)),
    ("dp=2,tp=4,stages=3", 5, "CB0.0/0:1", (4, 5, 6, 7)),
    ("tp=4,stages=3", 0, "CF0.0/1:0", (0,)),
    ("tp=4,stages=3", 3, "R0.0/0", (2, 3)),
    ("tp=4,stages=3", 3, "R0.0/1", (3,)),
    ("dp=2,tp=4,stages=3", 3, "R0.0/0", (2, 3, 6, 7)),
    ("dp=2,tp=4,stages=3", 3, "R0.0/1", (3, 7)),
    ("dp=2,tp=4,zero=1,stages=3", 3, "R0.0/2", (3, 7)),
    ("dp=2,tp=4,zero=1,stages=3", 3, "S/2", (1, 3)),
    ("dp=4,tp=4,zero=1,zero_degree=2,stages=3", 0, "R0.0/2", (0, 4)),
    ("dp=4,tp=4,zero=1,zero_degree=2,stages=3", 0, "S/2", (0, 2, 8, 10)),
    ("dp=2,tp=4,stages=3", 5, "COUNT", (1, 5)),
    ("dp=2,tp=4,zero=3,stages=3", 5, "G0.0/0", (1, 5)),
    ("dp=2,tp=2,stages=3", 1, "NORM", (0, 1, 2, 3)),
])  # fmt: skip
def test_redistributions_run_over_a_cell_and_sums_over_the_replicas_of_a_cell(
    plan: str, rank: int, word: str, group: tuple[int, ...]
) -> None:
    (instruction,) = from_text(word)
    assert group_of(Plan.parse(plan), TENSOR, rank, instruction) == group


@given(cases() | tensor_cases())
def test_every_rank_is_in_its_groups_and_the_others_see_the_same_one(case: tuple[Plan, ModelShape]) -> None:
    compiled = compile_plan(*case)
    for rank in compiled.mesh.world:
        for instruction in {it for it in compiled.programs[compiled.pp_index(rank)] if it.op in COLLECTIVES}:
            group = group_of(*case, rank, instruction)
            assert rank in group
            assert all(group == group_of(*case, member, instruction) for member in group)

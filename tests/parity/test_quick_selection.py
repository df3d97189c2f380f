"""The default run proves one case of every kind: whatever a plan can say, some plan of the quick tables says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx.plan.plan import OVERLAPS, SCHEDULES, Plan
from tests.parity import (
    architectures,
    test_offload_is_exact,
    test_ranks_are_exact,
    test_slices_are_exact,
    test_tensor_parallel_is_exact,
    test_zoo_is_exact,
)

WHOLE = {**test_ranks_are_exact.QUICK, **test_slices_are_exact.QUICK}
SPLIT = {
    **test_tensor_parallel_is_exact.QUICK,
    **test_tensor_parallel_is_exact.QUICK_UNEVEN,
    **test_tensor_parallel_is_exact.QUICK_CUBES,
}
OTHERS = (test_slices_are_exact.CUBE, test_ranks_are_exact.BY_LAYER, test_tensor_parallel_is_exact.BY_LAYER)
PLANS = [Plan.parse(text) for text in (*WHOLE, *SPLIT, *test_offload_is_exact.QUICK, *OTHERS)]

KINDS: dict[str, Callable[[Plan], bool]] = {
    "blocks computed again": lambda plan: plan.policies == ("block",) and plan.tp == 1,
    "units computed again": lambda plan: plan.policies == ("unit",) and plan.tp == 1,
    "light in a pipeline of slices": lambda plan: plan.policies == ("light",) and plan.pp > 1 and bool(plan.slices),
    "light beside halves": lambda plan: plan.policies == ("light",) and plan.halves > 1,
    "other layers, other policies": lambda plan: len(set(plan.policies)) > 2 and plan.tp == 1,
    "other split layers, other policies": lambda plan: len(set(plan.policies)) > 2 and plan.tp > 1,
    "zero_degree": lambda plan: 0 < plan.zero_degree < plan.dp,
    "gather once a step": lambda plan: plan.gather == "step",
    "reduce once a step": lambda plan: plan.reduce == "step",
    "sequence split": lambda plan: plan.sequence and not plan.save,
    "inputs of gathers kept": lambda plan: plan.save == "input",
    "degrees": lambda plan: bool(plan.degrees),
    "degrees beside replicas": lambda plan: bool(plan.degrees) and plan.dp > 1,
    "halves": lambda plan: plan.halves > 1,
    "pairs": lambda plan: plan.pairs,
    "uneven tensors": lambda plan: plan.tp == 3,
    "uneven slices": lambda plan: any(len(set(lengths)) > 1 for lengths in plan.slices),
    "slicings in turn": lambda plan: len(plan.slices) > 1,
    "slices beside tensor parallelism": lambda plan: bool(plan.slices) and plan.tp > 1,
    "slices beside ZeRO": lambda plan: bool(plan.slices) and plan.zero == 3,
    "activations on the host beside slices and tensor parallelism": lambda plan: (
        "activations" in dict(plan.offload) and bool(plan.slices) and plan.tp > 1
    ),
    "activations on the host beside halves": lambda plan: "activations" in dict(plan.offload) and plan.halves > 1,
    "state on the host beside ZeRO": lambda plan: "optimizer" in dict(plan.offload) and plan.zero > 0,
    "updates on the host beside ZeRO 3 and a pipeline": lambda plan: (
        plan.steps_on_host and plan.zero == 3 and plan.pp > 1
    ),
    "parameters on the host beside ZeRO 3": lambda plan: plan.hosts_parameters and plan.zero == 3,
    "parameters on the host in a pipeline": lambda plan: plan.hosts_parameters and plan.pp > 1,
    "three dimensions and ZeRO": lambda plan: min(plan.pp, plan.tp, plan.dp) > 1 and plan.zero == 3,
    "three dimensions and slices": lambda plan: min(plan.pp, plan.tp, plan.dp) > 1 and bool(plan.slices),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plan_is_in_the_default_run(kind: str) -> None:
    assert any(KINDS[kind](plan) for plan in PLANS)


def test_every_schedule_overlap_and_stage_of_zero_is_in_the_default_run() -> None:
    assert {plan.schedule for plan in PLANS if plan.pp > 1 and plan.tp == 1} == set(SCHEDULES)
    assert {plan.overlap for plan in PLANS if plan.tp > 1} == set(OVERLAPS)
    assert {plan.zero for plan in PLANS if plan.dp > 1} == {0, 1, 2, 3}


def test_every_architecture_is_in_the_default_run() -> None:
    alone = (*test_zoo_is_exact.QUICK_DROPOUT, *test_zoo_is_exact.QUICK_PADDED, *test_zoo_is_exact.QUICK_PACKED)
    more = (*test_zoo_is_exact.QUICK_UNITS, *test_zoo_is_exact.QUICK_COMPILED)
    table = test_tensor_parallel_is_exact
    split = (*table.QUICK_ALONE, *table.QUICK_BY_LAYER, *SPLIT.values())
    offloaded = test_offload_is_exact.QUICK.values()
    assert {*alone, *more, *split, *offloaded, *WHOLE.values()} == set(architectures.ARCHITECTURES)


def test_models_with_two_stacks_are_in_the_default_run_whole_and_split() -> None:
    for table in (WHOLE, SPLIT):
        assert set(table.values()) & set(architectures.TWO_STACKS)

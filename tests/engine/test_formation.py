"""A rank's place in a plan with tensor parallelism: what it owns, what it reads, whom it communicates with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.engine.layout import ProcessGroups
from phalanx.engine.reductions import GlobalReductions, StepRun
from phalanx.params import rank_state
from phalanx.params.optimizer import Optimizer, make_optimizer
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.state.layout import StateShard, take_boxes
from tests.params.sharded_cases import Model, Split, cases, parameters_of
from tests.state.layouts import check_layout

WHOLE = Split((3, 4), 0, (), (0, 0), summed=True)
COLUMNS = Split((3, 4), 1, (4,), (0, 1), summed=False)
FUSED = Split((3, 12), 1, (4, 4, 4), (0, 1), summed=False)
MODEL = Model(
    (("embed",), ("norm", "qkv"), ("out", "embed")),
    {"embed": COLUMNS, "norm": WHOLE, "qkv": FUSED, "out": COLUMNS},
    tp=2,
)


@given(cases())
def test_every_element_of_every_parameter_is_owned_by_exactly_one_rank(case: tuple[Model, Plan]) -> None:
    model, plan = case
    values = model.values()
    layout: dict[int, list[StateShard]] = {}
    for rank in range(plan.world):
        formation = model.formation(plan, rank)
        parameters = parameters_of(formation.state, rank, values)
        found = list(rank_state.of_parameters(formation.state, rank, parameters))
        layout[rank] = [shard for shard, _ in found]
        for shard, data in found:
            assert torch.equal(data, take_boxes(values[shard.name], shard.boxes))
    check_layout(layout)
    owned = {shard.name for held in layout.values() for shard in held if shard.owned}
    assert owned == set(model.shapes)


@given(cases())
def test_state_and_counters_of_the_optimizer_are_owned_once_too(case: tuple[Model, Plan]) -> None:
    model, plan = case
    values = model.values()
    layout: dict[int, list[StateShard]] = {}
    for rank in range(plan.world):
        formation = model.formation(plan, rank, dtype="bfloat16")
        parameters = parameters_of(formation.state, rank, values)
        if not parameters.trained:
            layout[rank] = []
            continue
        optimizer = Optimizer(make_optimizer(parameters.trained, RunConfig()), parameters.trained, clip=None)
        ones = {name: torch.ones_like(weight.exact) for name, weight in parameters.trained.items()}
        optimizer.step(ones, 0.1, torch.tensor(1.0), torch.tensor(True))
        layout[rank] = [
            held
            for held, _ in rank_state.of_checkpoint(
                formation.state, formation.state.kept(rank), parameters.weights, optimizer.tensors()
            )
        ]
    check_layout(layout)
    owned = {shard.name for held in layout.values() for shard in held if shard.owned}
    assert owned == {
        f"{kind}/{name}" for name in model.shapes
        for kind in ("master", "optimizer/exp_avg", "optimizer/exp_avg_sq", "optimizer/step")
    }  # fmt: skip


def test_a_frozen_table_of_integers_that_zero_does_not_shard_is_owned_once() -> None:
    model = Model((("a", "table"),), {"a": WHOLE, "table": WHOLE}, 2, integers=("table",))
    values = model.values()
    plan = Plan(dp=2, tp=2, zero=1, stages=(1,))
    layout = {}
    for rank in range(plan.world):
        formation = model.formation(plan, rank)
        parameters = parameters_of(formation.state, rank, values)
        layout[rank] = [held for held, _ in rank_state.of_parameters(formation.state, rank, parameters)]
        assert parameters.values["table"].dtype == torch.int64
    check_layout(layout)


def test_a_rank_keeps_and_computes_with_its_part_of_every_tensor() -> None:
    values = MODEL.values()
    formation = MODEL.formation(Plan(tp=2, stages=(3,)), rank=1)
    parameters = parameters_of(formation.state, 1, values)
    assert parameters.resident_elements == 3 * 2 + 3 * 4 + 3 * 6 + 3 * 2
    assert torch.equal(parameters.values["embed"], values["embed"][:, 2:])
    assert torch.equal(parameters.values["qkv"], values["qkv"].view(3, 3, 4)[:, :, 2:].reshape(3, 6))
    assert torch.equal(parameters.values["norm"], values["norm"])


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(pp=2, dp=2, tp=2, stages=(1, 2)), "stage 1, replica 0, tensor part 1"),
        (Plan(tp=2, stages=(3,)), "stage 0, tensor part 1"),
    ],
)
def test_a_place_names_the_part_of_the_tensors(plan: Plan, said: str) -> None:
    assert MODEL.formation(plan, rank=plan.world - 1 - 2 * (plan.dp - 1)).place == said


class Groups:
    """Links that only remember which groups and channels a rank makes, in which order."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, ...], str]] = []

    def group(self, ranks: tuple[int, ...], purpose: str = "") -> Any:
        if len(ranks) > 1 and (ranks, purpose) not in self.made:
            self.made.append((ranks, purpose))
        return _Ranks(ranks)

    def open_channels(self, flows: Iterable[Any]) -> None:
        self.flows = list(flows)

    def channel(self, *_: Any) -> None:
        return None


class _Ranks:
    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def all_reduce(self, tensor: Tensor) -> _Ranks:
        return self

    def wait(self, what: str) -> None:
        pass


def connect(model: Model, plan: Plan, rank: int, *cells: Any) -> tuple[ProcessGroups, Groups]:
    links = Groups()
    return ProcessGroups(model.formation(plan, rank, *cells), cast(Links, links)), links


@given(cases())
def test_ranks_that_meet_in_several_groups_make_them_in_the_same_order(case: tuple[Model, Plan]) -> None:
    model, plan = case
    cells = (tuple((index,) for index in range(plan.tp)), (tuple(range(plan.tp)),))
    made = [connect(model, plan, rank, *cells)[1].made for rank in range(plan.world)]
    for one, other in itertools.combinations(range(plan.world), 2):
        common = [[entry for entry in made[me] if one in entry[0] and other in entry[0]] for me in (one, other)]
        assert common[0] == common[1]


def test_an_redistribution_runs_over_the_ranks_of_its_cell_in_their_order() -> None:
    model = Model((("a",),), {"a": Split((4, 4), 0, (4,), (0, 1, 0, 1), summed=True)}, 4)
    plan, pairs, everyone = Plan(dp=2, tp=4, stages=(1,)), ((0, 1), (2, 3)), ((0, 1, 2, 3),)
    connections, links = connect(model, plan, 7, pairs, everyone)
    assert connections.redistribution_group(pairs).ranks == (6, 7)
    assert connections.redistribution_group(everyone).ranks == (4, 5, 6, 7)
    assert ((6, 7), "tp") in links.made and ((4, 5, 6, 7), "tp") in links.made


@given(cases())
def test_gradients_are_summed_over_dp_and_the_cell_of_their_bucket_once_each(case: tuple[Model, Plan]) -> None:
    model, plan = case
    mesh = Mesh.of(plan)
    for rank in range(plan.world):
        connections, _ = connect(model, plan, rank)
        formation = model.formation(plan, rank)
        for bucket in range(formation.shape.num_buckets):
            how = connections.reduction(bucket, sharded=plan.zero > 0)
            cell = _cell(formation.shape.cells(bucket), mesh.coordinates(rank)[2])
            partners = {dp_rank for beside in mesh.beside(rank, cell) for dp_rank in mesh.dp_group(beside)}
            first = set(how.zero.ranks)
            assert first == (set(mesh.zero_group(rank)) if plan.zero else partners)
            assert len(how.zero.ranks) * len(how.replicas.ranks) == len(partners)
            assert first | set(how.replicas.ranks) <= partners
            if connections.is_alone(bucket):
                assert partners == {rank} and how.tie.ranks == (rank,)


def _cell(cells: Sequence[Sequence[int]], index: int) -> Sequence[int]:
    return next((cell for cell in cells if index in cell), (index,))


def test_all_ranks_agree_whether_a_bucket_is_reduced_even_one_that_sums_with_nobody() -> None:
    model = Model((("a",),), {"a": Split((6,), 0, (6,), (0, 0, 1), summed=True)}, 3)
    plan = Plan(tp=3, stages=(1,))
    (bucket,) = (b for b, held in enumerate(model.formation(plan, 0).shape.held) if held)
    assert [connect(model, plan, rank)[0].is_alone(bucket) for rank in range(3)] == [False] * 3
    assert connect(model, plan, 2)[0].reduction(bucket, False).zero.ranks == (2,)


class Sum(_Ranks):
    """Adds what several ranks bring, one after the other."""

    def __init__(self) -> None:
        super().__init__((0, 1))
        self.total = torch.zeros(())

    def all_reduce(self, tensor: Tensor) -> _Ranks:
        self.total = self.total + tensor
        tensor.copy_(self.total)
        return self


def test_the_norm_counts_every_gradient_once_and_the_loss_of_one_rank_of_a_tensor_parallel_group() -> None:
    values, plan, world = MODEL.values(), Plan(tp=2, stages=(3,)), Sum()
    gradients = {name: torch.randn(value.shape, dtype=torch.float64) for name, value in values.items()}
    for rank in range(2):
        formation = MODEL.formation(plan, rank)
        weights = parameters_of(formation.state, rank, values).trained
        optimizer = Optimizer(make_optimizer(weights, RunConfig()), weights, clip=None)
        owned = formation.owned & weights.keys()
        totals = GlobalReductions(
            optimizer, cast(Any, world), cast(Any, world), owned, is_tp_leader=formation.is_tp_leader
        )
        step, own = StepRun({}, lr=0.1), {name: weight.piece.of(gradients[name]) for name, weight in weights.items()}
        totals.norm(step, torch.tensor(4.0, dtype=torch.float64), [torch.tensor(8.0)], own)
    assert step.loss is not None and step.norm is not None
    assert step.loss.item() == 2.0
    expected = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
    assert step.norm.item() == pytest.approx(expected, rel=1e-12)

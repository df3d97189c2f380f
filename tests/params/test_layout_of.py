"""What every rank keeps follows from the plan: every element is owned once, and ranks really keep what it says."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.launch.worker_pool import WorkerPool
from phalanx.params import rank_state
from phalanx.params.layout_of import StateLayout, layout_of
from phalanx.params.optimizer import Optimizer, make_optimizer, optimizer_slots
from phalanx.params.state_facts import ParameterFacts, Slot, StateFacts
from phalanx.plan.complete import complete
from phalanx.plan.plan import Plan
from phalanx.state.layout import StateShard, check_disjoint, take_boxes
from phalanx.state.moves import Move, plan_moves
from tests import captured
from tests.params import keep_jobs
from tests.params.sharded_cases import CPU, Model, parameters_of, plans_of, varied_cases
from tests.state.layouts import check_layout

ADAM = (Slot("step", "float32", is_counter=True), Slot("exp_avg", "float32"), Slot("exp_avg_sq", "float32"))


@given(varied_cases())
def test_every_element_of_every_tensor_is_owned_by_exactly_one_rank(case: tuple[Model, Plan]) -> None:
    model, plan = case
    facts = model.facts("bfloat16", ADAM)
    layout = {rank: layout_of(plan, facts, rank) for rank in range(plan.world)}
    check_layout(layout)
    owned = {shard.name for shards in layout.values() for shard in shards if shard.owned}
    expected: set[str] = set()
    for name, shape in model.shapes.items():
        if math.prod(shape):
            expected.add(f"{'master' if name in model.trainable else 'model'}/{name}")
        if name in model.trainable and name not in model.unused:
            expected |= {f"optimizer/{slot.name}/{name}" for slot in ADAM}
    assert owned == expected


@given(varied_cases())
def test_a_parameter_and_its_state_lie_in_the_same_boxes_and_every_replica_is_owned_elsewhere(
    case: tuple[Model, Plan],
) -> None:
    model, plan = case
    layout = StateLayout(plan, model.facts("bfloat16", ADAM)).all_state()
    owned: dict[str, list[StateShard]] = defaultdict(list)
    for shards in layout.values():
        boxes = {shard.name.rsplit("/", 1)[1]: shard.boxes for shard in shards if not shard.name.startswith("opt")}
        for shard in shards:
            if shard.name.startswith("optimizer/exp"):
                assert shard.boxes == boxes[shard.name.rsplit("/", 1)[1]]
            if shard.owned:
                owned[shard.name].append(shard)
    for shards in layout.values():
        for shard in shards:
            left = list(shard.boxes)
            for owner in owned[shard.name]:
                for box in owner.boxes:
                    left = [rest for part in left for rest in part.without(box)]
            assert not left and (shard.shape, shard.dtype) == (owned[shard.name][0].shape, owned[shard.name][0].dtype)


@given(varied_cases())
def test_ranks_keep_what_the_layout_says(case: tuple[Model, Plan]) -> None:
    model, plan = case
    state = StateLayout(plan, model.facts("bfloat16", ADAM))
    values = model.values()
    for rank in range(plan.world):
        parameters = parameters_of(state, rank, values)
        trained = parameters.trained
        saved: list[tuple[StateShard, Tensor]] = []
        if trained:
            optimizer = Optimizer(make_optimizer(trained, RunConfig()), trained, clip=None)
            ones = {n: torch.ones_like(w.exact) for n, w in trained.items() if n not in model.unused}
            optimizer.step(ones, 0.0, torch.tensor(1.0), torch.tensor(True))
            saved = list(rank_state.of_checkpoint(state, state.kept(rank), parameters.weights, optimizer.tensors()))
            assert [shard for shard, _ in saved] == list(state.state(rank))
        assert all(data.numel() == shard.numel and str(data.dtype) == f"torch.{shard.dtype}" for shard, data in saved)
        found = list(rank_state.of_parameters(state, rank, parameters))
        assert [shard for shard, _ in found] == list(state.parameters(rank))
        for shard, data in found:
            value = values[shard.name] if shard.name in model.integers else values[shard.name].bfloat16()
            assert torch.equal(data, take_boxes(value, shard.boxes))


@given(st.data())
def test_the_state_of_any_plan_moves_to_any_other_with_every_element_once_and_nothing_sent_that_is_there(
    data: st.DataObject,
) -> None:
    model, plan = data.draw(varied_cases())
    facts = model.facts("bfloat16", ADAM)
    old, new = StateLayout(plan, facts).all_state(), StateLayout(data.draw(plans_of(model)), facts).all_state()
    arriving: dict[tuple[int, str], list[Move]] = defaultdict(list)
    for move in plan_moves(old, new):
        arriving[move.destination, move.name].append(move)
        assert move.taken_from.held.contains(move.box) and move.put_to.held.contains(move.box)
        (source,) = (shard for shard in old[move.source] if shard.name == move.name)
        assert move.taken_from.held in source.boxes
        if move.source != move.destination:
            own = [shard for shard in old.get(move.destination, ()) if shard.name == move.name]
            assert not any(box.intersect(move.box) for shard in own for box in shard.boxes)
    for rank, shards in new.items():
        for shard in shards:
            boxes = [move.box for move in arriving[rank, shard.name]]
            check_disjoint(shard.name, boxes)
            assert sum(box.numel for box in boxes) == shard.numel


@given(varied_cases())
def test_facts_read_back_from_json(case: tuple[Model, Plan]) -> None:
    facts = case[0].facts("bfloat16", ADAM)
    assert StateFacts.from_json(facts.to_json()) == facts
    unknown = StateFacts(1, (), (), "float32", slots=None)
    assert StateFacts.from_json(unknown.to_json()) == unknown


def test_facts_that_contradict_themselves_are_refused() -> None:
    weight = ParameterFacts("w", (4,), 0)
    with pytest.raises(AssertionError, match="occurs twice"):
        StateFacts(1, (), (weight, weight), "float32")
    with pytest.raises(AssertionError, match="w is in bucket 3"):
        StateFacts(1, (), (ParameterFacts("w", (4,), 3),), "float32")
    with pytest.raises(AssertionError, match="split for another tp than 2"):
        StateFacts(1, (), (ParameterFacts("w", (4,), 0, locals=(weight.local(0),)),), "float32", tp=2)
    with pytest.raises(AssertionError, match="integers are not trained"):
        ParameterFacts("w", (4,), 0, trained=True, integer="int64")
    with pytest.raises(AssertionError, match="facts are of tp=1, the plan has tp=2"):
        StateLayout(Plan(tp=2, stages=(1,)), StateFacts(1, (), (weight,), "float32"))


def test_layouts_are_worked_out_without_torch() -> None:
    code = "import sys, phalanx.params.layout_of; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ADAM),
        ({"optimizer": "sgd"}, ()),
        ({"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}, (Slot("momentum_buffer", "float32"),)),
        ({"optimizer": "torch.optim.Adafactor"}, None),
    ],
)
def test_the_slots_of_an_optimizer_are_known_before_training(
    options: dict[str, object], expected: tuple[Slot, ...] | None
) -> None:
    assert optimizer_slots(RunConfig.create(**options), torch.float32, CPU) == expected


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, threads_per_rank=1, device="cpu") as pool:
        yield pool


FROZEN = ("transformer.wpe.weight", "transformer.h.0.ln_1.weight")


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("pp=2,dp=2,mb=2,zero=1", {}),
        ("pp=2,mb=2,schedule=interleaved,v=2", {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}}),
        ("pp=2,mb=2,schedule=zb-v", {}),
        ("dp=4,zero=3,zero_degree=2", {"optimizer": "torch.optim.NAdam"}),
        ("dp=2,tp=2,zero=2", {}),
        ("pp=2,tp=2,mb=2,sequence=yes", {}),
        ("tp=3", {}),
    ],
)
def test_real_ranks_keep_and_export_what_the_layout_of_the_plan_says(
    pool: WorkerPool, text: str, options: dict[str, object]
) -> None:
    case = captured.named(captured.GPT2, samples=4)
    full = _kept_as_planned(pool, case, text, FROZEN, options)
    for name in FROZEN:
        assert torch.equal(full[name], case.parameters[name])


@pytest.mark.parametrize("text", ["dp=2,zero=3", "dp=4,zero=1,zero_degree=2"])
def test_integers_are_kept_as_they_are_and_what_nothing_uses_is_kept_too(pool: WorkerPool, text: str) -> None:
    torch.manual_seed(0)
    case = captured.own(keep_jobs.Tabled(), x=torch.randn(4, 4), y=torch.randn(4))
    full = _kept_as_planned(pool, case, text, (), {})
    assert full["table"].tolist() == [2, 0, 1, 3] and full["table"].dtype == torch.int64
    assert torch.equal(full["unused"], case.parameters["unused"])


def _kept_as_planned(
    pool: WorkerPool, case: captured.Case, text: str, frozen: tuple[str, ...], options: dict[str, object]
) -> dict[str, Tensor]:
    """What rank 0 exports, after all ranks kept what the layout says."""
    costs = case.blocks.flops(case.captured.dims(case.batch))
    world = Plan.parse(text).world
    plan = complete(text, world=world, batch_size=4, costs=costs).plan
    found = pool.run(keep_jobs.keep, case, text, frozen, options, world=world)
    (facts,) = {facts for facts, *_ in found}
    state = StateLayout(plan, StateFacts.from_json(facts))
    check_layout(state.all_state())
    check_layout(state.all_parameters())
    for rank, (_, saved, exported, full) in enumerate(found):
        assert saved == list(state.state(rank))
        assert exported == list(state.parameters(rank))
        assert full.keys() == (case.parameters.keys() if rank == 0 else set())
    return found[0][3]

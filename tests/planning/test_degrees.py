"""Units that are split over fewer than all tensor-parallel ranks: planning says of them what their programs do, and the
search finds where they are best."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from phalanx import tasks
from phalanx.cli.program_report import redistribution_seconds
from phalanx.engine.describe import describe
from phalanx.engine.measure import measure
from phalanx.errors import PlanError
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.zoo.zoo import resolve
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Machine, Software, machines
from phalanx.planning.degrees import capped, choices, require_heads, split_model
from phalanx.planning.estimate import Estimate, estimate
from phalanx.planning.footprint import parameters_of
from phalanx.planning.search import search
from phalanx.planning.work import RUNGS, ModelWork, Shape, transformer
from phalanx.predict.costs import Link
from phalanx.predict.from_facts import Device, costs_of_facts
from phalanx.predict.simulate import simulate
from phalanx.predict.work_of_facts import work_of_facts
from phalanx.program.compile import compile_plan

TOKENS, SAMPLES = 32, 4
SOFTWARE = Software(link=1.0, link_latency=0.0, step=1e-4, reserved=0.0, slack=0.0)


def model_of(layers: int = 3, kv_heads: int = 8, vocabulary: int = 1000) -> ModelWork:
    return transformer("model", Shape(layers, 1024, 8, kv_heads, 4096, vocabulary, 1024))


def cluster_of(text: str, memory: float) -> Cluster:
    return Cluster(tuple(replace(kind, memory=memory) for kind in Cluster.read(text).nodes))


@cache
def small_model() -> tuple[ModelWork, Captured]:
    """With four heads."""
    spec = resolve("meta-llama/Llama-3.2-1B", tiny=True, overrides={"num_attention_heads": 4, "num_key_value_heads": 4})
    graph = capture(spec, tasks.get(spec.task).inputs(spec.config), dtype=torch.float32, check=False)
    facts, dims = measure(spec, graph, torch.float32), {"batch": 1, "tokens": TOKENS}
    return work_of_facts(facts, dims, lambda plan: describe(graph, plan, "float32", device="cpu")), graph


@pytest.mark.parametrize(
    "degrees, sequence",
    [("", "yes"), ("degrees=2", "yes"), ("degrees=1", "no"), ("degrees=2:4", "no"), ("degrees=1:2", "yes"),
     ("degrees=1*2+4*2", "yes")],
)  # fmt: skip
def test_what_ranks_exchange_and_hold_is_what_the_program_says(degrees: str, sequence: str) -> None:
    work, graph = small_model()
    blocks = len(work.blocks)
    plan = Plan.parse(f"tp=4,mb=2,sequence={sequence},stages={blocks},{degrees}".rstrip(","))
    facts = describe(graph, plan, "float32", device="cpu")
    device = Device(flops_per_s=1e30, memory_bytes_per_s=1e30, link=Link(bytes_per_s=1e6))
    costs = costs_of_facts(facts, facts.eager, {"batch": SAMPLES, "tokens": TOKENS}, device)
    taken, _ = redistribution_seconds(simulate(compile_plan(plan, facts.eager), costs), 0)
    work = split_model(work, plan)
    machine = Machine(Cluster.read("4 H100, nvlink 0.001GB/s").nodes[0], SOFTWARE, plan, SAMPLES)
    sums = sum(2 * plan.mb * machine.sums_seconds(work.block(block)) for block in range(blocks))
    assert sums == pytest.approx(taken, rel=0.03)
    held = parameters_of(work, range(blocks)) / plan.tp
    assert held == pytest.approx(sum(facts.elements), rel=0.03)  # norms lie whole on every rank


def best_of_all(work: ModelWork, cluster: Cluster, batch: int, meshes: list[str]) -> Estimate:
    """Of these meshes with one stage: every degree of every unit, every rung of every layer."""
    best: Estimate | None = None
    for text in meshes:
        plan = Plan.parse(f"{text},stages={len(work.blocks)}")
        degrees = [own for own in (1, 2, 4) if plan.tp % own == 0]
        layers = list(product(product(degrees, repeat=2), RUNGS))
        for chosen in product(layers, repeat=len(work.layers)):
            own = replace(plan, degrees=tuple(d for d, _ in chosen), recompute=tuple(r for _, r in chosen))
            if batch % (own.dp * own.mb * own.multiple):
                continue
            found = estimate(work, own, cluster, SOFTWARE, batch)
            if found.fits and (best is None or found.step_seconds < best.step_seconds):
                best = found
    assert best is not None
    return best


@pytest.mark.parametrize(
    "room", [0.55, pytest.param(0.7, marks=pytest.mark.long), 0.9, pytest.param(1.1, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("sequence", ["no", "yes"])
def test_the_search_finds_the_best_degrees_of_all(room: float, sequence: str) -> None:
    """With memory between what units over all ranks and over one rank take. room: of what these take."""
    work, text = model_of(layers=2), "4 H100, nvlink 20GB/s"
    fixed = {"tp": 4, "sequence": sequence == "yes", "mb": 2, "overlap": "none", "pairs": False, "offload": ()}
    whole = estimate(work, Plan(tp=4, mb=2, degrees=((1,),), stages=(4,)), Cluster.read(text), SOFTWARE, 16)
    cluster = cluster_of(text, room * whole.peak_bytes)
    found = search(work, cluster, SOFTWARE, 16, fixed).plans[0]
    best = best_of_all(work, cluster, 16, [f"tp=4,mb=2,sequence={sequence}"])
    assert found.step_seconds <= best.step_seconds * (1 + 1e-3), (found.plan.shown, best.plan.shown)
    assert found.plan.degrees, "all units over all ranks"


def test_units_with_few_heads_are_split_over_fewer_ranks_than_others() -> None:
    work = model_of(kv_heads=2)
    assert work.heads == 8  # those of a model of which no more is known
    few = replace(work, heads=2)
    plan = Plan(tp=8, degrees=((8,),))
    assert choices(few.classes[1], plan, few.heads) == [(2, 8)]
    assert [capped(8, heads) for heads in (0, 1, 2, 3, 6, 8, 16)] == [8, 1, 2, 1, 2, 8, 8]
    cluster = cluster_of("8 H100", 80e9)
    found = search(few, cluster, SOFTWARE, 8, {"tp": 8}).plans[0]
    assert {units[0] for units in found.plan.degrees} <= {1, 2}
    with pytest.raises(PlanError, match="a batch of 2 samples"):
        search(few, cluster, SOFTWARE, 2, {"tp": 8})


def test_more_ranks_than_heads_are_refused() -> None:
    few = replace(model_of(), heads=2)
    require_heads(few, Plan(tp=4, degrees=((2, 4),)))
    require_heads(few, Plan(tp=4, replicate=True))
    require_heads(replace(few, heads=0), Plan(tp=4))
    with pytest.raises(PlanError, match="attends with 2 heads, which 4 ranks cannot split") as error:
        require_heads(few, Plan(tp=4))
    assert "tp=2 or less" in error.value.hint
    with pytest.raises(PlanError, match="which 4 ranks cannot split"):
        require_heads(few, Plan(tp=4, degrees=((2, 4), (4, 4), (4, 4))))


def test_layers_that_share_parameters_have_the_same_degrees() -> None:
    work = model_of(layers=2)
    shared = replace(work, classes=tuple(replace(own, tied=own.parameters) for own in work.classes))
    fixed = {"tp": 4, "mb": 2, "offload": ()}
    cluster = cluster_of("4 H100, nvlink 20GB/s", 80e9)
    assert search(work, cluster, SOFTWARE, 16, fixed).plans[0].plan.degrees
    assert not any(own.plan.degrees for own in search(shared, cluster, SOFTWARE, 16, fixed).plans)


def test_given_degrees_are_kept() -> None:
    work, cluster = model_of(), Cluster.read("4 H100")
    found = search(work, cluster, SOFTWARE, 16, {"degrees": ((2, 4),)}).plans
    assert {own.plan.tp for own in found} == {4} and {own.plan.degrees for own in found} == {((2, 4),)}
    with pytest.raises(PlanError, match="is for 3 units, and layer 0 of the model has 2"):
        search(work, cluster, SOFTWARE, 16, {"degrees": ((2, 2, 2),)})
    with pytest.raises(PlanError, match="no plan with degrees"):
        search(work, cluster, SOFTWARE, 16, {"degrees": ((3,),)})


def test_gradients_of_copies_are_summed_over_all_that_have_them() -> None:
    """Also where there is one replica of the whole."""
    work, cluster = model_of(), Cluster.read("4 H100")
    for plan in (Plan(tp=4, stages=(5,)), Plan(tp=4, degrees=((2,),), stages=(5,))):
        found = estimate(work, plan, cluster, SOFTWARE, 16)
        assert bool(found.parts["gradients"]) == bool(plan.degrees)
    machine = machines(cluster, SOFTWARE, Plan(tp=4), 1)[0]
    assert machine.reduce_seconds(1e9) == 0.0 < machine.reduce_seconds(1e9, 2) < machine.reduce_seconds(1e9, 4)

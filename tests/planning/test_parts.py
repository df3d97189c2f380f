"""A plan may leave devices out, where those that stay are faster or cheaper by themselves."""

from __future__ import annotations

import random

import pytest

from phalanx.errors import ConfigError, PlanError
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software
from phalanx.planning.estimate import estimate
from phalanx.planning.explain import what_helps, what_is_left_out, why_lost
from phalanx.planning.parts import least_seconds, left_out, parts
from phalanx.planning.problem import Problem
from phalanx.planning.search import WORTH_LEAVING, Found, search
from phalanx.planning.space import meshes
from phalanx.planning.work import ModelWork, Shape, transformer
from tests.planning.test_search import SOFTWARE, random_cluster, random_model

SMALL = transformer("small", Shape(12, 768, 12, 12, 3072, 50257, 1024))
LARGE = transformer("large", Shape(32, 4096, 32, 8, 14336, 128256, 2048, gated=True))
MIXED = "4x8 H100 price 3 + 4x8 T4 price 30, network 200Gb/s"


def searched_all(model: ModelWork, cluster: Cluster, software: Software, batch: int) -> Found:
    return search(model, cluster, software, batch, all_devices=True)


def test_slow_devices_that_hold_others_back_are_left_out() -> None:
    found = search(LARGE, cluster := Cluster.read(MIXED), Software(), 512)
    best, whole = found.plans[0], found.whole
    assert str(best.cluster.nodes[0]) == "4x8 H100" and best.plan.world == best.cluster.world == 32
    assert best.price == 32 * 3 and whole is not None and whole in found.plans and whole.plan.world == 64
    alone = searched_all(LARGE, Cluster.read("4x8 H100, price 3, network 200Gb/s"), Software(), 512)
    assert (
        best.step_seconds == pytest.approx(alone.plans[0].step_seconds) and 1.2 * best.step_seconds < whole.step_seconds
    )
    words = what_is_left_out(cluster, found)
    assert words.startswith("leaves out the 4x8 T4: 1.") and "as fast as the best plan for all 64 devices (pp=" in words


def test_devices_behind_slow_links_are_left_out() -> None:
    cluster = Cluster.read("16x1 H100, network 1Gb/s")
    found = search(SMALL, cluster, Software(), 16)
    assert found.plans[0].cluster.world == 1 and "leaves out 15 of the 16 H100: " in what_is_left_out(cluster, found)
    fast = search(SMALL, Cluster.read("1x8 H100"), Software(), 64)
    assert fast.plans[0].cluster.world == 8 and what_is_left_out(fast.plans[0].cluster, fast) == ""


def test_least_cost_leaves_out_what_is_dear_for_what_it_does() -> None:
    cluster = Cluster.read("2x8 H100 price 3 + 2x8 H100 price 6")
    fastest, cheapest = (search(LARGE, cluster, Software(), 256, objective=own).plans[0] for own in ("time", "cost"))
    assert fastest.cluster == cluster and cheapest.dollars < fastest.dollars / 1.3
    assert all(kind.price == 3 for kind in cheapest.cluster.nodes)


def test_what_saves_little_is_not_worth_the_time_that_it_takes() -> None:
    """Of two nodes one is a little cheaper, since nothing goes over the network."""
    cluster = Cluster.read("2x8 H100, price 3")
    alone = Cluster.read("1x8 H100, price 3")
    whole, one = (searched_all(LARGE, own, Software(), 256).plans[0] for own in (cluster, alone))
    assert whole.dollars / WORTH_LEAVING < one.dollars < whole.dollars
    assert search(LARGE, cluster, Software(), 256, objective="cost").plans[0].cluster == cluster


@pytest.mark.parametrize(
    ("text", "objective", "message"),
    [
        ("8 H100", "cost", "objective = cost needs what devices cost, and the cluster has no price for 1x8 H100"),
        ("8 H100 price 2 + 8 T4", "cost", "and the cluster has no price for 1x8 T4"),
        ("8 H100", "money", "option objective = 'money' is not one of time, cost"),
    ],
)  # fmt: skip
def test_an_objective_that_cannot_be_is_refused(text: str, objective: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        search(SMALL, Cluster.read(text), Software(), 64, objective=objective)
    assert message in caught.value.message and caught.value.hint


def test_where_no_plan_for_all_devices_fits_one_for_a_part_is_found() -> None:
    large, cluster = LARGE, Cluster.read("1x8 H100 + 1x1 T4 memory 2GB")
    with pytest.raises(PlanError, match="does not fit"):
        searched_all(large, cluster, Software(), 72)
    found = search(large, cluster, Software(), 72)
    assert found.whole is None and str(found.plans[0].cluster.nodes[0]) == "1x8 H100"
    assert what_is_left_out(cluster, found) == "leaves out the 1x1 T4: no plan for all 9 devices fits"


@pytest.mark.parametrize("text", ["8x8 H100", "7x6 H100", "1x8 H100", "1 H100", "2x8 H100 + 3x4 A100 + 1x1 T4",
                                  "1x1 H100 + 1x1 A100 + 1x1 T4 + 1x1 L4 + 1x1 V100"])  # fmt: skip
def test_parts_are_fewer_devices_and_what_they_leave_out_has_words(text: str) -> None:
    cluster = Cluster.read(text)
    found = parts(cluster)
    assert len(found) == len(set(found)) <= 40 and (not found) == (cluster.world == 1)
    for part in found:
        assert 1 <= part.world < cluster.world
        assert all(any(kind.device == own.device and kind.total >= own.total for kind in cluster.nodes)
                   for own in part.nodes)  # fmt: skip
        assert left_out(cluster, part)
    assert left_out(cluster, cluster) == ""
    if len(cluster.nodes) > 1:
        assert {Cluster((kind,)) for kind in cluster.nodes} <= set(found)


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_takes_less_than_the_limit_by_which_parts_are_passed_over(seed: int) -> None:
    generator = random.Random(seed)
    model = random_model(generator)
    cluster, batch = random_cluster(generator, model), generator.choice([1, 2, 4, 8])
    problem = Problem(model, cluster, SOFTWARE, batch)
    limit = least_seconds(model, cluster, SOFTWARE, batch)
    assert all(base.least + SOFTWARE.step >= limit for base in meshes(problem, {}))
    if batch >= cluster.world:
        counts = (len(model.blocks),)
        assert estimate(model, Plan(dp=cluster.world, stages=counts), cluster, SOFTWARE, batch).step_seconds >= limit


@pytest.mark.parametrize("seed", [0, 1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_the_best_of_all_parts_is_found(seed: int) -> None:
    """Of each part what searching it alone finds, as far as it is worth leaving devices out."""
    generator = random.Random(seed)
    words = [f"1x{generator.choice([1, 2])} {name}" for name in generator.sample(["H100", "A100", "T4"], 2)]
    cluster = Cluster.read(f"{' + '.join(words)}, network {generator.choice([0.1, 10])}GB/s, memory 80GB")
    model, batch = transformer("m", Shape(2, 1024, 8, 8, 4096, 32000, 1024)), generator.choice([6, 24])
    found = search(model, cluster, SOFTWARE, batch).plans[0].step_seconds
    every = [searched_all(model, own, SOFTWARE, batch).plans[0].step_seconds for own in (cluster, *parts(cluster))]
    assert min(every) * (1 - 1e-9) <= found <= min(every) * WORTH_LEAVING * (1 + 1e-9)


def test_more_of_what_is_used_helps_where_devices_are_left_out() -> None:
    found = search(LARGE, cluster := Cluster.read(MIXED), Software(), 512)
    helps = {help.what: help.speedup for help in what_helps(LARGE, cluster, Software(), found)}
    assert helps["twice the nodes"] > 1.5  # of H100s
    slow = Cluster.read("16x1 H100, network 1Gb/s")
    alone = what_helps(SMALL, slow, Software(), search(SMALL, slow, Software(), 16))
    assert "twice the nodes" not in {help.what for help in alone}  # there are more, which are left out


def test_a_plan_that_loses_by_its_cost_says_both() -> None:
    found = search(LARGE, Cluster.read(MIXED), Software(), 512, objective="cost")
    assert found.whole is not None
    words = why_lost(found.plans[0], found.whole, "cost")
    assert "% dearer: " in words and words.endswith("% faster on 64 devices")

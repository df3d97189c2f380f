"""What a run saw of its own steps, as that by which plans that it never had are judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Software, machines
from phalanx.planning.estimate import Estimate, estimate, message_seconds
from phalanx.planning.fewer import Known
from phalanx.planning.work import Shape, transformer
from phalanx.predict.costs import kind_of
from phalanx.predict.from_steps import Report
from phalanx.predict.own_steps import BY, by_own_steps
from phalanx.program.compile import CompiledPlan, compile_plan
from phalanx.program.instructions import COMPUTE, RECEIVES, Op
from phalanx.program.shape import ModelShape

MODEL = transformer("model", Shape(4, 256, 4, 4, 1024, 1000, 128))
NUM_BLOCKS = len(MODEL.blocks)
SHAPE = ModelShape(NUM_BLOCKS, (), (True,) * NUM_BLOCKS, (True,) * NUM_BLOCKS)
BATCH = 8
NODES = Cluster.read("4x1 A100, network 100Gb/s")
NODE = Cluster.read("1x4 A100")


def seen(
    plan: str, cluster: Cluster, *, step: float = 1.0, takes: float = 0.01, message: float = 0.0, sums: float = 0.0,
    update: float = 0.0, norm: float = 0.0,
) -> Known:  # fmt: skip
    """takes: every computation of a block. message: each; sums: of all gradients of a rank, as update."""
    known = Known(MODEL, cluster, Software(), BATCH, "by published rates")
    programs = compile_plan(Plan(**{**vars(Plan.parse(plan)), "stages": stages(Plan.parse(plan))}), SHAPE)
    reports = [report(programs, place, takes, message, sums, update, norm) for place in range(programs.plan.pp)]
    return by_own_steps(known, programs, reports, step)


def stages(plan: Plan) -> tuple[int, ...]:
    return (NUM_BLOCKS // plan.pp,) * plan.pp


def report(
    programs: CompiledPlan, place: int, takes: float, message: float, sums: float, update: float, norm: float
) -> Report:  # fmt: skip
    own, moving = dict[str, float](), dict[str, float]()
    every = list(dict.fromkeys(row.instruction for row in programs.tables[place].rows))
    counts = {op: sum(it.op is op for it in every) for op in (Op.STEP, Op.REDUCE)}
    for it in every:
        own[kind_of(it)] = takes if it.op in COMPUTE else update / counts[Op.STEP] if it.op is Op.STEP else 0.0
        if it.op in RECEIVES:
            moving[kind_of(it)] = message
        elif it.op in (Op.REDUCE, Op.NORM):
            moving[kind_of(it)] = norm if it.op is Op.NORM else sums / counts[Op.REDUCE]
    return Report(own, moving)


def judged(known: Known, plan: str) -> Estimate:
    own = Plan.parse(plan)
    own = replace(own, stages=stages(own))
    return estimate(known.model, own, known.cluster, known.software, BATCH)


@pytest.mark.parametrize("plan", ["pp=2,mb=4", "dp=2", "pp=2,dp=2,mb=2", "mb=2", "pp=2,mb=4,schedule=zb-h1"])
def test_a_step_of_the_plan_that_ran_is_judged_to_take_what_it_took(plan: str) -> None:
    known = seen(plan, NODES, step=5.0)
    assert known.by == BY and judged(known, plan).step_seconds == pytest.approx(5.0)


def test_blocks_take_what_they_took_whatever_the_plan() -> None:
    """A micro-batch of two samples takes every block 20 ms, forward and back, which a device's figures do not know."""
    known = seen("pp=2,mb=4", NODES)
    assert judged(known, "pp=3,mb=4").parts["computation"] == pytest.approx(4 * 2 * 0.02)
    assert judged(known, "dp=2,mb=2").parts["computation"] == pytest.approx(2 * 6 * 0.02)


@pytest.mark.parametrize(("cluster", "name"), [(NODES, "network"), (NODE, "link")])
def test_messages_say_how_fast_bytes_travel(cluster: Cluster, name: str) -> None:
    """Between nodes, or within one; sums over replicas, which the run never had, are judged by that."""
    known, before = seen("pp=2,mb=4", cluster, message=0.5), seen("pp=2,mb=4", cluster)
    plan = replace(Plan.parse("pp=2,mb=4"), stages=(3, 3))
    places = machines(known.cluster, known.software, plan, BATCH // 4)
    assert message_seconds(known.model, plan, places) == pytest.approx(0.5)
    assert getattr(known.cluster.nodes[0], name) < getattr(before.cluster.nodes[0], name) / 100
    assert judged(known, "dp=2").parts["gradients"] > 50 * judged(before, "dp=2").parts["gradients"]


def test_sums_over_replicas_say_how_fast_bytes_travel() -> None:
    known = seen("dp=2,mb=2", NODES, sums=2.0)
    plan = replace(Plan.parse("dp=2,mb=2"), stages=(NUM_BLOCKS,))
    machine = machines(known.cluster, known.software, plan, 2)[0]
    held = sum(known.model.block(block).parameters for block in range(NUM_BLOCKS))
    tied = sum(known.model.block(block).tied for block in range(NUM_BLOCKS))
    assert machine.reduce_seconds(held - tied) == pytest.approx(2.0)


def test_what_is_as_long_as_a_hop_says_nothing_of_bytes() -> None:
    """Of a small model: that messages are slow, and not that they are large."""
    known = seen("pp=2,mb=4", NODES, message=0.01, norm=0.02)
    assert known.cluster.nodes[0].network == NODES.nodes[0].network
    assert known.software.network_latency > 100 * Software().network_latency


def test_updates_take_what_they_took() -> None:
    known = seen("pp=2,mb=4", NODES, update=3.0)
    assert judged(known, "pp=2,mb=4").parts["optimizer"] == pytest.approx(3.0)


def test_slices_keep_the_seconds_that_planning_knows_of_them() -> None:
    known = seen("pp=2,mb=4,slices=2", NODES, message=0.5)
    assert not any(own.times for own in known.model.classes)
    assert known.cluster.nodes[0].network < NODES.nodes[0].network / 100


def test_one_rank_has_no_links_to_tell_of() -> None:
    known = seen("mb=2", NODE)
    assert known.cluster.nodes[0].link == NODE.nodes[0].link and known.software.link_latency == Software().link_latency

"""Simulated exchanges: they travel beside computation until someone needs them, so that overlap is predicted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from phalanx.observe.program_files import chrome_trace, svg
from phalanx.observe.program_text import bars_of, chart, lanes_of
from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS
from phalanx.program.costs import Costs, Link, uniform
from phalanx.program.instructions import COMPUTE, EXCHANGES, Op, from_text
from phalanx.program.lower import lower
from phalanx.program.shape import ModelShape
from phalanx.program.simulate import simulate
from phalanx.program.timeline import Event, Timeline
from tests.program.tensor_shapes import exchange, segment, stack, tensor_cases

LAYERS = 6
SHAPE = stack(LAYERS)


def costs_of(shape: ModelShape, bytes_per_s: float) -> Costs:
    return replace(uniform(shape), group_link=Link(0, bytes_per_s), dims={"batch": 2}, element_bytes=4)


def simulated(overlap: str, bytes_per_s: float, extra: str = "") -> Timeline:
    plan = Plan.parse(f"tp=2,overlap={overlap},stages={LAYERS}{extra}")
    shape = stack(LAYERS, sequence=plan.sequence)
    return simulate(plan, shape, lower(plan, shape), costs_of(shape, bytes_per_s))


def events_of(shape: ModelShape, text: str, bytes_per_s: float = 800) -> dict[str, Event]:
    """The events of rank 0 when both ranks run the same hand-written program; an all-reduce takes 1 s."""
    program = from_text(text)
    plan = Plan.parse(f"tp=2,overlap=halves,stages={shape.num_blocks}")
    timeline = simulate(plan, shape, [program] * 2, costs_of(shape, bytes_per_s))
    return {str(event.instruction): event for event in timeline.events if event.rank == 0}


def span(event: Event) -> tuple[float, float]:
    return event.start, event.end


def test_a_segment_takes_its_share_of_the_block_and_an_exchange_its_bytes_on_the_ring() -> None:
    events = events_of(SHAPE, "F0.0/0:0 F0.0/0:2 CF0.0/0:3 F0.0/0:4 F0.0/0:6")
    assert [events[f"F0.0/0:{step}"].seconds for step in (0, 2, 4, 6)] == [0, 0.5, 0, 0.5]
    assert span(events["CF0.0/0:3"]) == (0.5, 1.5)  # 2 · ½ of 2 · 100 elements of 4 bytes at 800 a second
    assert events["CF0.0/0:3"].resource == "ranks 0,1"
    assert span(events["F0.0/0:6"]) == (1.5, 2.0)  # its input is made of what the all-reduce brings


def test_halves_take_half_the_time_and_one_travels_behind_the_other() -> None:
    halves = "F0.0a/0:0 F0.0a/0:2 CF0.0a/0:3 F0.0b/0:0 F0.0b/0:2 CF0.0b/0:3 F0.0a/0:4 F0.0a/0:6"
    events = events_of(SHAPE, halves, bytes_per_s=1600)
    assert span(events["CF0.0a/0:3"]) == span(events["F0.0b/0:2"]) == (0.25, 0.5)
    assert span(events["CF0.0b/0:3"]) == span(events["F0.0a/0:6"]) == (0.5, 0.75)


def test_the_gradient_of_an_input_travels_behind_the_weight_gradients() -> None:
    events = events_of(SHAPE, "B0.0/0:6 CB0.0/0:5 W0.0/0:6 BW0.0/0:4 B0.0/0:2")
    assert span(events["CB0.0/0:5"]) == (0.5, 1.5)
    assert span(events["W0.0/0:6"]) == (0.5, 1.0)
    assert events["BW0.0/0:4"].start == 1.5  # the segment that wrote the wire


def test_a_backward_waits_for_what_is_gathered_again_for_it() -> None:
    shape = stack(1, sequence=True)
    events = events_of(shape, "CA0.0/0:5 BW0.0/0:8 B0.0/0:6 CB0.0/0:5 W0.0/0:6", bytes_per_s=400)
    assert span(events["CA0.0/0:5"]) == (0, 1)  # an all-gather sends half of what an all-reduce does
    assert span(events["B0.0/0:6"]) == (1, 1.5)


def test_exchanges_of_exchanges_wait_for_each_other_and_messages_for_all_of_them() -> None:
    cells = ((0, 1),)
    first = exchange("a", "b", cells, "all_reduce", "all_reduce")
    steps = (segment("h0", "a"), first, exchange("b", "c", cells), exchange("c", "h1", cells, "all_reduce"))
    shape = ModelShape(2, (), (True,) * 2, (True,) * 2, (steps, (segment("h1", "h2"),)))
    plan = Plan.parse("pp=2,tp=2,stages=1-1")
    costs = replace(costs_of(shape, 800), message_link=Link(2.0))
    timeline = simulate(plan, shape, lower(plan, shape), costs)
    events = {str(event.instruction): event for event in timeline.events if event.rank in (0, 2)}
    assert span(events["CF0.0/0:1"]) == (1, 2) and span(events["CF0.0/0:3"]) == (2, 3)
    assert span(events["SF0.0>2"]) == (3, 5)
    assert events["F1.0/1:0"].start == 5
    assert events["CB0.0/0:1"].start == events["RB0.0<2"].end  # the first of the backward waits for the message
    assert events["BW0.0/0:0"].start == events["CB0.0/0:1"].end


@pytest.mark.parametrize("share", [0.8, 1.0, 1.25])
def test_oases_hides_communication_that_takes_about_as_long_as_computation(share: float) -> None:
    """Communication of `share` times the computation, both of default_checkpoint."""
    alone = simulated("default_checkpoint", float("inf")).makespan
    num_exchanges = sum(e.instruction.op in EXCHANGES for e in simulated("default_checkpoint", 1).events) / 2
    bytes_per_s = num_exchanges * 800 / (share * alone)
    makespans = {overlap: simulated(overlap, bytes_per_s).makespan for overlap in OVERLAPS}
    assert makespans["oases"] * 1.45 < makespans["default_checkpoint"]
    assert makespans["oases"] < min(makespans["optim_comm_checkpoint"], makespans["overlap_checkpoint"])
    assert makespans["halves"] < makespans["none"]
    exchange = 800 / bytes_per_s
    ideal = LAYERS * (max(1, 2 * exchange) + max(3, 2 * exchange))  # forward, backward
    assert ideal <= makespans["oases"] < 1.1 * ideal


@pytest.mark.parametrize("overlap", ["none", "optim_comm_checkpoint", "oases", "halves"])
def test_pairs_hide_what_a_forward_cannot_hide_by_itself(overlap: str) -> None:
    """As much communication as computation: halves alone wait for it in the forward, where it takes longer."""
    alone = simulated(overlap, float("inf"), ",mb=6").makespan
    exchanges = sum(e.seconds for e in simulated(overlap, 800, ",mb=6").events if e.instruction.op in EXCHANGES) / 2
    bytes_per_s = 800 * exchanges / alone
    single, paired = (simulated(overlap, bytes_per_s, f",mb=6,pairs={pairs}").makespan for pairs in ("no", "yes"))
    assert paired < single
    assert alone / paired > 0.85


def test_pairs_keep_no_more_activations_because_one_is_freed_as_the_other_grows() -> None:
    costs = replace(costs_of(SHAPE, 800), saved_bytes=(10,) * LAYERS)

    def activations(pairs: str) -> int:
        plan = Plan.parse(f"tp=2,mb=4,pairs={pairs},stages={LAYERS}")
        return simulate(plan, SHAPE, lower(plan, SHAPE), costs).memory[0]["activations"]

    assert activations("yes") <= activations("no") + 2 * 10  # of the blocks that both are at


@pytest.mark.parametrize("overlap", sorted(OVERLAPS))
def test_what_is_computed_again_takes_as_long_as_the_forward(overlap: str) -> None:
    timeline = simulated(overlap, float("inf"))
    forwards = 4 if OVERLAPS[overlap].again else 3
    assert timeline.busy(0) == pytest.approx(LAYERS * forwards)


def test_activations_of_what_is_computed_again_are_there_for_its_backward_only() -> None:
    costs = replace(costs_of(SHAPE, 800), saved_bytes=(10,) * LAYERS, rebuilt_bytes=(600,) * LAYERS)

    def activations(overlap: str) -> int:
        plan = Plan.parse(f"tp=2,overlap={overlap},stages={LAYERS}")
        return simulate(plan, SHAPE, lower(plan, SHAPE), costs).memory[0]["activations"]

    assert activations("default_checkpoint") == LAYERS * 10 + 600
    assert activations("optim_comm_checkpoint") == LAYERS * 10 + 300  # one unit of two
    assert activations("overlap_checkpoint") <= LAYERS * 10 + 600


def test_messages_of_halves_are_half_as_large() -> None:
    plan, shape = Plan.parse("pp=2,tp=2,overlap=halves,stages=1-1"), stack(2)
    costs = replace(costs_of(shape, float("inf")), cut_bytes=(64, 0), message_link=Link(0, 32.0))
    sends = [e for e in simulate(plan, shape, lower(plan, shape), costs).events if e.instruction.op is Op.SEND_F]
    assert [e.seconds for e in sends] == [1.0] * 4


@settings(max_examples=40, deadline=None)
@given(tensor_cases())
def test_every_program_can_be_simulated_and_computes_all_it_should(case: tuple[Plan, ModelShape]) -> None:
    plan, shape = case
    programs = lower(plan, shape)
    timeline = simulate(plan, shape, programs, costs_of(shape, 100))
    per_block = 4 if plan.again else 3
    for rank in timeline.ranks:
        blocks = {it.block for it in programs[rank] if it.op in COMPUTE}
        assert timeline.busy(rank) == pytest.approx(plan.mb * per_block * len(blocks))
    path = timeline.critical_path()
    assert path[0].start == 0 and path[-1].end == timeline.makespan
    assert all(before.end == after.start for before, after in pairwise(path))


def test_pictures_show_halves_and_exchanges() -> None:
    timeline = simulated("oases", 1600)
    bars = bars_of(timeline)
    assert lanes_of(bars) == ("compute", "collectives")
    assert {"F0.0a", "A0.0b", "CF0.0a/0:3", "CB0.0b/0:1"} <= {bar.title for bar in bars}
    assert {bar.label for bar in bars if bar.lane == "compute"} == {"0a", "0b"}
    lines = [line.plain for line in chart(timeline, (0,), 400)]
    assert any("F0a" in line and "F0b" in line for line in lines) and "A forward again" in lines[-1]
    assert "exchange back" in svg({"predicted": timeline})


def test_traces_tell_halves_apart() -> None:
    plan, shape = Plan.parse("pp=2,tp=2,overlap=halves,stages=1-1"), stack(2)
    trace = chrome_trace({"step": simulate(plan, shape, lower(plan, shape), costs_of(shape, 100))})
    assert '"id": "step F0.0a 0\\u21922"' in trace and '"id": "step F0.0b 0\\u21922"' in trace
    assert '"half": 1, "block": 0, "step": 2' in trace

"""When wires are dropped where micro-batches are cut: those of a slice with it, those of the micro-batch after the last
slice that reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.plan.plan import Plan
from phalanx.plan.rules import OVERLAPS, SLICED_SCHEDULES
from phalanx.program.check import check
from phalanx.program.lifetimes import Leaving, drops, stays
from phalanx.program.lower import lower, lower_forward
from phalanx.program.shape import ModelShape
from tests.program.sliced_plans import Case, encoder_decoder, grains, sliced, slicings
from tests.program.tensor_shapes import exchange, segment, stack, tensor_cases
from tests.program.wire_machine import Machine, leaving_of


def leaving_with_memory(plan: Plan, num_encoder: int) -> Leaving:
    """Of `encoder_decoder`: what every decoder block reads goes on to the last stage."""

    def leaving(stage: int) -> set[str]:
        last = plan.stage_blocks(stage)[-1]
        further = last + 1 >= num_encoder and stage + 1 < plan.num_stages
        return {f"h{last + 1}"} | ({f"h{num_encoder}"} if further else set())

    return leaving


@settings(max_examples=30, deadline=None)
@given(sliced(tensor_cases(SLICED_SCHEDULES)))
def test_every_program_with_slices_has_what_it_reads_and_leaves_nothing_behind(case: Case) -> None:
    plan, shape = case
    for program in lower(plan, shape)[:: plan.tp]:
        assert Machine(plan, shape, program).left_behind() == set()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(sorted(OVERLAPS)), slicings, st.data())
def test_what_belongs_to_the_micro_batch_lives_until_its_last_slice_has_read_it(
    num_encoder: int, num_decoder: int, overlap: str, slices: tuple[tuple[int, ...], ...], data: st.DataObject
) -> None:
    shape = encoder_decoder(num_encoder, num_decoder)
    pp = data.draw(st.integers(1, min(3, shape.num_blocks)))
    cuts = sorted(data.draw(st.sets(st.integers(1, shape.num_blocks - 1), min_size=pp - 1, max_size=pp - 1)))
    stages = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, shape.num_blocks]))
    plan = Plan(pp=pp, tp=2, mb=2, slices=slices, overlap=overlap, stages=stages)
    leaving = leaving_with_memory(plan, num_encoder)
    programs = lower(plan, shape)
    check(plan, shape, programs)
    for program in (*programs, *lower_forward(plan, shape, 3)):
        assert Machine(plan, shape, program, leaving).left_behind() == set()


def test_slices_are_dropped_by_themselves() -> None:
    plan, shape = Plan.parse("tp=2,slices=2,stages=1"), stack(1)
    found = {str(it): set(wires) for it, wires in drops(lower(plan, shape)[0], shape, leaving_of(plan)).items()}
    assert found["F0.0.0/0:2"] == found["F0.0.1/0:2"] == {"e0", "n0"}


def test_a_wire_of_the_micro_batch_is_dropped_once_and_by_the_last_slice() -> None:
    shape, plan = encoder_decoder(1, 1), Plan.parse("tp=2,slices=3,stages=2")
    leaving = leaving_with_memory(plan, 1)
    found = drops(lower(plan, shape)[0], shape, leaving)
    assert [str(it) for it, wires in found.items() if "h1" in wires] == ["F0.0.2/1:3"]
    assert stays(lower(plan, shape)[0], shape, leaving) == {}


def test_a_wire_of_the_micro_batch_that_later_slices_read_stays_when_it_is_handed_on() -> None:
    shape, plan = encoder_decoder(1, 2), Plan.parse("pp=2,tp=2,slices=3,stages=2-1")
    leaving = leaving_with_memory(plan, 1)
    first, last = (lower(plan, shape)[rank] for rank in (0, 2))
    assert stays(first, shape, leaving) == {0: frozenset(("h1",))} and stays(last, shape, leaving) == {}
    assert [str(it) for it, wires in drops(first, shape, leaving).items() if "h1" in wires] == ["F0.0.2/1:3"]
    encoder_alone = replace(plan, stages=(1, 2))
    assert stays(lower(encoder_alone, shape)[0], shape, leaving_with_memory(encoder_alone, 1)) == {}


@pytest.mark.parametrize("overlap, last", [("none", "F0.0.1/1:1"), ("default_checkpoint", "A0.0.0/1:1")])
def test_what_is_computed_again_reads_the_micro_batch_wire_in_reverse_order(overlap: str, last: str) -> None:
    steps = ((segment("h0", "h1"),), (exchange("h1", "w", ((0, 1),)), segment("w h1", "h2")))
    everything = (True, True)
    shape = ModelShape(2, (), everything, everything, steps, (), grains(1, 2), frozenset(("h1",)))
    plan = Plan.parse(f"tp=2,slices=2,overlap={overlap},stages=2")
    found = drops(lower(plan, shape)[0], shape, leaving_of(plan))
    dropped = [str(it) for it, wires in found.items() if "h1" in wires and it.block == 1]
    assert dropped == [last]

"""What is made before a plan is needed."""

from __future__ import annotations

import pytest
import torch

from phalanx.engine.compiled import Compiled
from phalanx.model.segment.segments import Segment
from phalanx.session.ahead import functions, run_on_zeros
from tests import captured

NAMES = (captured.GPT2, captured.T5)


@pytest.mark.parametrize("name", NAMES)
def test_functions_run_on_zeros_of_every_argument_as_they_do_in_a_step(name: str) -> None:
    """Embedding, layers and head, so that integers, masks and keys of dropout are among what is given."""
    compiled, seen = _compiled(name), set[int]()
    for segment in _segments(compiled):
        calls = [segment.forward]
        if any(segment.joint.differentiable):
            calls += [segment.backward, segment.backward_weight] if segment.trains else [segment.backward]
        run_on_zeros(segment, calls, torch.device("cpu"))
        seen.add(len(calls))
    assert max(seen) == 3


def test_functions_that_were_made_are_those_of_a_step() -> None:
    compiled = _compiled(captured.GPT2)
    made = [segment.__dict__.keys() & {"forward", "backward", "backward_weight"} for segment in _segments(compiled)]
    assert made and all("forward" in names for names in made)


def _compiled(name: str) -> Compiled:
    session = captured.named(name).session("mb=2")
    session.close()
    compiled = session.compiled
    for _ in functions(compiled, lambda of: (captured.named(name).batch, 0)):
        pass
    return compiled


def _segments(compiled: Compiled) -> list[Segment]:
    return list({id(each): each for each in compiled.training.compute._segments.values()}.values())

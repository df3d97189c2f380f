"""A session is made of three parts, each of which can be replaced while the others stay."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.engine.layout import ProcessGroups
from phalanx.launch.context import RankContext
from phalanx.params.flat import Piece
from phalanx.params.rank_state import State
from phalanx.session.session import Session
from tests import captured

LR = 1e-2


def case() -> captured.Case:
    return captured.named(captured.GPT2)


def exact(session: Session) -> dict[str, Tensor]:
    return {name: weight.exact.clone() for name, weight in session.state.parameters.weights.items()}


def steps(session: Session, count: int) -> dict[str, Tensor]:
    for _ in range(count):
        session.step(case().batch, 0, LR).read()
    return exact(session)


def connections(compiled: Compiled) -> ProcessGroups:
    return ProcessGroups(compiled.formation, Links(RankContext.alone()), owns_links=True)


def require_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys() and all(torch.equal(got[name], value) for name, value in expected.items())


def test_state_and_functions_go_on_over_new_connections() -> None:
    expected = steps(case().session("mb=2"), 2)
    old = case().session("mb=2")
    steps(old, 1)
    old.connected.close()
    num_segments = len(old.compiled.training.compute._segments)
    new = Session(old.compiled, connections(old.compiled), old.state)
    require_equal(steps(new, 1), expected)
    assert len(new.compiled.training.compute._segments) == num_segments  # nothing was traced again
    new.close()


def test_functions_and_connections_serve_another_state() -> None:
    first = case().session("mb=2")
    initial, expected = exact(first), steps(first, 1)
    steps(first, 2)

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        return piece.of(case().parameters[name])

    compiled = first.compiled
    state = State(compiled.formation.state, 0, read, RunConfig.create(dtype="float64"), torch.device("cpu"))
    again = Session(compiled, first.connected, state)
    require_equal(exact(again), initial)
    require_equal(steps(again, 1), expected)
    again.close()

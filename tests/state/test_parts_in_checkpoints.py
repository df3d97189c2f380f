"""Training state of tensor-parallel ranks in checkpoints and exports: saved under one plan, taken up under any other.

Every rank's parameters and optimizer are real; only the ranks are not processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.engine.layout import RankLayout
from phalanx.params import rank_state
from phalanx.params.flat import Piece
from phalanx.params.optimizer import Optimizer, make_optimizer
from phalanx.params.parameters import Parameters, load_parameters
from phalanx.plan.plan import Plan
from phalanx.state import checkpoint
from phalanx.state.background import AsyncSaver
from phalanx.state.checkpoint import Checkpoint
from phalanx.state.layout import Box
from phalanx.state.local import Local
from phalanx.state.rendezvous import LocalRendezvous
from phalanx.state.reshard import gather_tensors
from tests.params.sharded_cases import CPU, Model, Split
from tests.state.state_workers import Mail, on_threads

USES = (("embed",), ("norm", "qkv", "kv", "out"), ("embed", "head.bias"))


def model(tp: int) -> Model:
    """A vocabulary of 7, fused projections along either dim, and keys and values that at most two ranks can split."""
    own, none = tuple(range(tp)), (0,) * tp
    pairs = tuple(index * min(tp, 2) // tp for index in own)
    return Model(
        USES,
        {
            "embed": Split((7, 4), 0, (7,), own, summed=False),
            "norm": Split((4,), 0, (), none, summed=True),
            "qkv": Split((4, 15), 1, (5, 5, 5), own, summed=False),
            "kv": Split((8, 4), 0, (4, 4), pairs, summed=True),
            "out": Split((5, 4), 0, (5,), own, summed=False),
            "head.bias": Split((7,), 0, (7,), own, summed=False),
        },
        tp,
    )


PLANS = [
    Plan(stages=(3,)),
    Plan(dp=2, tp=2, stages=(3,)),
    Plan(dp=2, tp=2, zero=1, stages=(3,)),
    Plan(dp=2, tp=3, zero=3, stages=(3,)),
    Plan(pp=2, dp=4, tp=2, zero=2, zero_degree=2, stages=(1, 2)),
    Plan(pp=3, tp=4, stages=(1, 1, 1)),
]


def named(plan: Plan) -> str:
    return f"pp{plan.pp}-dp{plan.dp}-tp{plan.tp}-zero{plan.zero}"


VALUES = model(1).values()
STATE = {name: torch.rand(value.shape) for name, value in VALUES.items()}  # in the place of Adam's averages


def train(parameters: Parameters) -> Optimizer:
    """One step, after which the averages are STATE, so that what every element has is known."""
    weights = parameters.trained
    optimizer = Optimizer(make_optimizer(weights, RunConfig()), weights, clip=None)
    ones = {name: torch.ones_like(weight.exact) for name, weight in weights.items()}
    optimizer.step(ones, 0.0, torch.tensor(1.0), torch.tensor(True))
    for name, weight in weights.items():
        optimizer.inner.state[weight.exact]["exp_avg"].copy_(weight.piece.shaped(weight.piece.of(STATE[name])))
    return optimizer


def parameters_from(formation: RankLayout, source: Checkpoint | Mapping[str, Tensor]) -> Parameters:
    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        if isinstance(source, Checkpoint):
            return piece.read(source, f"{'master' if is_master else 'model'}/{name}")
        return piece.of(source[name])

    return load_parameters(formation.state, formation.rank, read, device=CPU)


def save(folder: Path, plan: Plan) -> Checkpoint:
    board: dict[str, str] = {}
    savers: list[AsyncSaver] = []
    for rank in range(plan.world):
        formation = model(plan.tp).formation(plan, rank, dtype="bfloat16")
        parameters = parameters_from(formation, VALUES)
        saver = AsyncSaver(folder, 1, rank=rank, world=plan.world, rendezvous=LocalRendezvous(rank, board), timeout=20)
        saver.save(
            1,
            rank_state.of_checkpoint(
                formation.state, formation.state.kept(rank), parameters.weights, train(parameters).tensors()
            ),
            {},
        )
        savers.append(saver)
    path, *_ = [saver.wait() for saver in savers]
    assert path is not None
    return checkpoint.open(path)


def resumed(found: Checkpoint, formation: RankLayout) -> tuple[Parameters, Optimizer]:
    parameters = parameters_from(formation, found)
    weights = parameters.trained
    optimizer = Optimizer(make_optimizer(weights, RunConfig()), weights, clip=None)
    slots = [name.split("/", 2) for name in found.names() if name.startswith("optimizer/")]
    stored = partial(rank_state.from_checkpoint, found)
    optimizer.load(
        [(slot, name) for _, slot, name in slots],
        lambda slot, name: stored(f"optimizer/{slot}/{name}", weights[name].piece), {},
    )  # fmt: skip
    return parameters, optimizer


@pytest.mark.parametrize("before", PLANS, ids=named)
def test_what_any_plan_saved_every_plan_goes_on_from(before: Plan, tmp_path: Path) -> None:
    found = save(tmp_path, before)
    for name, value in VALUES.items():
        assert torch.equal(found.read(f"master/{name}"), value)
        assert torch.equal(found.read(f"optimizer/exp_avg/{name}"), STATE[name])
        assert found.shape(f"optimizer/step/{name}") == ()
    for plan in PLANS:
        for rank in range(plan.world):
            parameters, optimizer = resumed(found, model(plan.tp).formation(plan, rank, dtype="bfloat16"))
            for name, weight in parameters.trained.items():
                state = optimizer.inner.state[weight.exact]
                assert torch.equal(weight.exact.reshape(-1), weight.piece.of(VALUES[name]))
                assert torch.equal(weight.copy.reshape(-1), weight.piece.of(VALUES[name].bfloat16()))
                assert torch.equal(state["exp_avg"].reshape(-1), weight.piece.of(STATE[name]))
                assert state["exp_avg"].shape == weight.exact.shape
                assert (state["step"].shape, state["step"].item()) == ((), 1)


@pytest.mark.parametrize("plan", PLANS[1:], ids=named)
def test_whole_tensors_come_together_from_parts_for_export(plan: Plan) -> None:
    mail = Mail()
    held = []
    for rank in range(plan.world):
        formation = model(plan.tp).formation(plan, rank)
        parameters = parameters_from(formation, VALUES)
        held.append(list(rank_state.of_parameters(formation.state, rank, parameters)))
    layout = model(plan.tp).formation(plan, 0).state.all_parameters()

    def body(rank: int) -> dict[str, Tensor]:
        local = {shard.name: data for shard, data in held[rank]}
        return dict(gather_tensors(layout, local, rank=rank, transport=mail.seat(rank)))

    whole, *nothing = on_threads(plan.world, body)
    assert not any(nothing) and whole.keys() == VALUES.keys()
    assert all(torch.equal(whole[name], VALUES[name]) for name in VALUES)


class Counting:
    """A source that counts the elements it is asked for."""

    def __init__(self) -> None:
        self.read = 0

    def read_flat(self, name: str, boxes: Sequence[Box]) -> Tensor:
        self.read += sum(box.numel for box in boxes)
        return torch.cat([VALUES[name][box.slices()].reshape(-1) for box in boxes])


def test_reading_a_piece_touches_only_its_own_elements() -> None:
    source, local = Counting(), Local((4, 15), 1, ((0, 2), (5, 7), (10, 12)))
    found = Piece("qkv", local, 3, 20).read(source, "qkv")
    assert source.read == 17
    assert torch.equal(found, VALUES["qkv"].view(4, 3, 5)[:, :, :2].reshape(-1)[3:20])

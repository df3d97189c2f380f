"""Parameters that are decayed, trained faster or frozen by a condition on name and tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.errors import ConfigError
from phalanx.params.flat import Piece
from phalanx.params.groups import Groups, ParameterGroup, group_parameters
from phalanx.params.optimizer import make_optimizer
from phalanx.params.parameters import Weight
from phalanx.state.local import Local

SHAPES = {"embed.weight": (8, 4), "mlp.weight": (4, 4), "mlp.bias": (4,), "norm.weight": (4,)}
TIED = {"head.weight": "embed.weight"}


def grouped(*groups: ParameterGroup) -> Groups:
    return group_parameters(groups, SHAPES, TIED, torch.float32)


def weights() -> dict[str, Weight]:
    values = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    return {name: Weight(Piece.whole(name, Local(SHAPES[name])), value, value, True) for name, value in values.items()}


def no_decay(name: str, tensor: Tensor) -> bool:
    return name.endswith(".bias") or tensor.dim() == 1


def test_a_group_reads_from_text() -> None:
    assert ParameterGroup.read("*.bias: decay=0, lr=0.5") == ParameterGroup("*.bias", lr=0.5, decay=0.0)
    assert ParameterGroup.read("embed.*:freeze") == ParameterGroup("embed.*", freeze=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*.bias", "'\\*.bias' is no parameter group"),
        (":lr=1", "is no parameter group"),
        ("*.bias:speed=2", "'speed=2' is no setting of a group"),
        ("*.bias:freeze=1", "'freeze=1' is no setting of a group"),
        ("*.bias:lr", "'lr' is no setting of a group"),
        ("*.bias:lr=x", "'x' is not a number"),
        ("*.bias:lr=-1", "lr and decay must not be negative"),
        ("*.bias:freeze,lr=2", "what is frozen has neither learning rate nor decay"),
    ],
)
def test_a_text_that_is_no_group_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParameterGroup.read(text)


def test_the_first_group_whose_condition_holds_has_the_parameter_under_any_of_its_names() -> None:
    found = grouped(ParameterGroup(no_decay, decay=0.0), ParameterGroup("head.*", lr=2.0), ParameterGroup("*.weight"))
    assert found.number == {"mlp.bias": 0, "norm.weight": 0, "embed.weight": 1, "mlp.weight": 2}
    assert grouped(ParameterGroup("mlp.*", freeze=True)).frozen == {"mlp.weight", "mlp.bias"}


def test_a_group_without_parameters_and_a_condition_that_fails_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parameter group 'mpl\.weight': no parameter is in it") as info:
        grouped(ParameterGroup("mpl.weight"))
    assert "did you mean 'mlp.weight'" in info.value.hint
    with pytest.raises(ConfigError, match=r"its condition failed: ZeroDivisionError") as info:
        grouped(ParameterGroup(lambda name, tensor: 1 / 0))
    assert "a tensor that has a shape but no values" in info.value.hint


def test_an_optimizer_gets_a_group_for_each_kind_of_update() -> None:
    config = RunConfig(lr=0.1, weight_decay=0.2)
    groups = grouped(ParameterGroup("embed.*", lr=3.0), ParameterGroup("mlp.bias", decay=0.7))
    made = make_optimizer(weights(), config, groups=groups)
    shown = [(len(g["params"]), g["weight_decay"], pytest.approx(g["lr"])) for g in made.param_groups]
    assert shown == [(1, 0.2, 0.1), (1, 0.0, 0.1), (1, 0.2, 0.3), (0, 0.0, 0.3), (1, 0.7, 0.1)]


def test_decay_of_an_optimizer_that_has_none_is_refused() -> None:
    config = RunConfig(optimizer="tests.run_helpers.NoDecay")
    with pytest.raises(ConfigError, match=r"decay = 0\.7 does nothing: NoDecay does not decay weights"):
        make_optimizer(weights(), config, groups=grouped(ParameterGroup("mlp.bias", decay=0.7)))

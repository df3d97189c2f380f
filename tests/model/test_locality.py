"""Operators that bring tokens together outside attention are found, and models that have them refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.errors import PlanError
from phalanx.model.capture import capture
from phalanx.model.slicing import counts_tokens, slice_model, tokens_meet
from phalanx.model.zoo import zoo
from phalanx.tasks.base import Input
from tests import captured

BATCH, TOKENS, WIDTH = 59, 53, 8
KERNEL, LAST, SQUARE = torch.ones(WIDTH, WIDTH, 3), torch.ones(WIDTH, 4), torch.ones(WIDTH, WIDTH)
Function = Callable[[Tensor], Tensor]

TOGETHER: dict[str, Function] = {
    "mean over tokens": lambda x: x - x.mean(1, keepdim=True),
    "mean over everything": lambda x: x - x.mean(),
    "largest of all tokens": lambda x: x.amax((1, 2)),
    "running sum": lambda x: x.cumsum(1),
    "softmax over tokens": lambda x: x.softmax(1),
    "reversal": lambda x: x.flip(1),
    "rotation": lambda x: x.roll(1, 1),
    "shift by slices": lambda x: torch.cat([x[:, :1], x[:, :-1]], 1),
    "shift by padding": lambda x: functional.pad(x, (0, 0, 1, -1)),
    "first token": lambda x: x + x.select(1, 0)[:, None],
    "convolution": lambda x: functional.conv1d(x.transpose(1, 2), KERNEL, padding=1),
    "scores times values": lambda x: (x @ x.transpose(1, 2)) @ x,
    "einsum over tokens": lambda x: torch.einsum("btw,btv->bwv", x, x),
    "einsum without an arrow": lambda x: torch.einsum("btw,btv", x, x),
    "einsum with dots": lambda x: torch.einsum("...tw,...tv->...wv", x, x),
    "halves of the tokens": lambda x: x.split(TOKENS - 1, 1)[0],
    "running sum over samples and tokens in one dim": lambda x: x.flatten(0, 1).cumsum(0),
}
APART: dict[str, Function] = {
    "product with a weight": lambda x: x @ LAST,
    "linear": lambda x: functional.linear(x, SQUARE),
    "product on flattened rows": lambda x: (x.flatten(0, 1) @ LAST).unflatten(0, (BATCH, TOKENS)),
    "einsum over features": lambda x: torch.einsum("btw,wv->btv", x, LAST),
    "einsum over features with dots": lambda x: torch.einsum("...w,wv->...v", x, LAST),
    "norm": lambda x: functional.layer_norm(x, (WIDTH,)),
    "mean over features": lambda x: x - x.mean(-1, keepdim=True),
    "softmax over features": lambda x: x.softmax(-1),
    "halves of the features": lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1),
    "chunks of the features": lambda x: x.chunk(2, dim=-1)[0],
    "best features": lambda x: x.topk(2, dim=-1)[0],
    "all tokens": lambda x: x[:, :],
    "heads": lambda x: x.unflatten(-1, (2, 4)).permute(0, 2, 1, 3).unsqueeze(1),
    "padded features": lambda x: functional.pad(x, (0, 2)),
    "sum of everything": lambda x: x.sum(),
    "sorted rows": lambda x: x[:, :, 0].flatten().sort()[1],
}


class Called(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.forward = function


def meets(function: Function) -> bool:
    graph = torch.export.export(Called(function), (torch.ones(BATCH, TOKENS, WIDTH),), strict=False).graph
    return any(tokens_meet(node, counts_tokens(TOKENS, BATCH)) for node in graph.nodes)


@pytest.mark.parametrize("what", TOGETHER)
def test_an_operator_that_computes_a_token_from_others_is_found(what: str) -> None:
    assert meets(TOGETHER[what])


@pytest.mark.parametrize("what", APART)
def test_an_operator_that_keeps_tokens_apart_is_not(what: str) -> None:
    assert not meets(APART[what])


class Language(nn.Module):
    """Predicts each token from its own id and, if it mixes, from the mean of all."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.embed, self.head, self.mixes = nn.Embedding(30, 16), nn.Linear(16, 30), mixes

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        x = x - x.mean(1, keepdim=True) if self.mixes else x
        return {"loss": functional.cross_entropy(self.head(x).view(-1, 30), labels.view(-1))}


def _language(mixes: bool) -> captured.Captured:
    inputs = tuple(Input(name, "int64", ("batch", "tokens")) for name in ("input_ids", "labels"))
    return capture(zoo.resolve(Language(mixes)), inputs, dtype=torch.float64, check=False, use_cache=False)


def test_a_model_whose_tokens_meet_outside_attention_is_refused_with_the_place_and_the_operator() -> None:
    assert set(slice_model(_language(mixes=False), torch.float64).granularities) == {"slice"}
    with pytest.raises(PlanError) as info:
        slice_model(_language(mixes=True), torch.float64)
    wanted = "plan: slices need tokens to meet in attention alone, and in head they meet in aten.mean.dim"
    assert info.value.message == wanted
    assert info.value.hint == "leave slices out: this model cannot be run slice by slice"


def test_a_mixture_of_experts_keeps_its_tokens_apart() -> None:
    assert set(slice_model(captured.named(captured.MIXTRAL).captured, torch.float64).granularities) == {"slice"}

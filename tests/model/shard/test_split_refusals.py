"""What cannot be split is refused with the reason, or done whole and named."""

from __future__ import annotations

import pytest
import torch

from phalanx.errors import PlanError
from phalanx.model.shard.shard import shard
from phalanx.model.shard.sharded import Sharded
from phalanx.plan.plan import Plan
from tests import captured

BERT = "bert-base-cased"


def split(name: str, plan: str) -> Sharded:
    return shard(captured.named(name).captured, Plan.parse(plan), 0, torch.float64)


def refusal(name: str, plan: str) -> tuple[str, str]:
    with pytest.raises(PlanError) as caught:
        split(name, plan)
    assert caught.value.hint is not None
    return caught.value.message, caught.value.hint


def test_more_ranks_than_heads_are_refused_with_the_number_of_heads() -> None:
    message, hint = refusal(captured.GPT2, "tp=8")
    assert message == "plan: transformer.h.0 attends with 4 heads, which 8 ranks cannot split"
    assert hint == (
        "use tp=4 or less, a smaller degree for that unit (degrees=…), or replicate=yes to do the attention whole on "
        "every rank"
    )


@pytest.mark.parametrize("plan", ["tp=8,replicate=yes", "tp=8,degrees=4:8"])
def test_what_the_refusal_advises_works(plan: str) -> None:
    found = split(captured.GPT2, plan).parameters["transformer.h.0.attn.c_proj.weight"].local
    assert found.is_whole == ("replicate" in plan)


def test_attention_that_is_done_whole_is_named_with_its_weights() -> None:
    assert any(
        "transformer.h.0.attn.c_attn.weight" in line for line in split(captured.GPT2, "tp=8,replicate=yes").replicated
    )


def test_degrees_for_another_number_of_units_are_refused() -> None:
    message, hint = refusal(captured.GPT2, "tp=2,degrees=2:1:2")
    assert message == "plan: degrees=2:1:2 is for 3 units, and layer 0 of the model has 2"
    assert hint == "give layer 0 2 degrees, or one that stands for all its units"


def test_degrees_for_another_number_of_layers_are_refused() -> None:
    message, hint = refusal(captured.GPT2, "tp=2,degrees=2:1*3")
    assert message == "plan: degrees=2:1*3 is for 3 layers, and the model has 4: layer 3 has none"
    assert hint == "give 4 layers, or one that stands for all"


def test_layers_that_attend_twice_need_three_degrees() -> None:
    message, _ = refusal(captured.T5, "tp=2,degrees=2:1")
    assert message == "plan: degrees=2:1 is for 2 units, and layer 4 of the model has 3"


def test_what_no_rule_splits_is_listed_by_its_weight_and_why() -> None:
    gate = split(captured.MIXTRAL, "tp=2").replicated[0]
    assert gate.startswith("model.layers.0.mlp.gate.weight: aten.softmax.int along")
    assert split(BERT, "tp=2").replicated == ("cls.predictions.transform.dense.weight: a norm over a split dim",)


@pytest.mark.parametrize("name", [captured.GPT2, captured.LLAMA, captured.GEMMA3, captured.T5, captured.WHISPER])
def test_nothing_is_done_whole_in_these_architectures(name: str) -> None:
    assert split(name, "tp=2").replicated == ()

"""What is said about a split model is what its ranks do: shares, splits, heads, wholes and collectives."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from phalanx.errors import PlanError
from phalanx.model.captured import Captured
from phalanx.model.shard.report import BlockReport, Collective, Report, WeightSplit, report, split_share
from phalanx.model.shard.shard import shard
from phalanx.model.shard.work import work_of
from phalanx.plan.plan import Plan
from tests.captured import GPT2, LLAMA, MIXTRAL, WHISPER, named, own

DIMS = {"batch": 4, "tokens": 9}
BYTES = 8  # float64


@cache
def split(name: str, text: str, **overrides: int) -> Report:
    captured = named(name, **overrides).captured
    names = {dim for spec in captured.inputs for dim in spec.dims if isinstance(dim, str)}
    return report(captured, Plan.parse(text), torch.float64, {dim: DIMS.get(dim, 9) for dim in names})


def layer(found: Report) -> BlockReport:
    return next(block for block in found.blocks if block.attention)


def weights(block: BlockReport) -> dict[str, WeightSplit]:
    return {weight.name: weight for weight in block.weights}


@given(st.integers(2, 8), st.lists(st.tuples(st.integers(1, 10**12), st.booleans()), min_size=1, max_size=6))
def test_the_share_is_that_of_the_products_that_are_divided(tp: int, products: list[tuple[int, bool]]) -> None:
    flops = sum(size for size, _ in products)
    done = sum(size if divided else tp * size for size, divided in products)
    divided = sum(size for size, divided in products if divided)
    assert split_share(flops, done, tp) == pytest.approx(divided / flops, abs=1e-9)


def test_what_four_ranks_do_twice_counts_two_thirds_and_nothing_to_do_counts_as_split() -> None:
    assert split_share(30, 60, 4) == pytest.approx(2 / 3)
    assert split_share(0, 0, 4) == 1.0


@pytest.mark.parametrize("text", ["tp=2", "tp=3", "tp=2,sequence=yes", "tp=4,degrees=2:1"])
def test_ranks_together_do_what_the_model_does_where_everything_is_split(text: str) -> None:
    found = split(GPT2, text)
    assert found.share == pytest.approx(1.0, abs=1e-9)
    assert sum(found.flops_per_rank) == pytest.approx(found.flops)
    assert found.whole == ()


def test_heads_that_do_not_divide_are_split_unevenly() -> None:
    block = layer(split(GPT2, "tp=3"))
    assert block.attention == (((2, 2), (1, 1), (1, 1)),)
    joint = weights(block)["attn.c_attn.weight"]
    assert (joint.how, joint.sections) == ("columns", 3)
    assert joint.sizes[0] == 2 * joint.sizes[1] == 2 * joint.sizes[2]


def test_every_weight_says_how_it_is_split() -> None:
    embedding, block, head = split(GPT2, "tp=2").blocks
    hows = {name: weight.how for name, weight in weights(block).items()}
    assert hows == {
        "ln_1.weight": "whole", "ln_1.bias": "whole", "attn.c_attn.bias": "elements", "attn.c_attn.weight": "columns",
        "attn.c_proj.bias": "whole", "attn.c_proj.weight": "rows", "ln_2.weight": "whole", "ln_2.bias": "whole",
        "mlp.c_fc.bias": "elements", "mlp.c_fc.weight": "columns", "mlp.c_proj.bias": "whole",
        "mlp.c_proj.weight": "rows",
    }  # fmt: skip
    assert [weights(part)["transformer.wte.weight"].how for part in (embedding, head)] == ["vocabulary"] * 2
    assert {weight.unit for weight in block.weights} == {"attn", "feed-forward"}


def test_fewer_key_value_heads_than_ranks_are_kept_several_times_and_lower_the_share() -> None:
    found = split(LLAMA, "tp=2", num_key_value_heads=1)
    block, case = layer(found), named(LLAMA, num_key_value_heads=1).captured
    assert block.attention == (((4, 1), (4, 1)),)
    copies = {name: weight.copies for name, weight in weights(block).items()}
    assert copies["self_attn.k_proj.weight"] == 2 and copies["self_attn.q_proj.weight"] == 1
    rows = DIMS["batch"] * DIMS["tokens"]
    twice = sum(2 * rows * a * b for name, (a, b) in projections(case, ("k_proj", "v_proj")).items())
    assert found.share == pytest.approx(1 - twice / found.flops, abs=1e-9)
    layers = sum(len(block.names) for block in found.blocks if block.attention)
    said = {name: (reason, count) for name, reason, count in found.whole}
    assert said["model.layers.*.self_attn.v_proj.weight"] == (
        "fewer key/value heads than ranks: 2 ranks have the same", layers,
    )  # fmt: skip


def projections(case: Captured, which: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    return {n: (s[0], s[1]) for n, s in case.shapes.items() if n.split(".")[-2] in which}


def test_what_no_rule_splits_and_what_a_rule_could_not_split_is_named_with_the_reason() -> None:
    electra = {name: reason for name, reason, _ in split("google/electra-base-generator", "tp=2").whole}
    assert electra == {
        "electra.embeddings_project.weight": "a split value leaves the block",
        "generator_predictions.dense.weight": "a norm over a split dim",
    }
    ((gate, reason, count),) = split(MIXTRAL, "tp=2").whole
    assert (gate, reason) == ("model.layers.*.mlp.gate.weight", "aten.softmax.int along a split dim") and count > 1


def test_convolutions_one_after_the_other_are_split_by_columns_and_rows() -> None:
    found = split(WHISPER, "tp=2")
    embedding = found.blocks[0]
    assert embedding.names == ("embedding",) and embedding.share == pytest.approx(1) and found.share == pytest.approx(1)
    hows = {name: weight.how for name, weight in weights(embedding).items()}
    assert hows["model.encoder.conv1.weight"] == "columns" and hows["model.encoder.conv2.weight"] == "rows"


class Whole(nn.Module):
    """A product whose result is normalised cannot be split by columns; the next one can."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.a(x))
        return nn.functional.mse_loss(self.c(nn.functional.gelu(self.b(hidden)))[:, :, 0], y)


def test_a_product_done_whole_counts_on_every_rank() -> None:
    captured = own(Whole(), x=torch.randn(2, 3, 8), y=torch.randn(2, 3)).captured
    found = report(captured, Plan(tp=2), torch.float64, {dim: 4 for dim in ("batch", *_dims(captured))})
    assert [(name, reason) for name, reason, _ in found.whole] == [("a.weight", "a norm over a split dim")]
    assert found.share == pytest.approx((8 * 24 + 24) / (8 * 8 + 8 * 24 + 24))


def _dims(captured: Captured) -> set[str]:
    return {dim for spec in captured.inputs for dim in spec.dims if isinstance(dim, str)}


def test_a_layer_sums_twice_in_each_direction_at_the_size_of_its_activations() -> None:
    block = layer(split(LLAMA, "tp=2"))
    width = named(LLAMA).captured.shapes["model.norm.weight"][0]
    size = DIMS["batch"] * DIMS["tokens"] * width * BYTES
    assert block.collectives == tuple(
        Collective(unit, direction, "all_reduce", 2, size)
        for direction in ("forward", "backward")
        for unit in ("self_attn", "feed-forward")
    )


def test_with_the_sequence_split_padded_parts_are_gathered_and_scattered() -> None:
    block = layer(split(LLAMA, "tp=2,sequence=yes"))
    width = named(LLAMA).captured.shapes["model.norm.weight"][0]
    kinds = sorted((each.direction, each.kind, each.count) for each in block.collectives)
    assert kinds == [
        (direction, kind, 1) for direction in ("backward", "forward") for kind in ("all_gather", "reduce_scatter")
        for _ in range(2)
    ]  # fmt: skip
    assert {each.bytes for each in block.collectives} == {DIMS["batch"] * 10 * width * BYTES}  # 9 tokens as 2 × 5


def test_a_unit_of_degree_one_lies_whole_and_sends_nothing_of_its_own() -> None:
    block = layer(split(LLAMA, "tp=2,degrees=2:1"))
    assert weights(block)["mlp.up_proj.weight"].how == "samples"
    assert {each.ranks for each in block.collectives} == {2}
    assert not [each for each in block.collectives if each.unit == "feed-forward" and each.kind == "all_reduce"]


def test_parameters_of_a_rank_are_its_parts_of_split_ones_and_all_of_the_others() -> None:
    found, captured = split(GPT2, "tp=3"), named(GPT2).captured
    ranks = [shard(captured, Plan(tp=3), index, torch.float64) for index in range(3)]
    assert found.parameters_per_rank == tuple(sum(p.local.numel for p in r.parameters.values()) for r in ranks)
    assert found.parameters == sum(torch.Size(shape).numel() for shape in captured.shapes.values())
    assert found.parameters < sum(found.parameters_per_rank) < 3 * found.parameters


def test_blocks_that_are_split_alike_are_one_entry() -> None:
    found = split(LLAMA, "tp=2")
    names = [name for block in found.blocks for name in block.names]
    assert names == [block.name for block in named(LLAMA).captured.blocks.blocks]
    assert [len(block.names) > 1 for block in found.blocks] == [False, True, False]


def test_activations_of_a_rank_look_as_its_part_of_the_samples_and_tokens() -> None:
    captured, plan = named(LLAMA).captured, Plan.parse("tp=2,degrees=2:1,sequence=yes")
    sharded = shard(captured, plan, 0, torch.float64)
    found = work_of(captured, sharded, 2, torch.float64, DIMS)
    width = captured.shapes["model.norm.weight"][0]
    first, second = (captured.blocks.blocks[i].outputs[0] for i in (0, 1))
    assert tuple(found.activations[first].shape) == (4, 5, width)  # the embedding has degree 2: half of the 9 tokens
    assert tuple(found.activations[second].shape) == (2, 9, width)  # the feed-forward has degree 1: half of the samples


def test_more_ranks_than_heads_are_refused_or_attended_whole() -> None:
    with pytest.raises(PlanError, match="attends with 4 heads, which 5 ranks cannot split"):
        split(GPT2, "tp=5")
    found = split(GPT2, "tp=5,replicate=yes")
    assert layer(found).attention == (((4, 4),) * 5,)
    assert found.share < 0.9 and "transformer.h.*.attn.c_attn.weight" in {name for name, *_ in found.whole}

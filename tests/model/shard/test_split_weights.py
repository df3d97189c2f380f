"""Which part of every weight lies on which rank, on the graphs of real architectures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from phalanx.model.shard.shard import shard
from phalanx.model.shard.sharded import Sharded
from phalanx.plan.plan import Plan
from phalanx.state.local import Local
from tests import captured

PHI3, QWEN2 = "microsoft/Phi-3-mini-4k-instruct", "Qwen/Qwen2.5-0.5B"
ALL_THREE = ((0, 1, 2),)


def views(name: str, plan: str, **overrides: object) -> list[Sharded]:
    """The model as each tensor-parallel rank sees it."""
    case, parsed = captured.named(name, **overrides), Plan.parse(plan)
    return [shard(case.captured, parsed, index, torch.float64) for index in range(parsed.tp)]


def ranges(ranks: Sequence[Sharded], name: str) -> list[tuple[tuple[int, int], ...]]:
    return [rank.parameters[name].local.ranges for rank in ranks]


def test_a_fused_projection_of_25_heads_is_cut_by_its_sections_in_whole_heads() -> None:
    ranks = views(captured.GPT2, "tp=4", n_head=25, n_embd=100)
    assert ranges(ranks, "transformer.h.0.attn.c_attn.weight") == [
        ((0, 28), (100, 128), (200, 228)), ((28, 52), (128, 152), (228, 252)),
        ((52, 76), (152, 176), (252, 276)), ((76, 100), (176, 200), (276, 300)),
    ]  # fmt: skip
    assert [rank.parameters["transformer.h.0.attn.c_proj.weight"].local.dim for rank in ranks] == [0] * 4
    assert ranges(ranks, "transformer.h.0.attn.c_proj.weight") == [((0, 28),), ((28, 52),), ((52, 76),), ((76, 100),)]


def test_a_bias_is_cut_with_the_columns_and_whole_after_the_rows() -> None:
    ranks = views(captured.GPT2, "tp=2")
    bias = "transformer.h.0.{}.bias"
    assert ranges(ranks, bias.format("mlp.c_fc")) == ranges(ranks, bias.format("mlp.c_fc").replace("bias", "weight"))
    assert ranks[1].parameters[bias.format("mlp.c_proj")].local.is_whole


def test_joint_queries_keys_values_and_joint_gates_are_cut_by_their_sections() -> None:
    ranks = views(PHI3, "tp=2")
    layer = "model.layers.0."
    assert ranges(ranks, f"{layer}self_attn.qkv_proj.weight") == [
        ((0, 32), (64, 96), (128, 160)), ((32, 64), (96, 128), (160, 192)),
    ]  # fmt: skip
    assert ranges(ranks, f"{layer}mlp.gate_up_proj.weight") == [((0, 48), (96, 144)), ((48, 96), (144, 192))]


def test_the_gates_of_all_experts_are_cut_and_their_router_is_not() -> None:
    ranks = views(captured.MIXTRAL, "tp=2")
    experts = ranks[0].parameters["model.layers.0.mlp.experts.gate_up_proj"].local
    assert (experts.dim, experts.ranges) == (1, ((0, 48), (96, 144)))
    assert ranks[0].parameters["model.layers.0.mlp.experts.down_proj"].local.dim == 2
    assert ranks[0].parameters["model.layers.0.mlp.gate.weight"].local.is_whole


def test_ranks_that_share_a_key_value_head_keep_it_both_and_sum_its_gradient() -> None:
    """14 heads and 2 key/value heads on 4 ranks."""
    ranks = views(QWEN2, "tp=4")
    attention = "model.layers.0.self_attn."
    assert ranges(ranks, f"{attention}q_proj.weight") == [((0, 16),), ((16, 28),), ((28, 44),), ((44, 56),)]
    for name in ("k_proj.weight", "v_proj.bias"):
        assert ranges(ranks, attention + name) == [((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),)]
        found = ranks[0].parameters[attention + name]
        assert found.holders == found.sums == ((0, 1), (2, 3))


def test_a_single_key_value_head_lies_on_all_ranks_and_so_do_the_norms_of_heads() -> None:
    ranks = views(captured.GEMMA3, "tp=3")
    attention = "model.layers.0.self_attn."
    assert ranges(ranks, f"{attention}q_proj.weight") == [((0, 16),), ((16, 24),), ((24, 32),)]
    for name in ("k_proj.weight", "q_norm.weight", "k_norm.weight"):
        found = ranks[2].parameters[attention + name]
        assert found.local.local_shape == found.local.shape and found.sums == found.holders == ALL_THREE
    assert ranks[0].parameters["model.layers.0.input_layernorm.weight"].sums == ()


def test_a_norm_between_split_regions_sums_its_gradient_where_ranks_have_other_tokens() -> None:
    name = "model.layers.0.input_layernorm.weight"
    assert views(captured.LLAMA, "tp=2")[0].parameters[name].sums == ()
    assert views(captured.LLAMA, "tp=2,sequence=yes")[0].parameters[name].sums == ((0, 1),)


def test_a_table_of_relative_positions_meets_no_tokens_and_is_summed_by_nobody() -> None:
    ranks = views(captured.T5, "tp=2,sequence=yes")
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert ranks[0].parameters[name].sums == ranks[0].parameters["shared.weight"].sums == ()


def test_an_odd_vocabulary_is_cut_as_evenly_as_it_can_be_and_tied_weights_alike() -> None:
    ranks = views(captured.GPT2, "tp=4")
    assert ranges(ranks, "transformer.wte.weight") == [((0, 26),), ((26, 51),), ((51, 76),), ((76, 101),)]


def test_a_unit_of_degree_one_keeps_its_weights_whole_and_sums_them_over_all_parts() -> None:
    ranks = views(captured.LLAMA, "tp=2,degrees=2:1")
    whole = ranks[0].parameters["model.layers.0.mlp.down_proj.weight"]
    assert whole.local.is_whole and whole.sums == whole.holders == ((0, 1),)
    assert not ranks[0].parameters["model.layers.0.self_attn.o_proj.weight"].local.is_whole


def test_a_unit_of_a_smaller_degree_is_cut_alike_in_every_part() -> None:
    ranks = views(captured.LLAMA, "tp=4,degrees=2:4")
    found = ranks[0].parameters["model.layers.0.self_attn.o_proj.weight"]
    assert ranges(ranks, "model.layers.0.self_attn.o_proj.weight") == [((0, 32),), ((32, 64),)] * 2
    assert found.holders == found.sums == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    "name",
    [
        captured.GPT2, captured.LLAMA, pytest.param(captured.GEMMA3, marks=pytest.mark.long), captured.T5,
        captured.MIXTRAL,
    ],
)  # fmt: skip
def test_every_element_of_every_weight_lies_somewhere(name: str) -> None:
    for plan in ("tp=2", "tp=3", "tp=4,degrees=2"):
        ranks = views(name, plan)
        for weight, own in ranks[0].parameters.items():
            held = {i for rank in ranks for a, b in _spans(rank.parameters[weight].local) for i in range(a, b)}
            assert held == set(range(own.local.shape[own.local.dim])), (weight, plan)


def _spans(local: Local) -> tuple[tuple[int, int], ...]:
    return local.ranges or ((0, local.shape[local.dim]),)

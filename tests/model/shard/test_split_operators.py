"""What each operator does to a split: modules that contain it, split between ranks, have the module's own gradients,
and the weights that should be split are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import captured
from tests.model.shard.split_run import run, views

B, T, D, H = 3, 5, 24, 4  # samples, tokens, features, heads
X = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """Weights by name, and what is computed with them."""

    def __init__(self, compute: Callable[[nn.Module, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
            self.register_parameter(name, nn.Parameter(value))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.compute(self, x)).square().mean()


def heads(x: Tensor, head_dim: int = D // H) -> Tensor:
    return x.view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """[samples, heads, tokens, features] with heads and samples in one dim."""
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[3])


def put_out(self, x: Tensor) -> Tensor:
    return functional.linear(x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1), self.out)


def heads_with_samples(self, x):
    q, k, v = (heads(functional.linear(x, weight)) for weight in (self.q, self.k, self.v))
    scores = torch.bmm(merged(q), merged(k).transpose(1, 2)).view(x.shape[0], H, x.shape[1], x.shape[1])
    scores = torch.bmm(torch.softmax(merged(scores), -1), merged(v))
    return put_out(self, scores.view(x.shape[0], H, x.shape[1], -1))


def a_bias_for_heads_with_samples(self, x):
    q, k, v = (merged(heads(functional.linear(x, weight))) for weight in (self.q, self.k, self.v))
    slopes = torch.arange(H, dtype=x.dtype).repeat(x.shape[0])[:, None, None] * torch.arange(x.shape[1])
    scores = torch.softmax(torch.baddbmm(slopes, q, k.transpose(1, 2), alpha=0.5), -1)
    return put_out(self, torch.bmm(scores, v).view(x.shape[0], H, x.shape[1], -1))


def attend(self, q, k, v):
    grouped = k.shape[1] != q.shape[1]
    return put_out(self, functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped))


def unbound(self, x):
    q, k, v = functional.linear(x, self.qkv).view(x.shape[0], x.shape[1], 3, H, -1).unbind(2)
    return attend(self, *(each.transpose(1, 2) for each in (q, k, v)))


def picked_from_the_front(self, x):
    qkv = functional.linear(x, self.qkv).view(x.shape[0], x.shape[1], 3, H, -1).permute(2, 0, 3, 1, 4)
    return attend(self, qkv[0], qkv[1], qkv[2])


def one_joint_key_value_head(self, x):
    q, k, v = functional.linear(x, self.qkv).split([D, D // H, D // H], -1)
    return attend(self, heads(q), k.unsqueeze(1), v.unsqueeze(1))


def joint_heads_by_index(self, x):
    qkv = functional.linear(x, self.qkv).view(x.shape[0], x.shape[1], H + 2, -1)
    q, k, v = (each.transpose(1, 2) for each in (qkv[:, :, :-2], qkv[:, :, [-2]], qkv[:, :, [-1]]))
    return put_out(self, torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


def two_joint_key_value_heads(self, x):
    q, k, v = functional.linear(x, self.qkv).split([D, 2 * D // H, 2 * D // H], -1)
    return attend(self, heads(q), heads(k), heads(v))


def wider_values(self, x):
    latent = functional.linear(x, self.down)
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + 1e-6)
    k, v = heads(functional.linear(latent, self.up), 10).split([4, 6], -1)
    keys = k.new_empty(*k.shape[:-1], 6)
    keys[..., :4], keys[..., 4:] = k, functional.linear(x, self.common).unsqueeze(1)
    return attend(self, heads(functional.linear(x, self.q)), keys, v)


def norms_over_all_heads(self, x):
    q, k = (functional.linear(x, weight) for weight in (self.q, self.k))
    q, k = (each * torch.rsqrt(each.square().mean(-1, keepdim=True) + 1e-6) for each in (q, k))
    return attend(self, heads(q * self.norm), heads(k), heads(functional.linear(x, self.v)))


def complex_rotation(self, x):
    angles = torch.polar(x.new_ones(x.shape[1], 3), torch.arange(x.shape[1] * 3, dtype=x.dtype).view(-1, 3))

    def rotated(each: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads(each).reshape(each.shape[0], H, each.shape[1], -1, 2))
        return torch.view_as_real(pairs * angles).flatten(3)

    q, k, v = (functional.linear(x, weight) for weight in (self.q, self.k, self.v))
    return attend(self, rotated(q), rotated(k), heads(v))


def gates_in_turn(self, x):
    both = functional.linear(x, self.up)
    return functional.linear(functional.silu(both[..., ::2]) * both[..., 1::2], self.out)


def batched_experts(self, x):
    flat = x.reshape(-1, D)
    gates = torch.softmax(functional.linear(flat, self.router), -1).t().unsqueeze(-1)
    gate, up = torch.bmm(flat.repeat(2, 1).view(2, -1, D) * gates, self.up).chunk(2, -1)
    return torch.bmm(functional.silu(gate) * up, self.out).sum(0).view(x.shape)


def einsum_over_heads(self, x):
    q, k, v = (heads(functional.linear(x, weight)) for weight in (self.q, self.k, self.v))
    scores = torch.softmax(torch.einsum("bhtc,bhsc->bhts", q, k), -1)
    return functional.linear(torch.einsum("bhts,bhsc->bthc", scores, v).flatten(2), self.out)


def pointwise_convolutions(self, x):
    wide = functional.conv1d(x.transpose(1, 2), self.up, self.bias)
    return functional.conv1d(functional.gelu(wide), self.out).transpose(1, 2)


def convolution_of_heads(self, x):
    v = heads(functional.linear(x, self.v))
    v = functional.conv2d(v / torch.linalg.vector_norm(v, dim=-1, keepdim=True), self.kernel, None, 1, (1, 0), 1, H)
    return put_out(self, v)


def convolutions_in_groups(self, x):
    """Which end in a norm: each rank's channels are summands of all."""
    wide = functional.gelu(functional.conv1d(x.transpose(1, 2), self.up, self.bias, groups=4))
    y = functional.conv1d(wide, self.out, groups=4).transpose(1, 2)
    return functional.layer_norm(x + y, (D,))


def local_attention(self, x):
    """Tokens in windows of two, which see the window before as well."""
    q, k, v = (functional.linear(x, weight).view(x.shape[0], x.shape[1], H, -1) for weight in (self.q, self.k, self.v))
    q, k, v = (functional.pad(each, (0, 0, 0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2)) for each in (q, k, v))
    k, v = (torch.cat([functional.pad(each, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], each], 2) for each in (k, v))
    scores = torch.softmax(torch.einsum("...qhd,...khd->...hqk", q, k), -1)
    return functional.linear(
        torch.einsum("...hqk,...khd->...qhd", scores, v).flatten(1, 2).flatten(2)[:, : x.shape[1]], self.out
    )


def convolution_beside_attention(self, x):
    """A kernel per head and token, over windows of values."""
    kernel = torch.softmax(functional.linear(x, self.kernel).reshape(-1, 3, 1), 1)
    values = functional.linear(x, self.v).transpose(1, 2).unsqueeze(-1)
    seen = functional.unfold(values, (3, 1), padding=(1, 0)).transpose(1, 2).reshape(-1, D // H, 3)
    convolved = torch.matmul(seen, kernel).reshape(x.shape[0], -1, H, D // H)
    q, k = (heads(functional.linear(x, weight)) for weight in (self.q, self.k))
    attended = functional.scaled_dot_product_attention(q, k, heads(functional.linear(x, self.v2))).transpose(1, 2)
    return functional.linear(torch.cat([attended, convolved], 2).flatten(2), self.out)


def differential_attention(self, x):
    q, k, v = (heads(functional.linear(x, weight)) for weight in (self.q, self.k, self.v))
    v = torch.cat(v.chunk(2, 1), -1).repeat(1, 2, 1, 1)
    first, second = functional.scaled_dot_product_attention(q, k, v, is_causal=True).chunk(2, 1)
    return put_out(self, first - 0.3 * second)


SQUARE = (D, D)
QKV = {"q": SQUARE, "k": SQUARE, "v": SQUARE, "out": SQUARE}
CASES: list[tuple[Callable, Mapping[str, tuple[int, ...]], str]] = [
    (heads_with_samples, QKV, ""),
    (a_bias_for_heads_with_samples, QKV, ""),
    (unbound, {"qkv": (3 * D, D), "out": SQUARE}, ""),
    (picked_from_the_front, {"qkv": (3 * D, D), "out": SQUARE}, ""),
    (one_joint_key_value_head, {"qkv": (D + 2 * D // H, D), "out": SQUARE}, ""),
    (joint_heads_by_index, {"qkv": (D + 2 * D // H, D), "out": SQUARE}, ""),
    (two_joint_key_value_heads, {"qkv": (D + 4 * D // H, D), "out": SQUARE}, ""),
    (wider_values, {"q": SQUARE, "down": (7, D), "up": (40, 7), "common": (2, D), "out": SQUARE}, "down common"),
    (norms_over_all_heads, {**QKV, "norm": (D,)}, ""),
    (complex_rotation, QKV, ""),
    (gates_in_turn, {"up": (2 * D, D), "out": SQUARE}, ""),
    (batched_experts, {"router": (2, D), "up": (2, D, 2 * D), "out": (2, D, D)}, "router"),
    (einsum_over_heads, QKV, ""),
    (pointwise_convolutions, {"up": (32, D, 1), "bias": (32,), "out": (D, 32, 1)}, ""),
    (convolutions_in_groups, {"up": (32, D // 4, 1), "bias": (32,), "out": (D, 8, 1)}, ""),
    (local_attention, QKV, ""),
    (
        convolution_beside_attention,
        {**QKV, "v2": SQUARE, "kernel": (3 * H, D), "out": (D, 2 * D)},
        "",
    ),
    (convolution_of_heads, {"v": SQUARE, "kernel": (H, 1, 3, 1), "out": SQUARE}, ""),
]


@pytest.mark.parametrize(("compute", "shapes", "whole"), CASES, ids=lambda each: getattr(each, "__name__", ""))
def test_a_split_operator_is_exact_and_splits_its_weights(compute, shapes: Mapping, whole: str) -> None:
    case = captured.own(Layer(compute, **shapes), x=X)
    expected = case.plain()
    for plan in ("tp=2", "tp=2,sequence=yes", "tp=4"):
        ranks = views(case, plan)
        captured.require_equal(run(case, ranks), expected)
        left = {name for name, parameter in ranks[0].parameters.items() if parameter.local.is_whole}
        assert left == set(whole.split()), f"{plan}: {ranks[0].replicated}"


def test_heads_that_are_subtracted_from_each_other_are_on_one_rank() -> None:
    """In pairs of which there are two."""
    case = captured.own(Layer(differential_attention, **QKV), x=X)
    ranks = views(case, "tp=2")
    captured.require_equal(run(case, ranks), case.plain())
    assert [rank.parameters["q"].local.ranges for rank in ranks] == [((0, 6), (12, 18)), ((6, 12), (18, 24))]
    assert not any(parameter.local.is_whole for parameter in ranks[0].parameters.values())


def with_a_fixed_table(self, x):
    return functional.linear(functional.linear(x, self.up) * self.table.cumsum(0), self.out)


def test_nothing_is_sent_for_the_gradient_of_what_is_not_trained() -> None:
    layer = Layer(with_a_fixed_table, up=SQUARE, table=(T, D), out=SQUARE)
    for trained in (True, False):
        layer.table.requires_grad_(trained)
        case = captured.own(layer, x=X)
        ranks = views(case, "tp=2")
        captured.require_equal(run(case, ranks), case.plain())
        assert sum(op.backward == "all_reduce" for ops in ranks[0].ops for op in ops) == trained


def test_joint_keys_and_values_with_fewer_heads_than_ranks_are_dealt_out() -> None:
    """Ranks that had the same heads, but other queries, would have to sum gradients of a part of their weight."""
    case = captured.own(Layer(two_joint_key_value_heads, qkv=(D + 4 * D // H, D), out=SQUARE), x=X)
    ranges = [rank.parameters["qkv"].local.ranges for rank in views(case, "tp=4")]
    assert ranges == [((0, 6), (42, 48)), ((6, 12), (24, 30)), ((12, 18), (36, 42)), ((18, 24), (30, 36))]

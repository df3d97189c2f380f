"""Attention of slices against attention to the whole sequence: outputs and every gradient, whatever the slicing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.ops import attention, kernels, slice_attention
from phalanx.model.ops.kernels import Chunked
from phalanx.model.ops.slice_attention import Past, Slice
from phalanx.model.segment import segments
from phalanx.model.segment.compile import Compiler
from tests.traced import Run

own = torch.ops.phalanx
TOKENS, SAMPLES, HEADS, DIM = 9, 2, 4, 8
DOCUMENTS = torch.tensor([[1, 1, 2, 2, 2, 3, 3, 3, 3], [1, 1, 1, 1, 1, 2, 3, 3, 4]])
PADDING = torch.tensor([[1] * TOKENS, [1, 1, 1, 1, 0, 0, 0, 0, 0]])
PADDED_LEFT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
DROPOUT = {"dropout": 0.3, "dropout_keys": torch.tensor([7, 8])}


def bias(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "window as long as the sequence": {"window": TOKENS},
    "soft cap": {"softcap": 0.7},
    "padding": {"k_segments": PADDING},
    "padding on the left": {"k_segments": PADDED_LEFT},
    "documents": {"q_segments": DOCUMENTS, "k_segments": DOCUMENTS},
    "documents and padding": {"q_segments": DOCUMENTS * PADDING, "k_segments": DOCUMENTS * PADDING},
    "dropout": DROPOUT,
    "dropout of later heads": {**DROPOUT, "first_head": 5},
    "dropout in a window": {**DROPOUT, "window": 3},
    "bias": {"bias": bias(1, HEADS, TOKENS, TOKENS)},
    "bias in a window": {"bias": bias(1, HEADS, TOKENS, TOKENS), "window": 3},
    "bias per sample": {"bias": bias(SAMPLES, 1, TOKENS, TOKENS)},
    "bias of keys": {"bias": bias(1, HEADS, 1, TOKENS)},
    "bias of queries": {"bias": bias(1, HEADS, TOKENS, 1)},
    "bias of heads": {"bias": bias(1, HEADS, 1, 1)},
    "everything": {
        **DROPOUT, "window": 4, "softcap": 0.9, "q_segments": DOCUMENTS, "k_segments": DOCUMENTS,
        "bias": bias(1, HEADS, TOKENS, TOKENS),
    },
}  # fmt: skip


def options(given: dict[str, Any], start: int = 0, stop: int = TOKENS) -> list[Any]:
    """In the operators' order, for queries start … stop - 1; what is about keys too stays whole."""
    names = ("q_segments", "k_segments", "bias", "dropout_keys")
    masks = [given.get(name) for name in names]
    masks[0] = masks[0][:, start:stop] if masks[0] is not None else None
    rest = {"causal": True, "scale": 0.4, "window": 0, "softcap": 0.0, "dropout": 0.0, "first_head": 0}
    return [*masks, *(given.get(name, default) for name, default in rest.items())]


def tensors(
    kv_heads: int = HEADS, value_dim: int = DIM, samples: int = SAMPLES, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, DIM), (kv_heads, DIM), (kv_heads, value_dim), (HEADS, value_dim))
    return [
        torch.randn(samples, heads, TOKENS, dim, generator=generator, dtype=torch.float64).to(dtype)
        for heads, dim in shapes
    ]


def leaves(qkv: Sequence[Tensor], given: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Copies that collect gradients: q, k, v and the bias, if there is one."""
    found = [x.detach().clone().requires_grad_() for x in qkv]
    if "bias" not in given:
        return found, given
    own_bias = given["bias"].clone().requires_grad_()
    return [*found, own_bias], {**given, "bias": own_bias}


def whole(qkv: Sequence[Tensor], d_out: Tensor, given: dict[str, Any]) -> list[Tensor]:
    inputs, given = leaves(qkv, given)
    out = own.attention(*inputs[:3], *options(given))[0]
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out)]


def in_slices(qkv: Sequence[Tensor], d_out: Tensor, given: dict[str, Any], edges: Sequence[int]) -> list[Tensor]:
    """Forwards in order, backwards in reverse order; gradients add up in the leaves."""
    inputs, given = leaves(qkv, given)
    past = Past(TOKENS)
    slices = [Slice(past, start) for start in edges[:-1]]
    outs = [
        own.attention_slice(*(x[:, :, a:b] for x in inputs[:3]), slice_.handle, *options(given, a, b))[0]
        for slice_, (a, b) in zip(slices, pairwise(edges), strict=True)
    ]
    for out, (a, b) in reversed(list(zip(outs, pairwise(edges), strict=True))):
        out.backward(d_out[:, :, a:b])
    gradients = [x.grad if x.grad is not None else torch.zeros_like(x) for x in inputs]
    return [torch.cat(outs, dim=2).detach(), *gradients]


def require_same(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-11) -> None:
    for got, wanted in zip(found, expected, strict=True):
        assert not got.isnan().any()
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def edges_of(inner: set[int], tokens: int = TOKENS) -> list[int]:
    return [0, *sorted(inner), tokens]


slicings = st.sets(st.integers(1, TOKENS - 1)).map(edges_of)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_uneven_slices_equal_the_whole_in_both_directions(case: str, kv_heads: int) -> None:
    *qkv, d_out = tensors(kv_heads)
    require_same(in_slices(qkv, d_out, CASES[case], [0, 4, 5, 9]), whole(qkv, d_out, CASES[case]))


@given(case=st.sampled_from(list(CASES)), edges=slicings, kv_heads=st.sampled_from([4, 2, 1]))
def test_any_slicing_equals_the_whole(case: str, edges: list[int], kv_heads: int) -> None:
    *qkv, d_out = tensors(kv_heads)
    require_same(in_slices(qkv, d_out, CASES[case], edges), whole(qkv, d_out, CASES[case]))


@given(edges=slicings, window=st.integers(0, TOKENS + 1), softcap=st.sampled_from([0.0, 0.8]), data=st.data())
def test_any_documents_and_windows_equal_the_whole(edges, window, softcap, data) -> None:
    row = st.lists(st.integers(0, 3), min_size=TOKENS, max_size=TOKENS)
    segments_ = torch.tensor([data.draw(row) for _ in range(SAMPLES)])
    given = {"q_segments": segments_, "k_segments": segments_, "window": window, "softcap": softcap}
    *qkv, d_out = tensors(kv_heads=2)
    require_same(in_slices(qkv, d_out, given, edges), whole(qkv, d_out, given))


@pytest.mark.parametrize("case", ["plain", "soft cap"])
def test_values_may_have_another_size_than_keys(case: str) -> None:
    *qkv, d_out = tensors(kv_heads=2, value_dim=5)
    require_same(in_slices(qkv, d_out, CASES[case], [0, 2, 7, 9]), whole(qkv, d_out, CASES[case]))


@pytest.mark.parametrize("case", ["plain", "window", "bias"])
def test_a_single_sample_is_not_overwritten_through_its_own_buffers(case: str) -> None:
    """With one sample a part of a buffer is contiguous, so that what is given out may be the buffer itself."""
    *qkv, d_out = tensors(samples=1)
    require_same(in_slices(qkv, d_out, CASES[case], [0, 3, 4, 9]), whole(qkv, d_out, CASES[case]))


@pytest.mark.parametrize("case", ["plain", "soft cap"])
def test_bfloat16_gradients_of_the_past_are_summed_wide(case: str) -> None:
    """Rounded once per tensor: the error of the first keys must not grow with the number of slices."""
    *exact, d_exact = tensors(dtype=torch.bfloat16)
    expected = whole([x.double() for x in exact], d_exact.double(), CASES[case])
    found = in_slices(exact, d_exact, CASES[case], list(range(TOKENS + 1)))
    assert all(x.dtype == torch.bfloat16 for x in found)
    require_same([x.double() for x in found], expected, tolerance=2e-2)


def test_a_slice_does_not_look_at_keys_before_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = Chunked.forward

    def forward(self: Chunked, q: Tensor, k: Tensor, v: Tensor, spec: kernels.Attention) -> Any:
        seen.append(k.shape[2])
        return plain(self, q, k, v, spec)

    monkeypatch.setattr(Chunked, "forward", forward)
    *qkv, d_out = tensors()
    in_slices(qkv, d_out, {"window": 3}, [0, 3, 6, 9])
    assert seen == [5, 5]  # its own three, and the two before that its first query sees; for the first slice all


def test_a_plain_slice_attends_to_its_past_and_itself_in_two_calls_of_a_fused_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[bool, int, int]] = []
    plain = kernels.FusedCpu.forward

    def forward(self: kernels.FusedCpu, q: Tensor, k: Tensor, v: Tensor, spec: kernels.Attention) -> Any:
        calls.append((spec.causal, q.shape[2], k.shape[2]))
        return plain(self, q, k, v, spec)

    *qkv, d_out = tensors()
    in_slices(qkv, d_out, {}, [0, 5, 9])  # what a kernel is trusted with is tried out here
    monkeypatch.setattr(kernels.FusedCpu, "forward", forward)
    in_slices(qkv, d_out, {}, [0, 5, 9])
    assert calls == [(True, 5, 5), (False, 4, 5), (True, 4, 4)]


@given(cut=st.integers(1, 5), scale=st.sampled_from([0.1, 1.0, 300.0]))
@settings(max_examples=15)
def test_attention_to_two_sets_of_keys_is_merged_without_overflow(cut: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = scale * torch.randn(2, 3, 4, 6, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 3, 6, 5, generator=generator, dtype=torch.float64)

    def part(keys: slice) -> tuple[Tensor, Tensor]:
        return scores[..., keys].softmax(-1) @ values[:, :, keys], scores[..., keys].logsumexp(-1)

    found = slice_attention.merge(*part(slice(cut)), *part(slice(cut, None)))
    require_same(found, part(slice(None)), tolerance=1e-12)


def _segment(arguments: Sequence[Any], mode: str) -> segments.Segment:
    """One attention of a slice, traced and cut as in training; it gives gradients to q, k, v and a bias."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") if isinstance(a, Tensor) else a for i, a in enumerate(arguments)]
    graph.output((graph.call_function(getitem, (graph.call_function(own.attention_slice.default, tuple(nodes)), 0)),))
    tensors_ = [a for a in arguments if isinstance(a, Tensor)]
    wants = [a.is_floating_point() for a in tensors_]
    return segments.build(graph, tensors_, [False] * len(tensors_), wants, compiler=Compiler(mode))


@pytest.mark.parametrize("mode", ["off", "aot_eager"])
@pytest.mark.parametrize("case", ["plain", "everything"])
def test_one_traced_function_serves_slices_with_different_pasts(case: str, mode: str) -> None:
    given, edges = CASES[case], [0, 3, 6, 9]
    *qkv, d_out = tensors(kv_heads=2)
    past = Past(TOKENS)
    slices = [Slice(past, start) for start in edges[:-1]]
    calls = [
        [*(x[:, :, a:b].contiguous() for x in qkv), slice_.handle, *options(given, a, b)]
        for slice_, (a, b) in zip(slices, pairwise(edges), strict=True)
    ]
    segment = _segment(calls[0], mode)
    runs = [Run(segment, [a for a in call if isinstance(a, Tensor)]) for call in calls]
    outs, gradients = [run.forward()[0] for run in runs], []
    for run, (a, b) in reversed(list(zip(runs, pairwise(edges), strict=True))):
        d_inputs, _ = run.backward_weight([d_out[:, :, a:b].contiguous()])
        gradients.insert(0, [d for d in d_inputs if d is not None])
    joined = [torch.cat(parts, dim=2) for parts in zip(*[found[:3] for found in gradients], strict=True)]
    summed = [torch.stack([found[3] for found in gradients]).sum(0)] if "bias" in given else []
    require_same([torch.cat(outs, dim=2), *joined, *summed], whole(qkv, d_out, given))


@pytest.mark.parametrize("case", [*CASES, "bfloat16", "longer values"])
def test_the_fake_implementation_agrees_in_shape_dtype_and_strides(case: str) -> None:
    sizes: dict[str, Any] = {"bfloat16": {"dtype": torch.bfloat16}, "longer values": {"value_dim": 12}}
    given = CASES.get(case, {})
    q, k, v, d_out = tensors(kv_heads=2, **sizes.get(case, {}))
    past = Past(TOKENS)
    first, second = Slice(past, 0), Slice(past, 4)
    own.attention_slice(q[:, :, :4], k[:, :, :4], v[:, :, :4], first.handle, *options(given, 0, 4))
    forward = [q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], second.handle, *options(given, 4, 9)]
    out, lse = own.attention_slice(*forward)
    masks, rest = forward[4:8], forward[8:]
    backward = [d_out[:, :, 4:], q[:, :, 4:], out, lse, second.handle, *masks, 2, v.shape[-1], *rest]
    for operator, arguments in ((own.attention_slice, forward), (own.attention_slice_backward, backward)):
        with FakeTensorMode() as mode:
            fakes = operator(*[mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments])
        for fake, real in zip(fakes, operator(*arguments), strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_keys_and_values_are_not_saved_beside_the_buffers() -> None:
    *qkv, _ = tensors()
    inputs, given = leaves(qkv, {})
    slice_ = Slice(Past(TOKENS), 0)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        attention.attention_slice(*inputs, slice_.handle, *options(given))
    assert inputs[0].data_ptr() in kept and not {x.data_ptr() for x in inputs[1:]} & set(kept)

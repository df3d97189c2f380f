"""The attention operator against a softmax written out naively."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.ops import choice, kernels, random
from phalanx.model.ops.attention import Attention, attention
from phalanx.model.ops.choice import choose
from phalanx.model.ops.kernels import Chunked
from tests import traced

_NAMES = ("q_segments", "k_segments", "bias", "dropout_keys", "causal", "scale", "window", "softcap", "dropout")
_DEFAULTS = dict.fromkeys(_NAMES[:4]) | {"causal": False, "scale": 0.4, "window": 0, "softcap": 0.0, "dropout": 0.0}


def options(**given) -> list:
    return list((_DEFAULTS | given).values())


def tensors(batch=2, heads=4, kv_heads=4, queries=6, keys=6, dim=8, value_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def naive(q, k, v, q_segments, k_segments, bias, dropout_keys, causal, scale, window, softcap, dropout) -> Tensor:
    """Softmax over an explicit mask, decided pair by pair."""
    heads, (queries, keys) = q.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    allowed = torch.ones(q.shape[0], 1, queries, keys, dtype=torch.bool)
    for sample in range(q.shape[0]):
        for query in range(queries):
            place = query + keys - queries
            for key in range(keys):
                seen = not (causal and key > place) and not (window and abs(key - place) >= window)
                if k_segments is not None:
                    own = k_segments[sample, key] if q_segments is None else q_segments[sample, query]
                    seen = seen and bool(k_segments[sample, key] != 0 and k_segments[sample, key] == own)
                allowed[sample, 0, query, key] = seen
    probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    probabilities = torch.where(allowed.any(-1, keepdim=True), probabilities, 0.0)
    if dropout:
        every = random.keep_attention(dropout_keys, torch.arange(heads), torch.arange(queries), keys, dropout)
        probabilities = probabilities * every / (1 - dropout)
    return probabilities @ v


def require_equal_to_naive(qkv: list[Tensor], given: list) -> None:
    bias = given[2]
    wanted = [*qkv, *([] if bias is None else [bias])]

    def gradients(function):
        leaves = [x.detach().clone().requires_grad_() for x in wanted]
        masks = [*given[:2], leaves[3] if bias is not None else None, *given[3:]]
        out = function(*leaves[:3], *masks)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]

    ours = gradients(lambda *args: torch.ops.phalanx.attention(*args)[0])
    for got, expected in zip(ours, gradients(naive), strict=True):
        assert not got.isnan().any()
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


DOCUMENTS = torch.tensor([[1, 1, 2, 2, 2, 3], [1, 1, 1, 1, 2, 2]])
PADDING = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]])
CASES = {
    "full": {},
    "causal": {"causal": True},
    "causal window": {"causal": True, "window": 3},
    "two-sided window": {"window": 3},
    "window of one": {"causal": True, "window": 1},
    "soft cap": {"softcap": 0.7, "causal": True},
    "padding": {"k_segments": PADDING},
    "causal padding": {"k_segments": PADDING, "causal": True},
    "documents": {"q_segments": DOCUMENTS, "k_segments": DOCUMENTS, "causal": True},
    "documents and padding": {"q_segments": DOCUMENTS, "k_segments": DOCUMENTS * PADDING, "causal": True},
    "dropout": {"dropout": 0.3, "dropout_keys": torch.tensor([7, 8]), "causal": True},
    "everything": {
        "causal": True, "window": 4, "softcap": 0.9, "dropout": 0.2, "dropout_keys": torch.tensor([7, 8]),
        "q_segments": DOCUMENTS, "k_segments": DOCUMENTS, "bias": torch.randn(1, 4, 6, 6, dtype=torch.float64),
    },
}  # fmt: skip


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_a_naive_softmax(case: str, kv_heads: int) -> None:
    require_equal_to_naive(tensors(kv_heads=kv_heads), options(**CASES[case]))


@pytest.mark.parametrize("shape", [(2, 4, 6, 6), (1, 4, 6, 6), (2, 1, 6, 6), (1, 1, 1, 6), (2, 4, 6, 1), (1, 1, 1, 1)])
def test_a_bias_may_be_broadcast_over_any_dim_and_gets_its_gradient(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    require_equal_to_naive(tensors(), options(bias=bias, causal=True))


@pytest.mark.parametrize("queries, keys", [(3, 7), (7, 3), (1, 6)])
def test_cross_attention_takes_different_lengths(queries: int, keys: int) -> None:
    require_equal_to_naive(tensors(queries=queries, keys=keys, kv_heads=2), options())


def test_causal_attention_to_a_longer_past_is_aligned_at_the_last_key() -> None:
    require_equal_to_naive(tensors(queries=2, keys=6), options(causal=True))


def test_values_may_have_another_size_than_keys() -> None:
    require_equal_to_naive(tensors(value_dim=5), options(causal=True))


@given(
    batch=st.integers(1, 3), groups=st.integers(1, 3), kv_heads=st.integers(1, 2), queries=st.integers(1, 9),
    keys=st.integers(1, 9), chunk=st.integers(1, 200), causal=st.booleans(), window=st.integers(0, 4),
    data=st.data(),
)  # fmt: skip
def test_chunking_does_not_matter(batch, groups, kv_heads, queries, keys, chunk, causal, window, data) -> None:
    queries = min(queries, keys) if causal else queries
    qkv = tensors(batch, groups * kv_heads, kv_heads, queries, keys)
    rows = st.lists(st.integers(0, 2), min_size=keys, max_size=keys)
    segments = torch.tensor(data.draw(st.lists(rows, min_size=batch, max_size=batch)))
    bias = torch.randn(1, groups * kv_heads, queries, keys, dtype=torch.float64)
    given = options(causal=causal, window=window, k_segments=segments, bias=bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_CHUNK_ELEMENTS", chunk)
        require_equal_to_naive(qkv, given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_fused_cpu_kernel_and_the_chunked_one_agree(causal: bool, kv_heads: int) -> None:
    qkv, spec = tensors(kv_heads=kv_heads, queries=70, keys=70), Attention(*options(causal=causal))
    assert isinstance(choose(*qkv, spec), kernels.FusedCpu)
    fused, plain = kernels.FusedCpu(), Chunked()
    (out, lse), (other_out, other_lse) = fused.forward(*qkv, spec), plain.forward(*qkv, spec)
    torch.testing.assert_close(out, other_out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, other_lse, rtol=1e-11, atol=1e-11)
    d_out = torch.randn_like(out)
    pairs = zip(fused.backward(d_out, *qkv, out, lse, spec), plain.backward(d_out, *qkv, out, lse, spec), strict=True)
    for got, expected in list(pairs)[:3]:
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("given", [{"causal": True}, {"softcap": 2.0}], ids=["fused", "chunked"])
def test_bfloat16_is_computed_wide_and_rounded_once(given: dict) -> None:
    qkv = tensors(dtype=torch.bfloat16, queries=20, keys=20)
    out, lse = attention(*qkv, *options(**given))
    expected = naive(*[x.double() for x in qkv], *options(**given))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=8e-3, atol=8e-3)


def test_rows_without_any_allowed_key_give_zeros() -> None:
    nothing = torch.zeros(2, 6, dtype=torch.int64)
    out, lse = attention(*tensors(), *options(k_segments=nothing))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))
    require_equal_to_naive(tensors(), options(k_segments=nothing))


@pytest.mark.parametrize("layout", ["token-major", "head-major"])
@pytest.mark.parametrize("case", [*CASES, "permuted bias", "bfloat16", "longer values", "other queries"])
def test_the_fake_implementation_agrees_in_shape_dtype_and_strides(case: str, layout: str) -> None:
    given = CASES.get(case, {})
    sizes = {"bfloat16": {"dtype": torch.bfloat16}, "longer values": {"value_dim": 12}, "other queries": {"queries": 4}}
    qkv = tensors(kv_heads=2, **sizes.get(case, {}))
    if layout == "token-major":
        qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    if case == "permuted bias":
        given = {"bias": torch.randn(6, 6, 4, dtype=torch.float64).permute(2, 0, 1)[None]}
    forward = [*qkv, *options(**given)]
    out, lse = torch.ops.phalanx.attention(*forward)
    backward = [torch.randn_like(out), *qkv, out, lse, *options(**given)]
    operators = ((torch.ops.phalanx.attention, forward), (torch.ops.phalanx.attention_backward, backward))
    for operator, arguments in operators:
        with FakeTensorMode() as mode:
            fakes = operator(*[mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments])
        for fake, real in zip(fakes, operator(*arguments), strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("case", ["causal", "everything"])
def test_the_operator_is_a_well_behaved_custom_operator(case: str) -> None:
    qkv = [x.requires_grad_() for x in tensors(kv_heads=2)]
    torch.library.opcheck(attention, (*qkv, *options(**CASES[case])))


@given(split=st.integers(1, 3))
@example(split=2)
@settings(max_examples=3)
def test_splitting_the_samples_changes_nothing_with_dropout(split: int) -> None:
    qkv = tensors(batch=4)
    keys = torch.tensor([5, 6, 7, 8])

    def run(rows: slice) -> Tensor:
        given = options(dropout=0.4, dropout_keys=keys[rows], causal=True)
        return attention(*[x[rows] for x in qkv], *given)[0]

    parts = torch.cat([run(slice(0, split)), run(slice(split, 4))])
    torch.testing.assert_close(parts, run(slice(0, 4)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("first, heads, group", [(0, 6, 3), (3, 3, 3), (2, 3, 1), (5, 1, 1)])
def test_a_part_of_the_heads_drops_what_the_whole_does_in_both_directions(first: int, heads: int, group: int) -> None:
    q, k, v = tensors(heads=6, kv_heads=6 // group)
    own, own_kv = slice(first, first + heads), slice(first // group, (first + heads) // group)
    given = options(dropout=0.4, dropout_keys=torch.tensor([5, 6]), causal=True)

    def both(leaves: list[Tensor], looked_at: slice, *first_head: int) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in leaves]
        out = torch.ops.phalanx.attention(*leaves, *given, *first_head)[0][:, looked_at]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    out, dq, dk, dv = both([q, k, v], own)
    found = both([q[:, own], k[:, own_kv], v[:, own_kv]], slice(None), first)
    for got, wanted in zip(found, [out, dq[:, own], dk[:, own_kv], dv[:, own_kv]], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["off", "aot_eager"])
def test_the_first_head_is_kept_by_tracing_and_a_graph_without_it_starts_at_head_zero(mode: str) -> None:
    qkv, given = tensors(heads=2, kv_heads=2), options(dropout=0.4, dropout_keys=torch.tensor([5, 6]))
    for part in ((), (3,)):
        leaf = qkv[0].clone().requires_grad_()
        out = torch.ops.phalanx.attention(leaf, *qkv[1:], *given, *part)[0]
        d_out = torch.randn(out.shape, dtype=torch.float64)
        found = traced.gradients(torch.ops.phalanx.attention, *qkv, *given, *part, d_out=d_out, mode=mode)
        expected = (out.detach(), torch.autograd.grad(out, leaf, d_out)[0])
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


class _Broken(Chunked):
    """A fused kernel that a new PyTorch version broke: its results are finite and wrong."""

    def forward(self, q, k, v, spec):
        out, lse = super().forward(q, k, v, spec)
        return out * 1.5, lse


class _Gone(Chunked):
    def forward(self, q, k, v, spec):
        raise RuntimeError("this operator takes other arguments now")


@pytest.mark.parametrize(("kernel", "reason"), [(_Broken, "is off by"), (_Gone, "takes other arguments now")])
def test_a_fused_kernel_that_disagrees_with_the_chunked_one_is_not_used(
    kernel: type[Chunked], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_candidates", lambda *_: [kernel])
    q = torch.randn(1, 2, 8, 8)
    spec = Attention(None, None, None, None, True, 0.3, 0, 0.0, 0.0)
    with pytest.warns(UserWarning, match=f"{kernel.__name__} attention .*cannot be used on cpu: .*{reason}"):
        chosen = choose(q, q, q, spec)
    assert type(chosen) is Chunked


def test_a_window_that_holds_every_key_is_none_so_that_fused_kernels_can_be_used() -> None:
    spec = Attention(None, None, None, None, True, 1.0, 8, 0.0, 0.0)
    assert spec.among(8).plain and spec.among(7).plain
    assert spec.among(9) == spec and not spec.among(9).plain
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    assert isinstance(choose(q, k, v, spec.among(8)), kernels.FusedCpu)
    assert isinstance(choose(q, k, v, spec), Chunked)
    options = (None, None, None, None, True, 1.0)
    torch.testing.assert_close(attention(q, k, v, *options, 8, 0.0, 0.0), attention(q, k, v, *options, 0, 0.0, 0.0))

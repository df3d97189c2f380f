"""Dropout decisions: functions of the logical element, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.model.ops import random


def features(keys: torch.Tensor, shape: tuple[int, ...], p: float = 0.5) -> torch.Tensor:
    return random.keep_features(keys, shape, p)


def drawn(kept: torch.Tensor) -> list[str]:
    return ["".join("x" if k else "." for k in row) for row in kept.flatten(0, -2).tolist()]


def test_decisions_never_change_between_versions() -> None:
    """Golden numbers: a resumed run and a refactored one must drop what the original dropped."""
    keys = random.sample_keys(seed=7, first=1000, count=3)
    assert keys.tolist() == GOLDEN_SAMPLES
    sites = random.site_keys(keys, torch.tensor([random.site_hash("transformer.h.3.mlp.dropout#0")]))
    assert sites.tolist() == GOLDEN_SITES
    kept = features(sites[0], (3, 2, 8), 0.25)
    assert drawn(kept) == GOLDEN_FEATURES
    attention = random.keep_attention(sites[0, :1], torch.arange(2), torch.arange(2), 8, 0.25)
    assert drawn(attention) == GOLDEN_ATTENTION


GOLDEN_SAMPLES = [2451987349, 3992901893, 2348535521]
GOLDEN_SITES = [[4117643738, 821561478, 50952275]]
GOLDEN_FEATURES = ["x...xx..", "xxxxx.xx", "xxxxxx.x", ".xx.xxxx", ".x.x.x.x", "xx.x.xx."]
GOLDEN_ATTENTION = ["xx.xxxxx", "xxxxxxxx", "xx.x.xx.", "xxx.xxx."]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_of_kept_elements_is_one_minus_p(p: float) -> None:
    keys = random.sample_keys(seed=0, first=0, count=16)
    attention = random.keep_attention(keys, torch.arange(4), torch.arange(40), 40, p)
    for kept in (features(keys, (16, 100, 64), p), attention):
        tolerance = 5 * (p * (1 - p) / kept.numel()) ** 0.5
        assert abs(kept.double().mean().item() - (1 - p)) <= tolerance


def test_what_survives_is_scaled_to_keep_the_mean_and_nothing_survives_certain_dropout() -> None:
    assert random.scale(0.2) == 1.25
    assert random.scale(0.0) == 1.0
    assert random.scale(1.0) == 0.0


def test_sites_samples_tokens_and_features_are_independent() -> None:
    sites = torch.tensor([random.site_hash(site) for site in ("a#0", "a#1", "b#0")])
    keys = random.site_keys(random.sample_keys(0, 0, 4), sites)
    kept = torch.stack([features(site, (4, 8, 256)) for site in keys]).reshape(3 * 4 * 8, 256).double() - 0.5
    agreement = (kept @ kept.T / 64).fill_diagonal_(0).abs()  # 1 for equal rows, about 1/16 for independent ones
    assert agreement.max() < 0.4
    columns = (kept.T @ kept / 24).fill_diagonal_(0).abs()
    assert columns.max() < 0.7


def test_attention_decisions_differ_between_heads_queries_and_samples() -> None:
    keys = random.sample_keys(0, 0, 3)
    kept = random.keep_attention(keys, torch.arange(4), torch.arange(6), 256, 0.5).reshape(-1, 256).double() - 0.5
    assert (kept @ kept.T / 64).fill_diagonal_(0).abs().max() < 0.4


def test_seeds_differ() -> None:
    assert not torch.equal(random.sample_keys(0, 0, 8), random.sample_keys(1, 0, 8))


def test_a_site_is_named_by_its_whole_path_and_call() -> None:
    names = ["h.1.drop#0", "h.11.drop#0", "h.1.drop#1", ""]
    assert len({random.site_hash(name) for name in names}) == len(names)
    assert all(0 <= random.site_hash(name) < 2**32 for name in names)


@given(first=st.integers(0, 2**40), count=st.integers(1, 20), cut=st.integers(0, 20))
def test_a_sample_has_the_same_key_wherever_the_batch_begins(first: int, count: int, cut: int) -> None:
    cut = min(cut, count)
    parts = [random.sample_keys(3, first, cut), random.sample_keys(3, first + cut, count - cut)]
    assert torch.equal(torch.cat(parts), random.sample_keys(3, first, count))


@given(samples=st.integers(1, 5), tokens=st.integers(1, 7), cut=st.integers(0, 5), width=st.integers(1, 9))
def test_splitting_a_batch_gives_the_same_decisions(samples: int, tokens: int, cut: int, width: int) -> None:
    cut = min(cut, samples)
    keys = random.sample_keys(0, 0, samples)
    whole = features(keys, (samples, tokens, width))
    for rows in (slice(0, cut), slice(cut, samples)):
        part = keys[rows]
        if len(part):
            assert torch.equal(features(part, (len(part), tokens, width)), whole[rows])


@given(samples=st.integers(1, 4), tokens=st.integers(1, 6), width=st.integers(1, 8))
def test_samples_and_tokens_may_be_one_dim_or_two(samples: int, tokens: int, width: int) -> None:
    keys = random.sample_keys(0, 5, samples)
    together = features(keys, (samples * tokens, width))
    assert torch.equal(together, features(keys, (samples, tokens, width)).reshape(samples * tokens, width))


@given(heads=st.integers(1, 4), queries=st.integers(1, 6), keys=st.integers(1, 6), data=st.data())
def test_any_part_of_attention_can_be_decided_anywhere(heads: int, queries: int, keys: int, data) -> None:
    samples = random.sample_keys(0, 0, 2)
    whole = random.keep_attention(samples, torch.arange(heads), torch.arange(queries), keys, 0.5)
    head, query = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(0, queries - 1))
    part = random.keep_attention(samples, torch.tensor([head]), torch.tensor([query]), keys, 0.5)
    assert torch.equal(part[:, 0, 0], whole[:, head, query])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=50, unique=True))
def test_mixing_is_a_bijection_of_32_bit_numbers(numbers: list[int]) -> None:
    mixed = random.mix(torch.tensor(numbers)).tolist()
    assert len(set(mixed)) == len(numbers)
    assert all(0 <= x < 2**32 for x in mixed)


@given(st.integers(0, 2**32 - 1))
def test_mixing_equals_exact_arithmetic(x: int) -> None:
    """The products wrap in int64; their low 32 bits must not care."""
    y = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    y = ((y ^ (y >> 15)) * 0x846CA68B) % 2**32
    assert random.mix(torch.tensor(x)).item() == y ^ (y >> 16)

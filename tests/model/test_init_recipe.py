from __future__ import annotations

import math
import time

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from phalanx.errors import ModelError
from phalanx.model.weights import init_recipe
from phalanx.model.weights.init_recipe import record
from tests import tiny_models

ARCHITECTURES = [
    "gpt2", "llama", "bert", "vit", "t5", "whisper", "mixtral", "opt", "gpt_neo", "gptj", "gemma3", "electra",
]  # fmt: skip


def assert_same_distribution(name: str, ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape, name
    if theirs.std(correction=0) == 0 or _is_table(name):
        assert torch.equal(ours, theirs), f"{name}: constants differ"
        return
    spread = theirs.std(correction=0).item()
    noise = 6 * spread / math.sqrt(theirs.numel())
    assert abs(ours.mean() - theirs.mean()) < 1.5 * noise, name
    assert abs(ours.std(correction=0) - spread) < 1.5 * noise, name
    assert not torch.equal(ours, theirs), f"{name}: the same draw twice"


def _is_table(name: str) -> bool:
    return name == "model.encoder.embed_positions.weight"


@pytest.mark.parametrize("real_limit", [0, init_recipe.REAL_LIMIT, None], ids=["fake", "mixed", "real"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_initial_values_follow_the_model_s_own_rules(architecture: str, real_limit: int | None) -> None:
    theirs = tiny_models.build(architecture)
    recipe = init_recipe._attempt(lambda: tiny_models.build(architecture), real_limit)
    assert recipe.untouched() == []
    assert list(recipe.names()) == [name for name, _ in theirs.named_parameters()]
    for name, parameter in theirs.named_parameters():
        assert recipe.shape(name) == tuple(parameter.shape)
        assert_same_distribution(name, recipe.values(name, seed=7), parameter.detach())


def test_rows_a_model_zeroes_stay_zero() -> None:
    recipe = record(lambda: tiny_models.build("llama"))
    embedding = recipe.values("model.embed_tokens.weight", seed=3)
    assert (embedding[0] == 0).all() and (embedding[1:] != 0).all()


def test_a_large_draw_is_made_in_parts_that_depend_on_seed_and_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_recipe, "DRAWN_TOGETHER", 1000)
    recipe, name = record(lambda: nn.Linear(100, 25)), "weight"
    values = recipe.values(name, seed=3)
    parts = values.view(-1).split(1000)
    assert [len(part) for part in parts] == [1000, 1000, 500]
    assert not torch.equal(parts[0], parts[1]) and not torch.equal(parts[0][:500], parts[2])
    assert torch.equal(recipe.values(name, seed=3), values) and not torch.equal(recipe.values(name, seed=4), values)
    assert values.abs().max() <= 0.1 and values.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.05)
    monkeypatch.setattr(init_recipe, "DRAWN_TOGETHER", 2500)
    assert not torch.equal(recipe.values(name, seed=3), values)


class _WithGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(100, 25))
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("together", [1000, 2500])
def test_a_constructor_may_bring_a_generator_of_its_own(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_recipe, "DRAWN_TOGETHER", together)
    recipe = record(_WithGenerator)
    assert recipe.values("weight", 0).std().item() == pytest.approx(1, rel=0.1)
    assert not torch.equal(recipe.values("weight", 0), recipe.values("weight", 1))


def test_gpt2_s_output_projections_are_scaled_by_depth() -> None:
    recipe = record(lambda: tiny_models.build("gpt2"))
    assert recipe.values("transformer.h.0.mlp.c_proj.weight", 0).std().item() == pytest.approx(0.02 / 2, rel=0.1)
    assert recipe.values("transformer.h.0.mlp.c_fc.weight", 0).std().item() == pytest.approx(0.02, rel=0.1)


def test_truncated_normals_stay_within_their_bounds_for_every_seed() -> None:
    class Truncated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(200, 200), std=1.0, a=-0.7, b=0.7))

    recipe = record(Truncated)
    for seed in range(5):
        values = recipe.values("weight", seed)
        assert values.abs().max() <= 0.7 and values.std() > 0.3


def test_values_depend_on_seed_and_name_only() -> None:
    recipe = record(lambda: tiny_models.build("mixtral"))
    forwards = {name: recipe.values(name, 5) for name in recipe.names()}
    torch.manual_seed(123)
    again = record(lambda: tiny_models.build("mixtral"))
    for name in reversed(again.names()):
        assert torch.equal(again.values(name, 5), forwards[name]), name
    drawn = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(recipe.values(drawn, 6), forwards[drawn])
    assert not torch.equal(forwards[drawn], forwards["model.layers.1.self_attn.q_proj.weight"])


def test_a_deeper_model_starts_with_the_same_layers() -> None:
    def build(layers: int) -> nn.Module:
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**tiny_models._GQA, "num_hidden_layers": layers}))

    shallow, deep = record(lambda: build(2)), record(lambda: build(4))
    for name in shallow.names():
        assert torch.equal(shallow.values(name, 1), deep.values(name, 1)), name


def test_recording_leaves_the_random_state_of_the_process_alone() -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    record(lambda: nn.Linear(30, 30)).values("weight", 0)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_of_seventy_billion_parameters_is_recorded_without_holding_it() -> None:
    config = hf.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    started = time.monotonic()
    recipe = record(lambda: hf.LlamaForCausalLM(config))
    assert sum(math.prod(recipe.shape(name)) for name in recipe.names()) > 70e9
    assert recipe.values("model.layers.79.self_attn.k_proj.weight", 0).std().item() == pytest.approx(0.02, rel=0.01)
    assert time.monotonic() - started < 20


class Unusual(nn.Module):
    """Initialised in ways that models in the wild use."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.tensor([0.5, 1.5]))
        self.drawn = nn.Parameter(torch.randn(40, 50) * 3 + 1)
        self.halves = nn.Parameter(torch.empty(300, 100))
        with torch.no_grad():
            self.halves[:150].fill_(2.0)
            self.halves[150:].uniform_(-1, 1)
        self.orthogonal = nn.Linear(200, 100)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.recurrent = nn.LSTM(8, 8)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(150, 150))
        self.blend = nn.Parameter(self.drawn.detach().mean(0, keepdim=True).t().clone())


@pytest.mark.parametrize("real_limit", [0, 1 << 14, None])
def test_plain_modules_are_replayed_too(real_limit: int | None) -> None:
    recipe = init_recipe._attempt(Unusual, real_limit)
    values = {name: recipe.values(name, 4) for name in recipe.names()}
    theirs = dict(Unusual().named_parameters())
    assert values["drawn"].mean().item() == pytest.approx(1, abs=0.3)
    assert values["drawn"].std().item() == pytest.approx(3, rel=0.1)
    assert (values["halves"][:150] == 2).all() and values["halves"][150:].abs().max() <= 1
    product = values["orthogonal.weight"] @ values["orthogonal.weight"].T
    assert torch.allclose(product, torch.eye(100), atol=1e-5)
    assert torch.equal(values["blend"], values["drawn"].mean(0, keepdim=True).t())
    norm = values["normed.parametrizations.weight.original1"].norm(dim=1, keepdim=True)
    assert torch.allclose(values["normed.parametrizations.weight.original0"], norm)
    assert values["recurrent.weight_hh_l0"].abs().max() <= 8**-0.5
    assert torch.equal(values["constant"], theirs["constant"])


def test_a_constructor_that_looks_at_large_values_is_run_for_real() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(200, 200).normal_())
            if self.weight.isnan().any():
                raise RuntimeError("cannot be")

    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        init_recipe._attempt(Looks, init_recipe.REAL_LIMIT)
    assert record(Looks).values("weight", 0).std().item() == pytest.approx(1, rel=0.05)


def test_a_parameter_that_nothing_initialises_is_named() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fine = nn.Linear(2, 2)
            self.lost = nn.Parameter(torch.empty(3, 3))

    with pytest.raises(ModelError, match=r"nothing initialises them: lost\n  → give them values"):
        record(Forgotten)


def test_a_random_operation_that_takes_no_generator_is_named() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ops.aten.native_dropout(torch.ones(4, 4), 0.5, True)[0])

    with pytest.raises(ModelError, match="aten::native_dropout, which cannot be seeded"):
        record(Dropped).values("weight", 0)

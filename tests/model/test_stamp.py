"""A deep model stamped out of a shallow capture equals the capture of its full depth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import BartConfig

from phalanx import tasks
from phalanx.model import capture
from phalanx.model.graph import hooks, stamp
from phalanx.model.graph.blocks import Blocks
from phalanx.model.zoo import zoo
from tests import captured

# Deeper than what is captured: every kind of layer more than twice. Where nothing is said, tiny models are.
DEPTHS: dict[str, dict[str, object]] = {
    captured.GPT2: {"n_layer": 8},
    captured.LLAMA: {},
    captured.NEO: {"num_layers": 6, "attention_types": [[["global", "local"], 3]]},
    captured.GEMMA3: {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3},
    captured.MIXTRAL: {},
    captured.WHISPER: {},
    captured.T5: {},
}


def specification(name: str, **overrides: object) -> zoo.ModelSpec:
    return zoo.resolve(name, tiny=True, overrides=overrides or None)


def at_full_depth(spec: zoo.ModelSpec) -> Blocks:
    model = zoo.build(spec, dtype=torch.float64, device="meta", attention=hooks.NAME)
    blocks, _ = capture._full(model, tasks.get(spec.task).inputs(spec.config), torch.float64)
    return blocks


def as_captured(spec: zoo.ModelSpec) -> Blocks:
    inputs = tasks.get(spec.task).inputs(spec.config)
    return capture.capture(spec, inputs, dtype=torch.float64, check=False, use_cache=False).blocks


_LONG = (captured.GPT2, captured.LLAMA, captured.NEO, captured.MIXTRAL, captured.GEMMA3, captured.T5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long if n in _LONG else ()) for n in DEPTHS])
def test_a_stamped_model_equals_its_capture_at_full_depth(name: str) -> None:
    spec = specification(name, **DEPTHS[name])
    model = zoo.build(spec, device="meta")
    classes = stamp.truncate(model, capture.find_layers(model))
    assert all(stamp.prefix_length(kinds) < len(kinds) for kinds in classes.values())
    stamped = as_captured(spec) if DEPTHS[name] else captured.named(name).blocks
    assert capture.blocks_to_json(stamped) == capture.blocks_to_json(at_full_depth(spec))


def test_later_layers_of_a_decoder_read_the_last_layer_of_an_encoder_without_a_norm_behind_it() -> None:
    spec = zoo.resolve(BartConfig(), tiny=True)
    assert capture.blocks_to_json(as_captured(spec)) == capture.blocks_to_json(at_full_depth(spec))


def test_a_deep_model_is_captured_shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []
    cut = capture.cut
    monkeypatch.setattr(capture, "cut", lambda flat, layers: depths.append(layers[0].count) or cut(flat, layers))
    blocks = as_captured(specification(captured.GPT2, n_layer=48))
    assert depths == [2]
    assert len(blocks.blocks) == 50


@pytest.mark.long
def test_layers_that_all_read_what_the_first_one_gives_are_captured_shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    depths: list[int] = []
    cut = capture.cut
    monkeypatch.setattr(
        capture, "cut", lambda flat, lists: depths.extend(each.count for each in lists) or cut(flat, lists)
    )
    blocks = as_captured(specification(captured.T5, num_layers=24, num_decoder_layers=24))
    assert depths == [3, 3] and len(blocks.blocks) > 48


def test_a_constant_that_depends_on_the_layer_is_captured_at_full_depth() -> None:
    spec = specification(captured.GPT2, scale_attn_by_inverse_layer_idx=True)
    blocks = as_captured(spec)
    layers = [block.template for block in blocks.blocks if block.name.startswith("transformer.h.")]
    assert len(set(layers)) == len(layers) == 4
    assert capture.blocks_to_json(blocks) == capture.blocks_to_json(at_full_depth(spec))


def test_such_a_model_is_exact() -> None:
    case = captured.named(captured.GPT2, dropout=0.0, scale_attn_by_inverse_layer_idx=True)
    captured.require_equal(case.interpreted(), case.plain())


@given(st.lists(st.sampled_from("ABC"), min_size=1, max_size=12))
def test_the_prefix_holds_every_repeated_kind_twice_and_is_the_shortest_that_does(kinds: list[str]) -> None:
    length = stamp.prefix_length(kinds)

    def enough(prefix: list[str]) -> bool:
        return all(prefix.count(kind) >= min(2, kinds.count(kind)) for kind in set(kinds))

    assert enough(kinds[:length])
    assert length == 0 or not enough(kinds[: length - 1])


def test_layers_are_of_one_kind_when_built_alike_whatever_their_index() -> None:
    def layer(index: int, p: float = 0.1, width: int = 4) -> nn.Module:
        made = nn.Sequential(nn.Linear(4, width), nn.Dropout(p))
        made.layer_idx = index
        return made

    assert stamp.structure(layer(0)) == stamp.structure(layer(7))
    frozen = layer(0)
    frozen[0].weight.requires_grad = False
    others = [layer(0, p=0.2), layer(0, width=5), frozen]
    assert len({stamp.structure(other) for other in (layer(0), *others)}) == 4


def test_a_layer_list_is_truncated_to_its_prefix() -> None:
    model = zoo.build(specification(captured.NEO, **DEPTHS[captured.NEO]), device="meta")
    classes = stamp.truncate(model, capture.find_layers(model))
    assert [len(kinds) for kinds in classes.values()] == [6]
    assert len(model.transformer.h) == 4  # global and local, twice each

"""Capture: cached per machine, checked against the plain model, honest about what it could not do."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx import tasks
from phalanx.errors import CaptureError
from phalanx.model import capture, selfcheck
from phalanx.model.captured import attention_sites
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Blocks
from phalanx.model.zoo import zoo
from phalanx.tasks.base import Input
from phalanx.tasks.custom import infer_inputs
from tests import captured


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(capture, "cache_folder", lambda: tmp_path)
    return tmp_path / "captures"


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    return captured.named(captured.GPT2).blocks


@pytest.fixture
def quick(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Captures give what was captured before, and are counted."""
    made: list[str] = []
    monkeypatch.setattr(capture, "_capture", lambda spec, *rest: made.append(spec.name) or (blocks, ["a note"]))
    return made


def gpt2(**overrides: object) -> tuple[zoo.ModelSpec, tuple[Input, ...]]:
    spec = zoo.resolve(captured.GPT2, tiny=True, overrides=overrides or None)
    return spec, tasks.get(spec.task).inputs(spec.config)


def test_a_second_capture_is_read_from_the_cache(cache: Path, quick: list[str]) -> None:
    first, second = (capture.capture(*gpt2(), check=False) for _ in range(2))
    assert len(quick) == len(list(cache.iterdir())) == 1
    assert capture.blocks_to_json(first.blocks) == capture.blocks_to_json(second.blocks)
    assert first.notes == second.notes == ("a note",)


def test_whatever_changes_the_graph_changes_the_cache_entry(cache: Path, quick: list[str]) -> None:
    spec, inputs = gpt2()
    capture.capture(spec, inputs, check=False)
    capture.capture(spec, inputs, check=False, dtype=torch.bfloat16)
    capture.capture(spec, inputs, check=False, dropout=0.0)
    capture.capture(spec, tasks.get(spec.task).inputs(spec.config, padding=True), check=False)
    capture.capture(*gpt2(n_head=2), check=False)
    assert len(quick) == len(list(cache.iterdir())) == 5


def test_a_broken_cache_entry_is_captured_again_and_mended(cache: Path, quick: list[str]) -> None:
    capture.capture(*gpt2(), check=False)
    [entry] = cache.iterdir()
    for content in ("", "{", '{"blocks": {}}', '{"notes": []}'):
        entry.write_text(content)
        capture.capture(*gpt2(), check=False)
    assert len(quick) == 5
    capture.capture(*gpt2(), check=False)
    assert len(quick) == 5


def test_who_wants_the_same_capture_at_once_waits_for_it(cache: Path) -> None:
    seen: list[str] = []

    def take(_: int) -> None:
        with capture._alone(cache / "same.json"):
            seen.append("in")
            time.sleep(0.1)
            seen.append("out")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(take, range(2)))
    assert seen == ["in", "out"] * 2 and not list(cache.iterdir())


def test_modules_of_the_users_own_are_not_cached(cache: Path, quick: list[str]) -> None:
    spec = zoo.resolve(nn.Linear(3, 3))
    capture.capture(spec, (Input("input", "float", ("batch", 3)),), check=False)
    assert len(quick) == 1 and not cache.exists()


def test_what_is_described_belongs_to_the_model() -> None:
    case = captured.named(captured.GPT2)
    described = case.captured
    assert described.shapes == {name: tuple(p.shape) for name, p in case.model.named_parameters()}
    assert described.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert described.trainable == tuple(described.shapes)
    assert described.dims(case.batch) == {"batch": 3, "tokens": 9}


def test_frozen_parameters_are_known_as_such() -> None:
    trainable = set(captured.named(captured.WHISPER).captured.trainable)
    frozen = set(captured.named(captured.WHISPER).captured.shapes) - trainable
    assert frozen == {"model.encoder.embed_positions.weight"}


@pytest.mark.parametrize("name", [captured.GPT2, captured.NEO, captured.MIXTRAL])
def test_attention_is_one_node_per_layer(name: str) -> None:
    blocks = captured.named(name).blocks
    for block in blocks.blocks:
        nodes = [n.target for n in graphs.load(blocks.templates[block.template].text).nodes]
        assert nodes.count(torch.ops.phalanx.attention.default) == (block.name not in ("embedding", "head"))
        assert torch.ops.aten.softmax.int not in nodes or name == captured.MIXTRAL  # its router


def test_sites_of_attention_dropout_are_the_attention_modules() -> None:
    sites = attention_sites(captured.named(captured.GPT2).blocks)
    assert sites == tuple(f"transformer.h.{i}.attn" for i in range(4))
    assert attention_sites(captured.named(captured.MIXTRAL).blocks) == ()


@pytest.mark.parametrize("padding", [False, True])
def test_padding_reaches_attention(padding: bool) -> None:
    case = captured.named(captured.LLAMA, padding=padding)
    captured.require_equal(case.interpreted(), case.plain())
    texts = [t.text for t in case.blocks.templates.values()]
    segments = [n.args[4] for text in texts for n in graphs.load(text).nodes if "phalanx.attention" in str(n.target)]
    assert segments and all((s is not None) == padding for s in segments)


class Attends(nn.Module):
    """Computes attention by itself, unaware of any registry."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.linear(x)
        return functional.mse_loss((h @ h.transpose(1, 2)).softmax(-1) @ h, labels)


def test_a_model_that_attends_by_itself_is_captured_with_a_note() -> None:
    spec = zoo.resolve(lambda: Attends(), task=None)
    inputs = tuple(Input(name, "float", ("batch", "tokens", 4)) for name in ("x", "labels"))
    made = capture.capture(spec, inputs, check=False)
    assert "is computed by the model's own code, with materialised masks" in made.notes[0]


def test_the_self_check_passes_a_right_capture_and_names_what_a_wrong_one_gets_wrong(monkeypatch) -> None:
    spec, _ = gpt2()
    notes: list[str] = []
    shapes = [shape for shape in selfcheck._SHAPES if not shape[2]]
    monkeypatch.setattr(selfcheck, "_SHAPES", shapes)
    right = captured.named(captured.GPT2, dropout=0.0).captured
    selfcheck.self_check(spec, lambda *_: right, notes)
    assert notes == []
    [layer] = [key for key, t in right.blocks.templates.items() if "phalanx.attention" in t.text]
    template = right.blocks.templates[layer]
    full = template.text.replace(",null,true,", ",null,false,")  # no longer causal
    assert full != template.text
    templates = {**right.blocks.templates, layer: dataclasses.replace(template, text=full)}
    wrong = dataclasses.replace(right, blocks=dataclasses.replace(right.blocks, templates=templates))
    with pytest.raises(CaptureError, match="'gpt2-tiny' disagrees with the model: the loss is off by"):
        selfcheck.self_check(spec, lambda *_: wrong, notes)


@pytest.mark.usefixtures("cache", "quick")
def test_a_new_capture_is_checked_once_and_one_from_the_cache_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(capture, "self_check", lambda spec, *rest: checked.append(spec.name))
    for _ in range(2):
        capture.capture(*gpt2())
    assert checked == ["gpt2-tiny"]


def test_what_cannot_be_checked_is_said() -> None:
    notes: list[str] = []
    selfcheck.self_check(zoo.resolve(nn.Linear(3, 3)), lambda *_: pytest.fail("nothing to capture"), notes)
    assert notes == ["not checked against the plain model after capture: use phalanx.verify(model, data=[batch])"]


def test_inputs_of_a_users_batch_have_dynamic_samples_and_fixed_sizes() -> None:
    batch = {"image": torch.zeros(4, 3, 8), "label": torch.zeros(4, dtype=torch.int64)}
    assert infer_inputs(batch) == (
        Input("image", "float", ("batch", 3, 8)), Input("label", "int64", ("batch",)),
    )  # fmt: skip


@pytest.mark.parametrize("batch", [{}, {"x": torch.tensor(1.0)}])
def test_a_batch_without_samples_is_refused(batch: dict[str, Tensor]) -> None:
    with pytest.raises(CaptureError, match="a batch must be a dict of tensors whose first dim is the sample"):
        infer_inputs(batch)

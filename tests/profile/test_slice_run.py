"""Measured slices are those that were asked for, run to and fro through the layers that attend."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from phalanx import tasks
from phalanx.cli.models import capture_model
from phalanx.model.ops import slice_attention
from phalanx.model.slicing import Sliced, slice_model
from phalanx.profile.slice_run import LOOPS, SliceRun, layers

TOKENS = 48


@pytest.fixture(scope="module")
def sliced() -> Sliced:
    _, captured = capture_model("gpt2", None, "float32", tiny=True)
    return slice_model(captured, torch.float32)


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    from phalanx.model.zoo.zoo import resolve

    return tasks.get("causal-lm").synthetic(resolve("gpt2", tiny=True).config, batch=2, tokens=TOKENS, seed=0)


def run_of(sliced: Sliced, batch: dict[str, torch.Tensor], blocks: tuple[int, ...]) -> SliceRun:
    return SliceRun(sliced, batch, blocks, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Samples × tokens of every slice that attended, and what came before it."""
    found: dict[str, list[tuple[int, int]]] = {"forward": [], "backward": []}
    forward, backward = slice_attention.forward, slice_attention.backward

    def watched_forward(q: Any, k: Any, v: Any, slice_: Any, spec: Any) -> Any:
        found["forward"].append((q.shape[2], slice_.start))
        return forward(q, k, v, slice_, spec)

    def watched_backward(d_out: Any, q: Any, out: Any, lse: Any, slice_: Any, spec: Any) -> Any:
        found["backward"].append((q.shape[2], slice_.start))
        return backward(d_out, q, out, lse, slice_, spec)

    monkeypatch.setattr(slice_attention, "forward", watched_forward)
    monkeypatch.setattr(slice_attention, "backward", watched_backward)
    return found


def test_layers_are_the_blocks_that_attend(sliced: Sliced) -> None:
    names = [sliced.captured.blocks.blocks[number].name for number in layers(sliced)]
    assert names == [f"transformer.h.{i}" for i in range(len(sliced.captured.blocks.blocks) - 2)]


@pytest.mark.parametrize(("tokens", "past"), [(TOKENS, 0), (16, 0), (7, 40)])
def test_a_slice_attends_to_the_past_that_was_asked_for_on_the_way_there_and_back(
    sliced: Sliced, batch: dict[str, torch.Tensor], seen: dict[str, list[tuple[int, int]]], tokens: int, past: int
) -> None:
    run = run_of(sliced, batch, layers(sliced)[:1])
    assert run.tokens == TOKENS and run(tokens, past) > 0
    assert seen == {"forward": [(tokens, past)] * LOOPS, "backward": [(tokens, past)] * LOOPS}


def test_two_layers_both_run_and_the_first_alone_too(
    sliced: Sliced, batch: dict[str, torch.Tensor], seen: dict[str, list[tuple[int, int]]]
) -> None:
    run = run_of(sliced, batch, layers(sliced)[:2])
    assert run(8, 8) > 0
    assert len(seen["forward"]) == len(seen["backward"]) == 2 * LOOPS
    assert run.first(1)(8, 8) > 0
    assert len(seen["forward"]) == len(seen["backward"]) == 3 * LOOPS


def test_blocks_without_attention_can_be_measured_too(sliced: Sliced, batch: dict[str, torch.Tensor]) -> None:
    for number in (0, len(sliced.captured.blocks.blocks) - 1):
        assert run_of(sliced, batch, (number,))(8, 16) > 0


def test_forward_and_backward_are_told_apart(
    sliced: Sliced, batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, forward = run_of(sliced, batch, layers(sliced)[:1]), slice_attention.forward
    run(8, 0)
    waited = 1.0

    def slow(*arguments: Any) -> Any:
        time.sleep(waited)
        return forward(*arguments)

    monkeypatch.setattr(slice_attention, "forward", slow)
    there, back = run.parts(8, 0)
    assert there >= waited and 0 < back < there

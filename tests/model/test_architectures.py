"""Architectures beyond the zoo, tiny: the captured graph gives the loss and gradients of the model, or says why not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from phalanx import tasks
from phalanx.errors import CaptureError, ModelError
from phalanx.model import capture
from phalanx.model.captured import Captured
from phalanx.model.selfcheck import self_check
from phalanx.model.zoo import configure, zoo
from phalanx.tasks.base import Input

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import robustness

long = pytest.mark.long
# What each of them has that others do not.
EXACT = [
    pytest.param("gpt_oss", marks=long),  # a sink beside the keys
    pytest.param("llama4_text", marks=long),  # attention within chunks
    pytest.param("deepseek_v3", marks=long),  # values smaller than keys, and writes into parts of tensors
    pytest.param("modernbert", marks=long),  # windows in both directions
    pytest.param("bart", marks=long),  # decoder layers read the encoder's last layer itself
    pytest.param("marian", marks=long),  # positions that no checkpoint holds
    pytest.param("falcon", marks=long),  # attention and mask of its own
    pytest.param("mpt", marks=long),  # a bias that grows with the distance
    "xglm",  # numbers of torch's default dtype
    pytest.param("doge", marks=long),  # a mask that is learned
    pytest.param("layoutlm", marks=long),
]


def _specification(model_type: str) -> zoo.ModelSpec:
    return zoo.resolve(configure.tiny(AutoConfig.for_model(model_type)))


def _check(spec: zoo.ModelSpec) -> Captured:
    found: list[Captured] = []

    def keep(small: zoo.ModelSpec, inputs: tuple[Input, ...]) -> Captured:
        found.append(capture.capture_for_check(small, inputs, torch.float64))
        return found[-1]

    self_check(spec, keep, [])
    return found[0]


@pytest.mark.parametrize("model_type", EXACT)
def test_the_captured_graph_is_the_model(model_type: str) -> None:
    _check(_specification(model_type))


LOOP = r"a Python number of .*, as a loop over .* does \(.*modeling_{}.py"
VALUES = r"a branch or a size in it depends on the values of a tensor\n.*modeling_{}.py"
# The families of docs/results/robustness.md that are refused under all plans, by task.
REFUSED = {
    "mamba": ("causal-lm", CaptureError, LOOP),
    "jamba": ("causal-lm", CaptureError, LOOP),
    "rwkv": ("causal-lm", CaptureError, LOOP),
    "qwen3_next": ("causal-lm", CaptureError, LOOP),
    "big_bird": ("masked-lm", CaptureError, r"draws random numbers .*modeling_{}.py"),
    "longformer": ("masked-lm", CaptureError, VALUES),
    "funnel": ("masked-lm", CaptureError, LOOP),
    "yoso": ("masked-lm", CaptureError, "autograd.Function with a backward of its own"),
    "resnet": ("image-classification", CaptureError, "batch normalisation keeps running statistics of batches"),
    "moonshine": ("speech-to-text", ModelError, "names no mel bins and frames"),
    "switch_transformers": ("text-to-text", CaptureError, r"forward moves Linear.weight to another dtype"),
    "led": ("text-to-text", CaptureError, VALUES),
}
QUICK = ("mamba", "resnet", "moonshine")


@pytest.mark.parametrize("family", [name if name in QUICK else pytest.param(name, marks=long) for name in REFUSED])
def test_what_cannot_be_captured_is_refused_with_the_true_reason(family: str) -> None:
    task, kind, reason = REFUSED[family]
    with pytest.raises(kind, match=f"(?s){reason.format(family)}") as refused:
        spec = zoo.resolve(robustness.config_of(family), task=task)
        if family in robustness.PADDED:
            capture.capture_for_check(spec, tasks.get(task).inputs(spec.config, padding=True), torch.float64)
        _check(spec)
    assert refused.value.hint


def test_every_family_that_is_refused_under_all_plans_is_refused_here() -> None:
    rows = robustness.read(robustness.RESULTS)
    exact = {row["family"] for row in rows if row["outcome"] == "exact"}
    assert {row["family"] for row in rows} - exact == REFUSED.keys()


def test_masks_that_our_operator_has_words_for_are_never_made() -> None:
    spec = zoo.resolve("meta-llama/Llama-3.2-1B", tiny=True)
    blocks = capture.capture(spec, tasks.get(spec.task).inputs(spec.config), dtype=torch.float64, check=False).blocks
    text = "".join([blocks.prologue, *(template.text for template in blocks.templates.values())])
    assert "phalanx.attention" in text
    assert "where" not in text and "softmax" not in text

"""Facts measured on fake tensors, against what models really have and what is really kept for a backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from phalanx import tasks
from phalanx.engine.describe import SPLIT_MODELS, describe
from phalanx.engine.measure import measure
from phalanx.errors import CaptureError
from phalanx.expressions import evaluate
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.facts.facts import FIRST, ModelFacts, load, to_json
from phalanx.model.zoo.zoo import ModelSpec, build, resolve
from phalanx.plan.plan import Plan
from phalanx.predict.from_facts import shipped
from phalanx.tasks.base import Input

DTYPE = torch.bfloat16
long = pytest.mark.long


@pytest.mark.parametrize("name", ["gpt2", "bert-base-cased", "t5-small", "whisper-small", "llama-3.2-1b"])
def test_the_shipped_count_of_parameters_is_that_of_the_model(name: str) -> None:
    facts = load(name)
    assert facts is not None
    assert facts.num_parameters == sum(p.numel() for p in build(resolve(name), device="meta").parameters())


def _captured(name: str) -> tuple[ModelSpec, Captured]:
    spec = resolve(name, tiny=True)
    inputs = tasks.get(spec.task).inputs(spec.config)
    return spec, capture(spec, inputs, dtype=DTYPE, dropout=0.0, check=False, use_cache=False)


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize(
    "name", ["phalanx-demo", pytest.param("whisper-small", marks=long), pytest.param("t5-small", marks=long)]
)
def test_measured_saved_bytes_are_what_is_kept_for_the_backward(name: str) -> None:
    spec, captured = _captured(name)
    facts = measure(spec, captured, DTYPE)
    inputs = tasks.get(spec.task).synthetic(spec.config, batch=3, tokens=23, seed=0)
    dims = captured.dims(inputs)
    shape = describe(captured, Plan(), "bfloat16").eager
    steps = [step for block in range(shape.num_blocks) for step in shape.ops_of(block)]
    kept = {activation for step in steps for activation in step.bw.reads}
    own = sum(evaluate(size or "0", dims) for step in steps for size in (step.bw.saved_b, step.bw.saved_bw))
    shared = {tensor.name: evaluate(tensor.bytes, dims) for block in facts.blocks for tensor in block.shared}
    assert {name for name in shared if name in shape.sizes} == kept
    assert facts.saved_bytes(dims) == own + sum(shared.values())
    first = facts.blocks[0].crossing[0]
    assert first.sizes(dims)[0] == 3 and first.dtype == "bfloat16"


@pytest.mark.parametrize("name, keys", [("gpt2", "8*batch"), pytest.param("t5-small", "16*batch", marks=long)])
def test_of_the_keys_of_dropout_a_block_keeps_its_own(name: str, keys: str) -> None:
    """Of attention, which makes its decisions again; T5's decoder has two of it. All blocks' keys are one tensor."""
    spec = resolve(name, tiny=True)
    inputs = tasks.get(spec.task).inputs(spec.config)
    captured = capture(spec, inputs, dtype=DTYPE, dropout=0.1, check=False, use_cache=False)
    layers = [block.saved_bytes for block in measure(spec, captured, DTYPE).blocks][1:-1]
    assert layers[-1].endswith(f"+ {keys}")


class _Strided(nn.Module):
    """Halves the tokens, rounding up: no polynomial says how many are left."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.head(x[:, ::2]).mean(dim=1).squeeze(-1), labels)


def test_what_grows_in_steps_is_an_error_that_names_the_block() -> None:
    inputs = (Input("x", "float", ("batch", "tokens", 8)), Input("labels", "float", ("batch",)))
    spec = resolve(_Strided())
    captured = capture(spec, inputs, check=False)
    with pytest.raises(CaptureError) as error:
        measure(spec, captured, torch.float32)
    assert error.value.message == "what block 'head' keeps or sends is no polynomial of batch, tokens"
    assert "stride" in error.value.hint


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param("phalanx-demo", "float32", marks=long),
        pytest.param("phalanx-demo", "bfloat16", marks=long),
        pytest.param("phalanx-demo", "float16", marks=long),
        pytest.param("meta-llama/Llama-3.2-1B", "float32", marks=long),
        pytest.param("meta-llama/Llama-3.2-1B", "float16", marks=long),
        pytest.param("google/vit-base-patch16-224-in21k", "bfloat16", marks=long),
        pytest.param("google/vit-base-patch16-224-in21k", "float16", marks=long),
    ],
)
def test_shipped_facts_are_what_is_measured_today(name: str, dtype: str) -> None:
    """When this fails after a change of capture or of what is saved: python -m phalanx.engine.describe."""
    captured, facts = _measured(name, dtype)
    assert facts == load(name, dtype)
    for plan in (Plan(), Plan(recompute=("light",))):
        assert describe(captured, plan, dtype) == shipped(facts, plan)
    if name in SPLIT_MODELS and dtype == FIRST:
        split = Plan(tp=2, sequence=True)
        assert describe(captured, split, dtype) == shipped(facts, split)


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param("openai/whisper-small", "bfloat16", marks=long), ("phalanx-demo", "float32"), ("gpt2", "float32"),
        pytest.param("openai/whisper-small", "float16", marks=long),
        pytest.param("google-t5/t5-small", "float16", marks=long),
        pytest.param("google-t5/t5-small", "float32", marks=long),
    ],
)  # fmt: skip
def test_shipped_facts_know_what_a_model_does_for_a_dtype_alone(name: str, dtype: str) -> None:
    """Encoders of these kinds clamp in float16 what they hand on."""
    _, facts = _measured(name, dtype)
    assert facts == load(name, dtype)
    if dtype == "float16":
        first = load(name)
        assert first is not None and to_json(facts) != to_json(first).replace(FIRST, dtype)


def _measured(name: str, dtype: str) -> tuple[Captured, ModelFacts]:
    spec, own = resolve(name), getattr(torch, dtype)
    captured = capture(spec, tasks.get(spec.task).inputs(spec.config), dtype=own, check=False, use_cache=False)
    return captured, measure(spec, captured, own)

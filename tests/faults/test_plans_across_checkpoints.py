"""A run that changes its plan at a checkpoint, on another number of ranks, is the run that never stopped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from phalanx.launch.worker_pool import WorkerPool
from phalanx.state import checkpoint
from tests.faults.ranks import fit
from tests.run_helpers import HALF, losses, short_run

# Dropout, clipping, warm-up, weight decay, and batches that end inside an epoch of 13 samples.
OPTIONS = {
    "dtype": "float64", "batch_size": 8, "lr": 3e-3, "lr_schedule": "constant", "warmup_steps": 2, "clip": 0.5,
    "seed": 3, "export": False, "device": "cpu",
}  # fmt: skip
DATA = "synthetic:13"
TOLERANCE = {"float64": 1e-9, "float32": 2e-5}

RELAY = ("pp=2,mb=4,schedule=zb-h1", "dp=2,zero=1", "", "pp=2,dp=2,zero=3", "dp=4,zero=2,zero_degree=2")
PAIRS = [
    ("pp=2", "dp=2,zero=1"),
    ("pp=2,dp=2,zero=3", ""),
    ("", "pp=2,mb=4,schedule=zb-h1"),
    ("dp=4,zero=2,zero_degree=2", "pp=3,mb=4,schedule=gpipe"),
    ("pp=2,mb=4,schedule=zb-v", "dp=3,zero=3,gather=step"),
    ("pp=2,v=2,mb=4,schedule=interleaved", "pp=2,dp=2,zero=1"),
]


def undisturbed(out: Path, model: str, **options: Any) -> dict[int, float]:
    """Step → loss of one process that trains from beginning to end; it also fills the cache of captures."""
    short_run(model, DATA, out, **{**OPTIONS, **options})
    return losses(out)


def relay(pool: WorkerPool, out: Path, model: str, plans: Sequence[str], leg: int, **options: Any) -> dict[int, float]:
    """Step → loss of a run that goes on under the next plan after every `leg` steps."""
    for number, plan in enumerate(plans, start=1):
        chosen = {**OPTIONS, **options, "plan": plan, "steps": number * leg, "resume": "auto"}
        done = fit(pool, out, model, DATA, **chosen)
        assert done.steps == number * leg and len(done.losses) == leg
    return losses(out)


def require_same(found: dict[int, float], expected: dict[int, float], dtype: str = "float64") -> None:
    assert found == pytest.approx(expected, rel=TOLERANCE[dtype], abs=0.0)


def stored(folder: Path, prefix: str) -> dict[str, Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    opened = checkpoint.open(newest)
    return {name: opened.read(name) for name in opened.names() if name.startswith(prefix)}


def test_a_run_that_changes_plan_and_ranks_every_two_steps_has_the_losses_of_one_process(
    pool: WorkerPool, tmp_path: Path
):
    expected = undisturbed(tmp_path / "whole", "gpt2", steps=2 * len(RELAY))
    require_same(relay(pool, tmp_path / "relay", "gpt2", RELAY, 2), expected)
    for prefix in ("model/", "optimizer/"):
        whole, parts = stored(tmp_path / "whole", prefix), stored(tmp_path / "relay", prefix)
        torch.testing.assert_close(parts, whole, rtol=1e-7, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_twenty_steps_under_one_plan_and_twenty_under_another_equal_forty_on_one_rank(
    first: str, second: str, pool: WorkerPool, tmp_path: Path
):
    expected = undisturbed(tmp_path / "whole", "gpt2", steps=40)
    require_same(relay(pool, tmp_path / "relay", "gpt2", (first, second), 20), expected)


@pytest.mark.long
@pytest.mark.parametrize("model", ["openai/whisper-small", "google-t5/t5-small"])
def test_encoder_decoder_models_change_plans_too(model: str, pool: WorkerPool, tmp_path: Path):
    expected = undisturbed(tmp_path / "whole", model, steps=4)
    require_same(relay(pool, tmp_path / "relay", model, ("pp=2,dp=2,zero=3", "pp=3,mb=2"), 2), expected)


def test_the_exported_folder_is_the_same_whatever_plan_wrote_it(pool: WorkerPool, tmp_path: Path):
    """Both plans export from one checkpoint, so not a bit may differ; and HuggingFace opens the folder."""
    done = fit(pool, tmp_path / "trained", "gpt2", DATA, **{**OPTIONS, "dtype": "float32", "steps": 2})
    exports = []
    for name, plan in (("one", ""), ("four", "pp=2,dp=2,zero=3")):
        options = {**OPTIONS, "dtype": "float32", "export": True, "steps": 2, "resume": str(done.checkpoint)}
        exported = fit(pool, tmp_path / name, "gpt2", DATA, **options, plan=plan).export
        assert exported is not None
        exports.append(exported)
    one, four = (load_file(folder / "model.safetensors") for folder in exports)
    assert one.keys() == four.keys() and all(torch.equal(one[name], four[name]) for name in one)
    ids = torch.arange(16).view(2, 8)
    logits = [transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in exports]
    assert torch.equal(*logits)


@pytest.mark.long
def test_master_weights_survive_a_change_of_plan(pool: WorkerPool, tmp_path: Path):
    """Updates this small vanish in bfloat16: only master weights that were carried over can hold all of them."""
    options = {"dtype": "bfloat16", "lr": 1e-5, "warmup_steps": 0, "weight_decay": 0.0, "dropout": 0.0}
    undisturbed(tmp_path / "whole", "gpt2", steps=6, **options)
    relay(pool, tmp_path / "relay", "gpt2", ("pp=2", "pp=2,dp=2,zero=3"), 3, **options)
    whole, parts = stored(tmp_path / "whole", "master/"), stored(tmp_path / "relay", "master/")
    assert whole and whole.keys() == parts.keys()
    assert all(tensor.dtype == torch.float32 for tensor in parts.values())
    apart = torch.cat([(parts[name] - whole[name]).abs().flatten() for name in whole]).mean().item()
    assert apart < 1e-5, "less than one update in six"


def test_the_scale_of_a_float16_loss_survives_a_change_of_plan(pool: WorkerPool, tmp_path: Path):
    options = {"dtype": "float16", "max_nonfinite": 20, **HALF}
    undisturbed(tmp_path / "whole", "gpt2", steps=4, **options)
    relay(pool, tmp_path / "relay", "gpt2", ("pp=2,mb=2", "dp=2,zero=1"), 2, **options)
    scales = []
    for name in ("whole", "relay"):
        newest = checkpoint.latest(tmp_path / name / "checkpoints")
        assert newest is not None
        scales.append(checkpoint.open(newest).state["loss_scale"])
    assert scales[0] == scales[1] and scales[0]["good"] > 2

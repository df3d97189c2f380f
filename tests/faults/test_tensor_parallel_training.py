"""Training split over ranks goes through checkpoints, other plans, half precision and export like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phalanx.launch.worker_pool import WorkerPool
from phalanx.state import checkpoint
from tests.faults.ranks import fit
from tests.faults.test_plans_across_checkpoints import DATA, OPTIONS, relay, require_same, stored, undisturbed
from tests.run_helpers import losses, records

long = pytest.mark.long
LLAMA = "meta-llama/Llama-3.2-1B"
RELAY = ("tp=2,dp=2,zero=3,overlap=oases", "pp=2", "tp=4,degrees=2:1,sequence=yes")
LONG_RELAY = ("tp=2", *RELAY, "tp=2,dp=2,zero=1", "")


@pytest.mark.parametrize(("model", "plans"), [("gpt2", RELAY), pytest.param(LLAMA, LONG_RELAY, marks=long)])
def test_a_run_that_goes_in_and_out_of_tensor_parallelism_has_the_losses_of_one_process(
    model: str, plans: tuple[str, ...], pool: WorkerPool, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "whole", model, steps=2 * len(plans))
    require_same(relay(pool, tmp_path / "relay", model, plans, 2), expected)
    for prefix in ("model/", "optimizer/"):
        whole, parts = stored(tmp_path / "whole", prefix), stored(tmp_path / "relay", prefix)
        torch.testing.assert_close(parts, whole, rtol=1e-7, atol=1e-12)


def test_the_exported_model_is_that_of_the_plain_run(pool: WorkerPool, tmp_path: Path) -> None:
    """In float64: Adam turns the rounding of a small gradient into a visible update."""
    options = {**OPTIONS, "steps": 3, "export": True}
    plain = fit(pool, tmp_path / "plain", "gpt2", DATA, **options).export
    split = fit(pool, tmp_path / "split", "gpt2", DATA, plan="tp=2", **options).export
    assert plain is not None and split is not None
    one, two = (load_file(folder / "model.safetensors") for folder in (plain, split))
    torch.testing.assert_close(two, one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("plan", [pytest.param("tp=2", marks=long), "tp=4,degrees=2:4,sequence=yes"])
def test_the_evaluation_of_a_split_run_is_that_of_the_plain_one(plan: str, pool: WorkerPool, tmp_path: Path) -> None:
    options = {**OPTIONS, "steps": 2, "eval_every": 1, "eval_data": "synthetic:8", "warmup_steps": 0}
    found = []
    for name, own in (("plain", ""), ("split", plan)):
        fit(pool, tmp_path / name, "gpt2", DATA, **options, plan=own)
        found.append([record["eval_loss"] for record in records(tmp_path / name, "step")])
    assert len(found[0]) == 2 and found[1] == pytest.approx(found[0], rel=1e-9)


@pytest.mark.long
def test_master_weights_of_a_split_run_survive_a_change_of_plan(pool: WorkerPool, tmp_path: Path) -> None:
    """Updates this small vanish in bfloat16: only master weights that were carried over can hold all of them."""
    options = {"dtype": "bfloat16", "lr": 1e-5, "warmup_steps": 0, "weight_decay": 0.0, "dropout": 0.0}
    undisturbed(tmp_path / "whole", "gpt2", steps=6, **options)
    relay(pool, tmp_path / "relay", "gpt2", ("tp=2", "tp=2,dp=2,zero=3"), 3, **options)
    whole, parts = stored(tmp_path / "whole", "master/"), stored(tmp_path / "relay", "master/")
    assert whole and whole.keys() == parts.keys()
    apart = torch.cat([(parts[name] - whole[name]).abs().flatten() for name in whole]).mean().item()
    assert apart < 1e-5, "less than one update in six"


@pytest.mark.long
def test_the_scale_of_a_float16_loss_survives_a_change_of_plan_too(pool: WorkerPool, tmp_path: Path) -> None:
    options = {"dtype": "float16", "max_nonfinite": 20, "seq_len": 8}
    undisturbed(tmp_path / "whole", "gpt2", steps=4, **options)
    relay(pool, tmp_path / "relay", "gpt2", ("tp=2,sequence=yes", "pp=2"), 2, **options)
    assert losses(tmp_path / "relay") == pytest.approx(losses(tmp_path / "whole"), rel=1e-2)
    scales = []
    for name in ("whole", "relay"):
        newest = checkpoint.latest(tmp_path / name / "checkpoints")
        assert newest is not None
        scales.append(checkpoint.open(newest).state["loss_scale"])
    assert scales[0] == scales[1] and scales[0]["good"] > 2

"""Training on token slices through the command line: stopped and gone on with without slices, evaluated, refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.engine.inputs import Inputs
from phalanx.model.ops.slice_attention import Past
from tests.run_helpers import losses, records, short_run

# Dropout, clipping, warm-up, and batches that end inside an epoch of 7 samples; 5-3-1 does not divide 16 tokens.
OPTIONS = {
    "dtype": "float64", "lr": 3e-3, "lr_schedule": "constant", "warmup_steps": 2, "clip": 0.5, "device": "cpu",
    "export": False,
}  # fmt: skip
LINE = (
    "train --model gpt2 --data synthetic:7 --tiny --seq-len 16 --batch-size 4 --steps 2 --progress off --log-every 1 "
    "--dtype float64 --lr 3e-3 --lr-schedule constant --warmup-steps 2 --clip 0.5 --device cpu --no-export "
    "--plan pp=2,mb=2,slices=5-3-1"
)


def run_whole(out: Path, **options: Any) -> None:
    short_run("gpt2", "synthetic:7", out, **OPTIONS, **options)


def evaluations(folder: Path) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in records(folder, "step") if "eval_loss" in record}


@pytest.mark.usefixtures("lent_ranks")
def test_a_run_on_slices_that_goes_on_without_them_has_the_losses_of_one_that_never_had_them(tmp_path: Path) -> None:
    run_whole(tmp_path / "whole", steps=4)
    assert main([*LINE.split(), "--out", str(tmp_path / "cut")]) == 0
    run_whole(tmp_path / "cut", steps=4, resume="auto", plan="mb=2")
    plans = [record["header"]["plan"] for record in records(tmp_path / "cut", "start")]
    assert ["slices=5-3-1" in plan for plan in plans] == [True, False]
    expected = losses(tmp_path / "whole")
    assert sorted(expected) == [1, 2, 3, 4] and len(set(expected.values())) == 4
    assert losses(tmp_path / "cut") == pytest.approx(expected, rel=1e-9, abs=0.0)


@pytest.mark.usefixtures("lent_ranks")
def test_the_evaluation_of_a_run_on_slices_is_that_of_a_run_without(tmp_path: Path) -> None:
    run_whole(tmp_path / "whole", steps=2, eval_data="synthetic:6", eval_samples=5, eval_every=1)
    evaluated = "--eval-data synthetic:6 --eval-samples 5 --eval-every 1"
    assert main([*LINE.split(), *evaluated.split(), "--out", str(tmp_path / "cut")]) == 0
    found = evaluations(tmp_path / "cut")
    assert sorted(found) == [1, 2] and found == pytest.approx(evaluations(tmp_path / "whole"), rel=1e-9, abs=0.0)


def test_slices_are_gone_after_their_step_without_a_search_for_cycles(tmp_path: Path) -> None:
    """A search comes rarely and does not know how large tensors are."""
    seen: list[int] = []

    class Watcher:
        def on_step(self, record: Any) -> None:
            seen.append(sum(type(thing) in (Inputs, Past) for thing in gc.get_objects()))

        def on_evaluate(self, record: Any) -> None:
            kept = [thing for thing in gc.get_objects() if type(thing) is Past and thing._kv is not None]
            assert not kept

    gc.collect()
    gc.disable()
    try:
        evaluated = {"eval_data": "synthetic:6", "eval_every": 1}
        run_whole(tmp_path / "cut", steps=3, plan="mb=2,slices=3", callbacks=[Watcher()], **evaluated)
    finally:
        gc.enable()
    assert len(seen) == 3 and len(set(seen)) == 1, f"they pile up: {seen}"


def test_a_model_that_cannot_be_sliced_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "train --model bert-base-cased --data synthetic:8 --tiny --seq-len 16 --batch-size 4 --steps 1 --device cpu"
    assert main([*line.split(), "--progress", "off", "--plan", "slices=2", "--out", str(tmp_path)]) != 0
    message = capsys.readouterr().err
    assert "slices need causal attention, and in bert.encoder.layer.0 tokens see later ones" in message
    assert "leave slices out" in message and "Traceback" not in message

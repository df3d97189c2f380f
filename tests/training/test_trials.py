"""What a trial of a plan leaves out of a run, and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.config import RunConfig
from phalanx.training.job import Job
from phalanx.training.trials import STEPS, WITHOUT, Trial, with_fastest

# What a step does and how long it takes.
KEPT = {
    "model", "init", "task", "tiny", "model_options", "dropout", "freeze", "lora", "merge_lora", "data", "text_key",
    "tokenizer", "documents", "on_broken", "shuffle", "seq_len", "batch_size", "ranks", "dtype", "master_weights",
    "compile", "device", "memory", "timeout", "silence", "on_loss", "min_ranks", "mirror_every", "seed",
    "deterministic", "slot_size", "clip", "max_nonfinite", "spike_factor", "optimizer", "optimizer_options", "lr",
    "betas", "eps", "weight_decay", "groups", "lr_schedule", "min_lr_ratio", "log_every",
}  # fmt: skip
ITS_OWN = {"plan", "out"}


def test_every_option_is_kept_or_left_out() -> None:
    assert sorted([*KEPT, *WITHOUT, *ITS_OWN]) == sorted(RunConfig.model_fields)


def test_a_trial_has_nothing_that_needs_more_than_its_steps(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "steps": 8, "plan_at": "6:mb=2", "batch_size_at": "6:8", "seq_len_at": "6:8", "eval_data": "synthetic",
        "eval_every": 2, "eval_samples": 6, "generate_tokens": 5, "keep_checkpoints": 3,
        "metrics": "accuracy", "early_stop": 1, "keep_best": True, "on_spike": "rollback",
        "spike_factor": 9.0, "checkpoint_every": 4, "generate_every": 2, "generate_prompts": "x", "export_dcp": True,
        "remote": (tmp_path / "remote").as_uri(), "report_to": "tensorboard", "measure_top": 2, "out": tmp_path,
    }  # fmt: skip
    job = Job(
        "phalanx-demo", "synthetic", "synthetic", RunConfig.create(**options), metrics={"own": lambda *given: 0.0}
    )
    tried: list[Job] = []

    def attempt(trial: Job) -> Trial:
        tried.append(trial)
        return Trial("mb=1", 1.0, [])

    with_fastest(job, attempt)
    for trial in tried:
        assert WITHOUT.items() <= dict(trial.config).items() and trial.config.steps == STEPS
        assert (trial.eval_data, trial.metrics) == (None, {})
    assert len(tried) == 2

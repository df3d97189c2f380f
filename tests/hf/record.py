"""What transformers' own Trainer gives for the two scripts, written to reference.json beside this file.

It needs accelerate, which the project does not: run it where that is installed, as `python -m tests.hf.record`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from tests.hf.history import history
from tests.hf.scripts import causal_script, classification_script, sentences

REFERENCE = Path(__file__).with_name("reference.json")


def record() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        smoothed = {"label_smoothing_factor": 0.1, "eval_strategy": "no", "num_train_epochs": 1}
        runs = {
            "causal": causal_script(Trainer, TrainingArguments, folder),
            "smoothed": causal_script(Trainer, TrainingArguments, folder, **smoothed),
            "classification": classification_script(Trainer, TrainingArguments, folder),
        }
        for name, trainer in runs.items():
            trainer.train()
            found[name] = history(trainer)
        predicted = runs["classification"].predict(sentences(5, seed=2))
    found["predictions"] = predicted.predictions.tolist()
    found["test_loss"] = predicted.metrics["test_loss"]
    return found


if __name__ == "__main__":
    REFERENCE.write_text(json.dumps(record(), indent=1) + "\n", "utf-8")

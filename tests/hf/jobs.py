"""What ranks do in tests of the Trainer: run a script under a plan, and say what came of it."""

from __future__ import annotations

from typing import Any

from phalanx.hf import Trainer, TrainingArguments
from phalanx.launch.context import RankContext
from tests.hf import scripts
from tests.hf.history import history


def predict(context: RankContext, name: str, plan: str, folder: str) -> tuple[Any, Any, dict[str, float]]:
    """Of a model as it is before training: outputs, labels and metrics."""
    trainer = getattr(scripts, name)(
        lambda **given: Trainer(**given, context=context), TrainingArguments, folder, plan=plan
    )
    found = trainer.predict(scripts.texts(7, seed=2) if name == "causal_script" else scripts.sentences(7, seed=2))
    trainer.close()
    return found.predictions, found.label_ids, found.metrics


def run_script(context: RankContext, name: str, plan: str, folder: str) -> list[dict[str, float]]:
    def made(**given: Any) -> Trainer:
        return Trainer(**given, context=context)

    trainer = getattr(scripts, name)(made, TrainingArguments, folder, plan=plan)
    trainer.train()
    trainer.close()
    return history(trainer)

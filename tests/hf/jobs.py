"""What ranks do in tests of the Trainer: run a script under a plan, and say what came of it."""

from __future__ import annotations

from typing import Any

from phalanx.hf import Trainer, TrainingArguments
from phalanx.launch.context import RankContext
from tests.hf import scripts
from tests.hf.history import history


def run_script(context: RankContext, name: str, plan: str, folder: str) -> list[dict[str, float]]:
    def made(**given: Any) -> Trainer:
        return Trainer(**given, context=context)

    trainer = getattr(scripts, name)(made, TrainingArguments, folder, plan=plan)
    trainer.train()
    trainer.close()
    return history(trainer)

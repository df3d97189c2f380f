"""What a Trainer logged, without what differs from run to run."""

from __future__ import annotations

from typing import Any

KEPT = ("loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss", "eval_loss", "eval_accuracy")


def history(trainer: Any) -> list[dict[str, float]]:
    return [{name: each[name] for name in KEPT if name in each} for each in trainer.state.log_history]

"""Transformers' own training interface over plans: change one import, and a script trains under any plan."""

from phalanx.hf.arguments import TrainingArguments
from phalanx.hf.trainer import Trainer

__all__ = ["Trainer", "TrainingArguments"]

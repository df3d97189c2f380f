"""Training on a crew that stays: a run costs no new processes, so tests can afford many plans and many failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.handover import pack
from phalanx.launch.crew import Crew
from phalanx.plan.complete import needed_ranks
from phalanx.result import Summary
from phalanx.trainer import Trainer, fit_on_rank
from tests.run_helpers import short_config


def fit(crew: Crew, out: Path, model: Any, data: Any, **options: Any) -> Summary:
    """What rank 0 of `phalanx.train` returns, on as many ranks of the crew as the plan needs."""
    trainer = Trainer(model, data, short_config(out, **options))
    with pack(trainer.job) as parcel:
        return crew.run(fit_on_rank, parcel, world=needed_ranks(trainer.config.plan) or 1)[0]

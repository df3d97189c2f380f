"""Writes every page in docs/results anew from the JSON beside it: run `python benchmarks/pages.py`.

A page shows nothing that was measured but is not in its JSON; tests compare each with what it would be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import attention
import checkpoints
import compare_page
import dispatch
import faults
import hf_trainer
import largest
import memory_page
import migrate
import oases_published
import offload
import overlap_page
import own_runs_page
import peers_page
import planner
import published_page
import recovery
import robustness_page
import sabotage
import scaling_page
import schedules_page
import single_gpu_page
import slices_page
import soak_page
import state_moves
import step_api
import terapipe_published_page
import tp_dispatch
import tp_shares_page
import vigilance

RESULTS = Path(__file__).parent.parent / "docs" / "results"
PAGES: Mapping[str, Callable[[], str]] = {
    "attention": attention.page,
    "checkpoints": checkpoints.page,
    "dispatch": dispatch.page,
    "single_gpu": single_gpu_page.page,
    "schedules": schedules_page.page,
    "scaling": scaling_page.page,
    "slices": slices_page.page,
    "peers": peers_page.page,
    "published": published_page.page,
    "sabotage": sabotage.page,
    "soak": soak_page.page,
    "terapipe_published": terapipe_published_page.page,
    "tp_shares": tp_shares_page.page,
    "overlap": overlap_page.page,
    "own_runs": own_runs_page.page,
    "planner": planner.page,
    "recovery": recovery.page,
    "robustness": robustness_page.page,
    "faults": faults.page,
    "memory": memory_page.page,
    "offload": offload.page,
    "largest": largest.page,
    "hf_trainer": hf_trainer.page,
    "migrate": migrate.page,
    "tp_dispatch": tp_dispatch.page,
    "state_moves": state_moves.page,
    "step_api": step_api.page,
    "vigilance": vigilance.page,
    **{name: partial(compare_page.page, name) for name in compare_page.INTRO},
}
PREDICTED: Mapping[str, Callable[[], str]] = {"oases_published": oases_published.page}  # without results


def measured() -> dict[str, str]:
    """The pages for which there are results, by name, and those that need none."""
    found = {name: page() for name, page in PAGES.items() if any(RESULTS.glob(f"{name}*.json"))}
    return found | {name: page() for name, page in PREDICTED.items()}


if __name__ == "__main__":
    for name, text in measured().items():
        (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")

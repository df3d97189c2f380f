"""What the header of a run says about its plan and its ranks."""

from __future__ import annotations

from phalanx.plan.plan import Plan
from phalanx.training.header import plan_text, ranks_text


def test_the_ranks_are_named_by_axis() -> None:
    assert ranks_text(Plan(pp=2, dp=3), 6) == "6 (2 in a pipeline × 3 replicas)"
    assert ranks_text(Plan(pp=2, tp=2), 5) == "4 (2 in a pipeline × 1 replica × 2 tensor-parallel), 1 more to spare"


def test_the_plan_is_shown_with_what_it_makes_of_a_batch() -> None:
    assert plan_text(Plan(dp=2, mb=2, recompute=("block",)), 10) == (
        "dp=2,mb=2,recompute=block: 2 replicas × 2 × 2 to 3 of the 10 samples, schedule 1f1b, "
        "activations recomputed in the backward, a block at a time"
    )
    assert plan_text(Plan(tp=2, overlap="oases"), 8) == (
        "tp=2,overlap=oases: 1 × 8 of the 8 samples in 2 interleaved halves, schedule 1f1b, "
        "activations recomputed in the backward, a unit at a time"
    )
    assert plan_text(Plan(tp=2, overlap="halves"), 8).endswith("activations kept for the backward")
    assert plan_text(Plan.parse("recompute=block+light*2"), 8).endswith(
        "activations of 1 layer recomputed in the backward, a block at a time; "
        "of 2 layers recomputed in the backward but for products and attention; of other blocks kept for the backward"
    )

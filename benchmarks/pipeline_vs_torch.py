"""Pipelines beside torch.distributed.pipelining: same model, cuts, micro-batches, schedules, precision and optimizer.

    python benchmarks/pipeline_vs_torch.py [--gpu] [--quick] [--only 1f1b] [--out FILE]

Both clip to the gradient norm over all stages and update with fused AdamW. In bfloat16 neither side keeps float32
weights, for which torch's pipelines have nothing of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from compare_cli import Case, run
from torch_pipeline import SCHEDULES, pipeline


def cases(world: int) -> Sequence[Case]:
    found: list[Case] = []
    for schedule, theirs in SCHEDULES.items():
        virtual = ",v=2" if schedule == "interleaved" else ""
        found.append(Case(f"pp={world},mb={2 * world},schedule={schedule}{virtual}", {theirs: pipeline}))
    return found


if __name__ == "__main__":
    run("pipeline_vs_torch", __doc__ or "", cases, masters=False)

"""Data parallel and ZeRO beside torch's DistributedDataParallel and FSDP2: same model, batch, precision and optimizer.

    python benchmarks/data_parallel.py [--gpu] [--quick] [--only zero=3] [--out FILE]

All clip to the global gradient norm and update with fused AdamW. ZeRO 1, 2 and 3 with parameters gathered once per step
meet FSDP2 that keeps parameters between forward and backward; ZeRO 3 as it is by default meets FSDP2 that frees them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from compare_cli import Case, run
from torch_data_parallel import DDP, FSDP2_KEEP, FSDP2_RESHARD


def cases(world: int) -> Sequence[Case]:
    return [
        Case(f"dp={world}", DDP),
        Case(f"dp={world},zero=1", FSDP2_KEEP),
        Case(f"dp={world},zero=2", FSDP2_KEEP),
        Case(f"dp={world},zero=3,gather=step", FSDP2_KEEP),
        Case(f"dp={world},zero=3", FSDP2_RESHARD),
    ]


if __name__ == "__main__":
    run("data_parallel", __doc__ or "", cases, masters=True)

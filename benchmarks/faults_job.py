"""The run that `faults.py` strikes: a tiny GPT-2 whose data fails when it is told to. Nothing is measured here.

Started by itself, it starts its ranks; started with the variables of a launcher, it joins as one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

import phalanx
from phalanx.errors import PhalanxError
from phalanx.launch.join import leave

SAMPLES, TOKENS = 512, 16


class Data:
    """Samples that cannot be read any more once a file is there."""

    def __init__(self, trigger: str) -> None:
        self._trigger = Path(trigger)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self._trigger.exists():
            raise OSError(f"sample {index} cannot be read")
        ids = (torch.arange(TOKENS) * 7 + index * 3) % 90
        return {"input_ids": ids, "labels": ids}


def trainer(out: str, plan: str, steps: int, trigger: str, silence: float) -> phalanx.Trainer:
    config = phalanx.RunConfig(
        out=out, plan=plan, steps=steps, tiny=True, seq_len=TOKENS, batch_size=4, lr=3e-3, lr_schedule="constant",
        checkpoint_every=2, keep_checkpoints=2, export=False, resume="auto", device="cpu", progress="off", log_every=1,
        silence=silence,
    )  # fmt: skip
    return phalanx.Trainer("gpt2", Data(trigger), config)


def main(out: str, plan: str, steps: str, trigger: str, silence: str) -> int:
    try:
        trainer(out, plan, int(steps), trigger, float(silence)).fit()
    except PhalanxError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave(2)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

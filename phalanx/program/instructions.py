"""What a rank is told to do: a program is an ordered list of instructions, and reads back from its text.

The short view names stage and micro-batch: `F0.2` is the forward of stage 0 for micro-batch 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from phalanx.errors import PlanError


class Op(StrEnum):
    """F forward; B gradients of inputs; W gradients of weights; BW both at once; STEP the optimizer."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"
    STEP = "STEP"


@dataclass(frozen=True)
class Instruction:
    op: Op
    stage: int = 0
    micro_batch: int = 0

    def __str__(self) -> str:
        return str(self.op) if self.op is Op.STEP else f"{self.op}{self.stage}.{self.micro_batch}"


Program = tuple[Instruction, ...]

_PATTERN = re.compile(r"(BW|F|B|W)(\d+)\.(\d+)")


def to_text(program: Iterable[Instruction]) -> str:
    return " ".join(str(instruction) for instruction in program)


def from_text(text: str) -> Program:
    """Reads what `to_text` wrote; the error shows the word that is not an instruction."""
    return tuple(_parse(word) for word in text.split())


def _parse(word: str) -> Instruction:
    if word == Op.STEP:
        return Instruction(Op.STEP)
    match = _PATTERN.fullmatch(word)
    if match is None:
        raise PlanError(f"'{word}' is not an instruction", "write F, B, W or BW with stage.micro-batch (F0.2), or STEP")
    return Instruction(Op(match[1]), int(match[2]), int(match[3]))

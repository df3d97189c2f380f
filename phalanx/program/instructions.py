"""What a rank is told to do: a program is an ordered list of instructions, and reads back from its text.

The short view names stage and micro-batch: `F1.2` is the forward of stage 1 for micro-batch 2. The lowered view, which
is what is checked, simulated and run, names blocks and buckets too (`F1.2/5`, `R1.2/5`), and the rank at the other end
of a message (`SF1.2>3`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from phalanx.errors import PlanError


class Op(StrEnum):
    """What an instruction does. A bucket is a set of parameters that are gathered and reduced together."""

    F = "F"  # forward
    B = "B"  # gradients of inputs
    W = "W"  # gradients of weights
    BW = "BW"  # both at once
    SEND_F = "SF"  # a stage's outputs to the next stage
    RECV_F = "RF"  # a stage's inputs from the one before
    SEND_B = "SB"  # the gradients of a stage's inputs to the one before
    RECV_B = "RB"  # the gradients of a stage's outputs from the next
    GATHER = "G"  # a bucket's parameters from the ranks that share them
    FREE = "X"  # what was gathered
    REDUCE = "R"  # a bucket's gradients over the replicas
    TIE = "T"  # a shared bucket's gradients over the stages that hold it
    COUNT = "COUNT"  # the items of the global batch
    NORM = "NORM"  # the loss, the norm of all gradients, whether all is finite
    STEP = "STEP"  # the optimizer
    SHARE = "P"  # a bucket's updated parameters with the ranks that did not update them


COMPUTE = frozenset((Op.F, Op.B, Op.W, Op.BW))
SENDS = frozenset((Op.SEND_F, Op.SEND_B))
RECEIVES = frozenset((Op.RECV_F, Op.RECV_B))
COLLECTIVES = frozenset((Op.GATHER, Op.REDUCE, Op.TIE, Op.COUNT, Op.NORM, Op.SHARE))


@dataclass(frozen=True, slots=True)
class Instruction:
    """`block` is the block of a computation, the bucket of anything about parameters."""

    op: Op
    stage: int | None = None
    micro_batch: int | None = None
    block: int | None = None
    peer: int | None = None  # rank

    def __str__(self) -> str:
        text = str(self.op) + ("" if self.stage is None else str(self.stage))
        text += "" if self.micro_batch is None else f".{self.micro_batch}"
        text += "" if self.block is None else f"/{self.block}"
        return text if self.peer is None else f"{text}{'>' if self.op in SENDS else '<'}{self.peer}"


Program = tuple[Instruction, ...]

_OPS = "|".join(sorted(Op, key=len, reverse=True))
_PATTERN = re.compile(rf"({_OPS})(\d+)?(?:\.(\d+))?(?:/(\d+))?(?:([<>])(\d+))?")


def to_text(program: Iterable[Instruction]) -> str:
    return " ".join(str(instruction) for instruction in program)


def from_text(text: str) -> Program:
    """Reads what `to_text` wrote; the error shows the word that is not an instruction."""
    return tuple(_parse(word) for word in text.split())


def _parse(word: str) -> Instruction:
    match = _PATTERN.fullmatch(word)
    if match is None or not _well_formed(match):
        raise PlanError(
            f"'{word}' is not an instruction",
            "write for example F0.2 (forward, stage 0, micro-batch 2), BW0.2/5 (block 5), SF0.2>1 (to rank 1), STEP",
        )
    stage, micro_batch, block, peer = (None if match[i] is None else int(match[i]) for i in (2, 3, 4, 6))
    return Instruction(Op(match[1]), stage, micro_batch, block, peer)


def _well_formed(match: re.Match[str]) -> bool:
    """Each kind of instruction names exactly the places it has."""
    op, (stage, micro_batch, block, arrow) = Op(match[1]), (match[i] is not None for i in (2, 3, 4, 5))
    if op in COMPUTE:
        return stage and micro_batch and not arrow
    if op in SENDS or op in RECEIVES:
        return stage and micro_batch and not block and match[5] == (">" if op in SENDS else "<")
    if op in (Op.GATHER, Op.FREE, Op.REDUCE):
        return stage and micro_batch and block and not arrow
    if op in (Op.TIE, Op.SHARE):
        return block and not (stage or micro_batch or arrow)
    return not (stage or micro_batch or block or arrow)

"""What a rank is told to do: a program is an ordered list of instructions, and reads back from its text.

The short view names stage and micro-batch: `F1.2` is the forward of stage 1 for micro-batch 2. The lowered view, which
is what is checked, simulated and run, names blocks and buckets too (`F1.2/5`, `R1.2/5`), the rank at the other end of a
message (`SF1.2>3`), and under tensor parallelism halves and ops: `F1.2a/5:3` is op 3 of block 5 for the first half.
Where a micro-batch's tokens are cut into slices, both views name the slice too: `F1.2.4`, `F1.2.4a/5:3`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from phalanx.errors import PlanError


class Op(StrEnum):
    """What an instruction does. A bucket is a set of parameters that are gathered and reduced together."""

    INPUT = "I"  # what a micro-batch's computations need of its inputs
    F = "F"  # forward
    B = "B"  # gradients of inputs
    W = "W"  # gradients of weights
    BW = "BW"  # both at once
    A = "A"  # forward again, for a backward of which the forward kept nothing
    CF = "CF"  # the collective of a redistribution in the forward
    CA = "CA"  # that of the forward again, before the backward
    CB = "CB"  # the collective of a redistribution in the backward
    LF = "LF"  # what a redistribution does without the other ranks, in the forward
    LA = "LA"  # in the forward again
    LB = "LB"  # in the backward
    SEND_F = "SF"  # a stage's outputs to the next stage
    RECV_F = "RF"  # a stage's inputs from the one before
    SEND_B = "SB"  # the gradients of a stage's inputs to the one before
    RECV_B = "RB"  # the gradients of a stage's outputs from the next
    GATHER = "G"  # a bucket's parameters from the ranks that share them
    REDUCE = "R"  # a bucket's gradients over the replicas, with ZeRO over those that share them
    SUM = "S"  # a bucket's reduced shard over all others that have the same one
    TIE = "T"  # a shared bucket's gradients over the stages that hold it
    COUNT = "COUNT"  # the items of the global batch
    NORM = "NORM"  # the loss, the norm of all gradients, whether all is finite
    STEP = "STEP"  # the optimizer
    SHARE = "P"  # a bucket's updated parameters with the ranks that did not update them
    OUT = "OUT"  # to the host: what an op's backward needs; a bucket's gradients; a part of its optimizer state
    IN = "IN"  # from the host: what an op's backward needs; a bucket's parameters; a part of its optimizer state


COMPUTE = frozenset((Op.F, Op.B, Op.W, Op.BW, Op.A))
REDISTRIBUTIONS = frozenset((Op.CF, Op.CA, Op.CB))  # collectives between the ranks that split tensors
LOCAL_REDISTRIBUTIONS = frozenset((Op.LF, Op.LA, Op.LB))
SENDS = frozenset((Op.SEND_F, Op.SEND_B))
RECEIVES = frozenset((Op.RECV_F, Op.RECV_B))
COLLECTIVES = REDISTRIBUTIONS | {Op.GATHER, Op.REDUCE, Op.SUM, Op.TIE, Op.COUNT, Op.NORM, Op.SHARE}
MOVES = frozenset((Op.OUT, Op.IN))  # between the memories of device and host
HALVES = "ab"


class Instruction(NamedTuple):
    """`block` is the block of a computation or redistribution, the bucket of anything about parameters. `half`: of the
    micro-batch, where it is cut in two. `op_index`: of the block, where it is made of several (`shape.BlockOp`).
    `slice`: of the micro-batch's tokens, where they are cut. For the state of a bucket `op_index` is a part of it."""

    op: Op
    stage: int | None = None
    micro_batch: int | None = None
    block: int | None = None
    peer: int | None = None  # rank
    half: int | None = None
    op_index: int | None = None
    slice: int | None = None

    def __str__(self) -> str:
        text = str(self.op) + ("" if self.stage is None else str(self.stage))
        text += "" if self.micro_batch is None else f".{self.micro_batch}"
        text += "" if self.slice is None else f".{self.slice}"
        text += "" if self.half is None else HALVES[self.half]
        text += "" if self.block is None else f"/{self.block}"
        text += "" if self.op_index is None else f":{self.op_index}"
        return text if self.peer is None else f"{text}{'>' if self.op in SENDS else '<'}{self.peer}"


Program = tuple[Instruction, ...]


def is_fetch(it: Instruction) -> bool:
    """Whether it brings a bucket's parameters from the host."""
    return it.op is Op.IN and it.stage is None and it.op_index is None


_OPS = "|".join(sorted(Op, key=len, reverse=True))
_PATTERN = re.compile(
    rf"(?P<op>{_OPS})(?P<stage>\d+)?(?:\.(?P<micro_batch>\d+)(?:\.(?P<slice>\d+))?(?P<half>[{HALVES}])?)?"
    r"(?:/(?P<block>\d+)(?::(?P<op_index>\d+))?)?(?:(?P<arrow>[<>])(?P<peer>\d+))?"
)
_NUMBERS = ("stage", "micro_batch", "slice", "block", "op_index", "peer")


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
    numbers = {name: int(match[name]) for name in _NUMBERS if match[name] is not None}
    return Instruction(Op(match["op"]), **numbers, half=HALVES.index(match["half"]) if match["half"] else None)


def _well_formed(match: re.Match[str]) -> bool:
    """Each kind of instruction names exactly the places it has."""
    op = Op(match["op"])
    named = {name for name, text in match.groupdict().items() if name not in ("op", "arrow", "peer") and text}
    arrow = ">" if op in SENDS else "<" if op in RECEIVES else None
    needed, allowed = _places(op, "stage" in named)
    return needed <= named <= needed | allowed and match["arrow"] == arrow


def _places(op: Op, staged: bool) -> tuple[set[str], set[str]]:
    """What an instruction of a kind must name, and what it may name besides."""
    place = {"stage", "micro_batch"}
    if op in COMPUTE:
        return place, {"slice", "half", "block", "op_index"}
    if op in REDISTRIBUTIONS or op in LOCAL_REDISTRIBUTIONS:
        return {*place, "block", "op_index"}, {"slice", "half"}
    if op in MOVES and staged:
        return {*place, "block"}, {"slice", "half", "op_index"}
    if op in MOVES:  # of a bucket's state; of its gradients, or its parameters
        return {"block"}, {"op_index"}
    if op is Op.STEP:
        return set(), {"block", "op_index"}
    if op is Op.INPUT:
        return {"micro_batch"}, {"half"}
    if op in SENDS or op in RECEIVES:
        return place, {"slice", "half"}
    if op in (Op.GATHER, Op.REDUCE):
        return {*place, "block"}, {"slice"} if op is not Op.REDUCE else set()
    return ({"block"} if op in (Op.SUM, Op.TIE, Op.SHARE) else set()), set()


Additions = Mapping[int, Sequence[Instruction]]  # by the position in the program they are added to


def insert(program: Program, before: Additions, after: Additions) -> Program:
    """Puts instructions around others, for passes that decide per place."""
    return tuple(
        instruction
        for position, old in enumerate(program)
        for instruction in (*before.get(position, ()), old, *after.get(position, ()))
    )

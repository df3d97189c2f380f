"""Rules about ZeRO 3 on one rank: parameters are there when used, few at once, and freed at the end."""

from __future__ import annotations

from phalanx.program.checks.peaks import Level
from phalanx.program.checks.scope import Scope
from phalanx.program.instructions import Instruction, Op
from phalanx.program.passes.zero import USES_PARAMETERS

MAX_BLOCKS = 2  # the current computation's and the next one's


class GatherRules:
    """`see` and `finish` return what is wrong in words, or nothing."""

    def __init__(self, scope: Scope, rank: int) -> None:
        self._scope = scope
        self._moment = scope.plan.gathers
        self._held = scope.buckets(rank)
        self._there: set[int] = set()
        self._earlier: set[int] = set()
        self.gathered = Level()

    def see(self, instruction: Instruction) -> str:
        if instruction.op is Op.GATHER:
            return self._gather(instruction)
        if instruction.op is Op.FREE:
            return self._free(instruction)
        if self._moment and instruction.op in USES_PARAMETERS:
            assert instruction.block is not None
            for bucket in self._scope.shape.buckets(instruction.block):
                if bucket not in self._there:
                    return f"runs {instruction} while bucket {bucket} is not gathered"
        return ""

    def finish(self) -> str:
        return f"never frees bucket {min(self._there)}" if self._there else ""

    def _gather(self, it: Instruction) -> str:
        assert it.block is not None
        if not self._moment:
            return f"has {it}, but zero={self._scope.plan.zero} leaves every parameter in place"
        if it.block not in self._held:
            return f"has {it}, but holds nothing of bucket {it.block}"
        if it.block in self._there or (self._moment == "step" and it.block in self._earlier):
            return f"gathers bucket {it.block} again with {it}"
        self._there.add(it.block)
        self._earlier.add(it.block)
        self.gathered.add(1)
        num_blocks = sum(bucket < self._scope.shape.num_blocks for bucket in self._there)
        if self._moment == "micro-batch" and num_blocks > MAX_BLOCKS:
            return f"has the parameters of {num_blocks} blocks gathered at {it}, of which {MAX_BLOCKS} are allowed"
        return ""

    def _free(self, it: Instruction) -> str:
        if it.block not in self._there:
            return f"has {it}, but bucket {it.block} is not gathered"
        self._there.remove(it.block)
        self.gathered.add(-1)
        return ""

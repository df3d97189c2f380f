"""Rules about gradients and the update on one rank: everything is added and reduced before it is used, once."""

from __future__ import annotations

from collections import Counter

from phalanx.program.checks.scope import Scope
from phalanx.program.holders import reduced_of, summed_of
from phalanx.program.instructions import Instruction, Op
from phalanx.program.passes.reductions import ADDS_TO_GRADIENTS


class UpdateRules:
    """`see` and `finish` return what is wrong in words, or nothing."""

    def __init__(self, scope: Scope, rank: int) -> None:
        self._scope, plan, shape = scope, scope.plan, scope.shape
        blocks = {block for stage in scope.stages(rank) for block in scope.blocks[stage]}
        self._trained = trained = [bucket for bucket in scope.buckets(rank) if shape.trained[bucket]]
        self._per_micro_batch = plan.reduces == "micro-batch"
        micro_batches = range(scope.num_micro_batches)
        self._to_add = Counter[tuple[int, int]]()
        for bucket in trained:
            for block in blocks.intersection(shape.users(bucket)):
                for i in micro_batches:
                    self._to_add[bucket, i] += self._num_adds(block, i)
        self._due: set[Instruction] = {Instruction(Op.NORM), Instruction(Op.STEP)}
        self._due |= {Instruction(Op.COUNT)} if plan.dp > 1 else set()
        self._due |= {Instruction(Op.TIE, block=bucket) for bucket in scope.tied(rank)}
        self._due |= {Instruction(Op.SHARE, block=bucket) for bucket in trained if plan.zero in (1, 2)}
        moments = micro_batches if self._per_micro_batch else [None]
        pp_index, *_ = scope.mesh.coordinates(rank)
        self._due |= {self._reduction(bucket, i) for bucket in reduced_of(plan, shape, pp_index) for i in moments}
        self._due |= {Instruction(Op.SUM, block=bucket) for bucket in summed_of(plan, shape, pp_index)}

    def _num_adds(self, block: int, micro_batch: int) -> int:
        """Every segment of a block counts as one that adds to all of the block's buckets."""
        num_slices = len(self._scope.slices(micro_batch)) if self._scope.runs_per_slice(block) else 1
        return self._scope.pieces[block].num_segments * len(self._scope.halves) * num_slices

    def see(self, instruction: Instruction) -> str:
        op = instruction.op
        if op in (Op.B, Op.BW) and Instruction(Op.COUNT) in self._due:
            return f"runs {instruction} before COUNT: gradients need the number of items"
        if op in ADDS_TO_GRADIENTS:
            assert instruction.block is not None and instruction.micro_batch is not None
            for bucket in self._scope.shape.buckets(instruction.block):
                self._to_add[bucket, instruction.micro_batch] -= 1
        if op in (Op.REDUCE, Op.SUM, Op.TIE, Op.COUNT, Op.NORM, Op.STEP, Op.SHARE):
            return self._once(instruction) or self._early(instruction)
        return ""

    def finish(self) -> str:
        return f"never runs {min(self._due, key=str)}" if self._due else ""

    def _reduction(self, bucket: int, micro_batch: int | None) -> Instruction:
        """A reduction without the place it stands at, which is free but for its micro-batch."""
        return Instruction(Op.REDUCE, micro_batch=micro_batch if self._per_micro_batch else None, block=bucket)

    def _once(self, it: Instruction) -> str:
        assert it.op is not Op.REDUCE or it.block is not None
        due = self._reduction(it.block or 0, it.micro_batch) if it.op is Op.REDUCE else it
        if due not in self._due:
            return f"has {it} once more than this plan needs"
        self._due.remove(due)
        return ""

    def _early(self, it: Instruction) -> str:
        """What must have happened before this instruction and has not."""
        if it.op is Op.REDUCE:
            return self._unfinished(it, it.block, it.micro_batch if self._per_micro_batch else None)
        if it.op is Op.SUM:
            return self._unfinished(it, it.block, None) or self._not_after(it, (Op.REDUCE,), it.block)
        if it.op is Op.TIE:
            return self._unfinished(it, it.block, None) or self._not_after(it, (Op.REDUCE, Op.SUM), it.block)
        if it.op is Op.NORM:
            return self._unfinished(it, None, None) or self._not_after(it, (Op.REDUCE, Op.SUM, Op.TIE))
        earlier = {Op.STEP: (Op.REDUCE, Op.SUM, Op.TIE, Op.NORM), Op.SHARE: (Op.STEP,), Op.COUNT: ()}
        return self._not_after(it, earlier[it.op])

    def _unfinished(self, it: Instruction, bucket: int | None, micro_batch: int | None) -> str:
        buckets = self._trained if bucket is None else [bucket]
        micro_batches = range(self._scope.num_micro_batches) if micro_batch is None else [micro_batch]
        for other in buckets:
            for i in micro_batches:
                if self._to_add[other, i] > 0:
                    return f"has {it} before micro-batch {i} has added all its gradients to bucket {other}"
        return ""

    def _not_after(self, it: Instruction, ops: tuple[Op, ...], bucket: int | None = None) -> str:
        missing = [due for due in self._due if due.op in ops and bucket in (None, due.block)]
        if not missing:
            return ""
        due = min(missing, key=str)
        return f"has {it} before {f'the reduction of bucket {due.block}' if due.op is Op.REDUCE else due}"

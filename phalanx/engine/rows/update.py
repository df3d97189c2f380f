"""Calls about parameters: gathered, their gradients reduced, the update, and what became of them shared."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from phalanx.engine.gradients import Reduced
from phalanx.engine.linked import (
    Run,
    Values,
)
from phalanx.engine.reductions import StepRun
from phalanx.engine.rows.maker import Linking, Maker, block_of, part_of
from phalanx.params.hosted import Left
from phalanx.program.instructions import Instruction, Op
from phalanx.program.values import HOST


class Update(Maker):
    """What a rank does with its buckets."""

    def __init__(self, linking: Linking) -> None:
        super().__init__(linking)
        self.makers = {
            Op.GATHER: self._gather, Op.REDUCE: self._reduce, Op.SUM: self._sum, Op.TIE: self._sum,
            Op.COUNT: self._count, Op.NORM: self._norm, Op.STEP: self._optimize, Op.SHARE: self._share,
        }  # fmt: skip

    def _gather(self, it: Instruction) -> Run:
        bucket, parameters, zero = block_of(it), self._parts.parameters, self._parts.zero
        return lambda values, step: parameters.gather(bucket, zero)

    def _share(self, it: Instruction) -> Run:
        bucket, parameters, zero = block_of(it), self._parts.parameters, self._parts.zero
        return lambda values, step: parameters.share(bucket, zero)

    def _reduce(self, it: Instruction) -> Run:
        bucket, place = self._parts.gradients[block_of(it)], self._row.writes[-1]
        added = next(i for i, v in self._valued(self._row.reads, "d_parameters"))

        def run(values: Values, step: StepRun) -> None:
            values[place] = bucket.reduce(values[added] or bucket.open())

        return run

    def _sum(self, it: Instruction) -> Run:
        bucket = self._parts.gradients[block_of(it)]
        group, place = bucket.how.replicas if it.op is Op.SUM else bucket.how.tie, self._row.adds[-1]

        def run(values: Values, step: StepRun) -> None:
            there = values[place]
            reduced = there if isinstance(there, Reduced) else bucket.whole(there or bucket.open())
            values[place] = bucket.sum(reduced, group)

        return run

    def _count(self, it: Instruction) -> Run:
        totals, (place,), alone = self._parts.totals, self._row.writes, self._parts.plan.dp == 1
        assert totals is not None

        def run(values: Values, step: StepRun) -> None:
            counted = totals.count(step)
            values[place] = counted.wait("the number of items") if alone else counted

        return run

    def _norm(self, it: Instruction) -> Run:
        totals, (place,) = self._parts.totals, self._row.writes
        losses = [i for i, _ in self._valued(self._row.reads, "loss")]
        sums = self._sums()
        items, left = self._place("items"), [i for i, _ in self._valued(self._row.reads, "norms")]
        assert totals is not None

        def run(values: Values, step: StepRun) -> None:
            gradients: dict[str, Tensor] = {}
            for i in sums:
                gradients |= {} if values[i] is None else values[i].pieces()
            norms = {name: norm for i in left for name, norm in values[i].items()}
            values[place] = totals.norm(step, values[items], [values[i] for i in losses], gradients, norms)

        return run

    def _optimize_part(self, it: Instruction) -> Run:
        totals, hosted, part = self._parts.totals, self._parts.hosted, part_of(it)
        assert totals is not None and hosted is not None
        if not self._parts.plan.steps_on_host:
            return lambda values, step: hosted.step(part, step.gradients, totals.given(step))
        ((place, _),) = self._valued(self._row.reads, f"{HOST}d_parameters")
        bucket = self._parts.parameters.bucket(block_of(it))

        def run(values: Values, step: StepRun) -> None:
            left = values[place]
            assert isinstance(left, Left)
            given_here = partial(totals.given, step)
            bucket.update(hosted.step_behind(part, left, totals.given_on_host(step), given_here))

        return run

    def _optimize(self, it: Instruction) -> Run:
        if it.block is not None:
            return self._optimize_part(it)
        totals, sends = self._parts.totals, self._parts.sends
        assert totals is not None

        def run(values: Values, step: StepRun) -> None:
            totals.step(step)
            sends.settle()

        return run

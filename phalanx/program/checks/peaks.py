"""The most of everything that a rank holds at once, and the most that a schedule promises."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.program.checks.scope import Broken, Scope
from phalanx.program.expand import slices_of
from phalanx.program.schedules.one_f_one_b import NUM_AHEAD, most_held


@dataclass
class Level:
    """How much of something there is, and the most there ever was."""

    now: int = 0
    peak: int = 0

    def add(self, number: int) -> None:
        self.now += number
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Peaks:
    """Slices and halves of micro-batches, where a plan has them, count as micro-batches.

    activations: (stage, micro-batch) pairs whose forward is done and whose B or BW is not. Under 1f1b and zb-h1 stage s
        has at most n + pp - 1 - s of them, n being the most slices of a micro-batch, under eager-1f1b at most
        n + 2 (pp - 1 - s), and twice that with halves; checked.
    weights_pending: pairs whose B is done and whose W is not.
    buffers: messages whose receive is posted and whose computation has not begun.
    gathered: buckets gathered by ZeRO 3."""

    activations: int
    weights_pending: int
    buffers: int
    gathered: int


def check_bound(scope: Scope, rank: int, peaks: Peaks) -> None:
    """Holds 1F1B and its kin to their promise. Others make none, nor does an evaluation, which keeps no activations."""
    plan = scope.plan
    if plan.schedule not in NUM_AHEAD or not scope.training:
        return
    (stage,) = scope.stages(rank)
    most = plan.halves * most_held(plan.schedule, plan.pp, stage, slices_of(plan, scope.num_micro_batches))
    if peaks.activations > most:
        words = f"has {peaks.activations} forwards at once that wait for their backward"
        raise Broken(f"rank {rank} {words}, where schedule={plan.schedule} promises {most} at most", rank)

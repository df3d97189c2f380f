"""How long the model's blocks take here: measured briefly by all ranks of a run that has to choose its plan, and only
what was not measured here before.

Rates of devices say little of small matrices, of work that is launched one by one, and of ranks that share cores. Where
segments are compiled, measuring them would take longer than it tells: there `phalanx profile --model` does it. Blocks
that compute for long are known well enough by rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phalanx.launch.context import RankContext
from phalanx.model.segment.compile import resolve_mode
from phalanx.profile.hardware import BRIEF
from phalanx.profile.model import Size, Subject, measure_joined
from phalanx.profile.segments import Effort
from phalanx.profile.store import Say, Store

SECONDS = 10.0  # after which nothing more is begun
EFFORT = Effort(rounds=1, seconds=0.01, least=1, warm_up=1, beside=1)
_LONGEST = 0.1  # seconds that the forward of a block may take
_DEGREES = (1, 2)  # further ones take their part of the second
_SHARES = (1, 4)  # a replica's samples whole, and a part of them


def measure_blocks(
    context: RankContext, subject: Subject, store: Store | None, sizes: Sequence[Size], say: Say
) -> None:
    """All ranks come here. store, sizes: rank 0's."""
    if resolve_mode(subject.compile, subject.device) == "off":
        measure_joined(context, store, replace(subject, by=BRIEF.by), sizes, EFFORT, SECONDS, say)


def sizes_of(world: int, batch_size: int, heads: int, flops: float, rate: float) -> list[Size]:
    """Micro-batches of plans that give every rank samples. heads: the most ranks that tensors are split over; flops: of
    the largest block's forward on a sample; rate: FLOP/s of a rank."""
    found: list[Size] = []
    if not flops:
        return found  # it only moves what it is given
    for share in _SHARES:
        for degree in _DEGREES:
            if degree == 1 or (world % degree == 0 and heads and heads % degree == 0):
                wanted = max(1, batch_size * degree // world // share)
                found.append(Size(degree, min(wanted, int(_LONGEST * rate * degree / flops))))
    return [size for size in dict.fromkeys(found) if size.samples]

"""Plans for when one or two ranks are lost, with their programs and functions, made between steps while nothing is
wrong.

Fewer ranks have larger parts of a batch, and micro-batches of other sizes need other functions. Making them is nearly
all that going on with fewer ranks takes; made ahead, they are found where they would be put (`Opening.remembered`).
Nothing here decides: which plan is taken after a loss, the ranks that are left find by trying the same plans in the
same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from phalanx.plan.plan import Plan
from phalanx.plan.shrink import leaner, shrunk
from phalanx.session.ahead import functions
from phalanx.training.ready import ReadyRank

_MOST_LOST = 2  # ranks, for which plans are made ahead
_MOST_PLANS, _MOST_LEANER = 64, 32  # that are tried for the ranks that are left; the second where memory is short


def plans_for(plan: Plan, num_ranks: int) -> list[str]:
    """What so many ranks go on with, in the order in which it is tried."""
    if plan.world <= num_ranks:
        return [plan.full_text]
    usual = list(islice(dict.fromkeys(shrunk(plan, num_ranks)), _MOST_PLANS))
    return list(dict.fromkeys([*usual, *islice(leaner(plan, num_ranks), _MOST_LEANER)]))


def made_ahead(ready: ReadyRank, plan: Plan) -> Iterator[Plan]:
    """Each plan that was made for a number that this rank would have in it. One at a time, so that no pause is long."""
    world, rank = ready.context.world, ready.context.rank
    for lost in range(1, min(_MOST_LOST, world - 1) + 1):
        left = world - lost
        numbers = range(max(0, rank - lost), min(rank, left - 1) + 1)
        yield from _made_for(ready, plans_for(plan, left), left, numbers)


def _made_for(ready: ReadyRank, plans: Iterable[str], left: int, numbers: range) -> Iterator[Plan]:
    for text in plans:
        try:
            plan = ready.completed(ready.changes.period, text, left)
            for number in numbers:
                if number < plan.world:
                    _make(ready, plan, number)
                    yield plan
            return
        except Exception:  # it would not do after a loss either; and nothing made ahead may end a run that is sound
            continue


def _make(ready: ReadyRank, plan: Plan, number: int) -> None:
    opening, period = ready.session.opening or ready.opening, ready.changes.period
    compiled = opening.remembered(plan, number)
    for _ in functions(compiled, ready.first_batch(period.batch_size, ready.run.batches)):
        pass
    ready.foresee(compiled)

"""Plans that need less memory than a given one on the same ranks: what could be changed, one or two things at a time;
and the largest batch that a plan has room for.

Which of them fit, and what they cost, is asked of whoever can predict it. Plain data, no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from phalanx.errors import PlanError
from phalanx.plan.complete import balance, with_micro_batches
from phalanx.plan.fields import POLICIES
from phalanx.plan.offload import read_offload, write_offload
from phalanx.plan.plan import Plan
from phalanx.plan.rules import divisors

Change = dict[str, Any]
_MOST_SAMPLES = 1 << 20  # that a batch is tried with


class Needs(NamedTuple):
    """What a step of a plan is predicted to take. memory: of the rank that holds most."""

    memory: int
    seconds: float


class Lighter(NamedTuple):
    change: str  # as plan text
    plan: Plan
    needs: Needs


def lighter_plans(
    plan: Plan, batch_size: int, budget: int, needs: Callable[[Plan], Needs], *, has_host: bool, most: int = 3
) -> tuple[list[Lighter], Lighter | None]:
    """The cheapest plans that fit, quickest first; and of those that were tried the one that needs the least memory.

    Where single changes give enough of them, no two are combined. has_host: whether the host has memory of its own.
    """
    single = [*_changes(plan, batch_size), *(_offloads(plan) if has_host else ())]
    tried = list(_predicted(plan, batch_size, single, needs))
    if sum(own.needs.memory <= budget for own in tried) < most:
        pairs = [one | other for one, other in combinations(single, 2) if not one.keys() & other.keys()]
        tried += _predicted(plan, batch_size, pairs, needs)
    fitting = sorted((own for own in tried if own.needs.memory <= budget), key=lambda own: own.needs.seconds)
    return fitting[:most], min(tried, key=lambda own: own.needs.memory, default=None)


def _predicted(plan: Plan, batch_size: int, changes: list[Change], needs: Callable[[Plan], Needs]) -> Iterator[Lighter]:
    for change in changes:
        try:
            changed = dataclasses.replace(plan, **change)
            with_micro_batches(changed, True, batch_size, {})
            yield Lighter(_text(plan, changed), changed, needs(changed))
        except PlanError:
            continue  # such a plan may not be, for this model or batch


def _text(plan: Plan, changed: Plan) -> str:
    before = {entry.partition("=")[0]: entry for entry in plan.text.split(",")}
    return ",".join(entry for entry in changed.text.split(",") if before.get(entry.partition("=")[0]) != entry)


def _changes(plan: Plan, batch_size: int) -> Iterator[Change]:
    """Each with less to keep than what the plan has."""
    if len(plan.policies) == 1:
        kept = POLICIES.index(plan.policies[0])
        yield from ({"recompute": (policy,)} for policy in POLICIES[kept + 1 :])
    else:
        yield {"recompute": ("block",)}
    part = batch_size // plan.dp
    if not plan.sums_exactly:  # else micro-batches are to stay as they are
        yield from ({"mb": mb} for mb in divisors(part) if mb > plan.mb)
    if plan.dp > 1:
        yield from ({"zero": zero} for zero in range(plan.zero + 1, 4))
    if plan.schedule == "gpipe" and plan.mb > 1 and not plan.slices:
        yield {"schedule": "1f1b"}


def _offloads(plan: Plan) -> Iterator[Change]:
    """Beside what lies on the host already: the optimizer's state before parameters, which then come at every use."""
    there = {word.partition("-")[0] for word, _ in plan.offload}
    for words in ("activations", "optimizer", "optimizer-step", "parameters", "parameters+optimizer-step"):
        if there.isdisjoint(word.partition("-")[0] for word in words.split("+")):
            yield {"offload": write_offload((*plan.offload, *read_offload("offload", words)))}
    if not plan.offload and plan.stages and plan.zero not in (1, 2):
        yield _block_by_block(plan)


def _block_by_block(plan: Plan) -> Change:
    """The least that a device can hold: of the model two blocks, of the batch what is between two blocks."""
    num_blocks = sum(plan.stages)
    v = max(1, num_blocks // plan.pp)
    words = "activations+parameters+optimizer-step"
    return {
        "schedule": "block-major", "v": v, "stages": balance([1.0] * num_blocks, plan.pp * v), "recompute": ("block",),
        "offload": words, "gather": "", "pairs": False,
    }  # fmt: skip


def largest_batch(needs: Callable[[int], int], budget: int, multiple: int = 1) -> int | None:
    """The largest multiple of `multiple` for which `needs` is at most `budget`; None if not even the first is. needs:
    the bytes that a batch takes, which never fall as it grows."""
    if needs(multiple) > budget:
        return None
    fits = 1  # so many multiples do
    while fits * multiple < _MOST_SAMPLES and needs(2 * fits * multiple) <= budget:
        fits *= 2
    too_many = 2 * fits
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if needs(middle * multiple) <= budget:
            fits = middle
        else:
            too_many = middle
    return fits * multiple

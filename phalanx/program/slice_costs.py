"""What a slice of a micro-batch's tokens costs: less than the micro-batch, and more the more tokens came before it.

Derived from expressions for the whole micro-batch, with nothing measured: what the first n tokens cost together is what
the expression says for n of them, so a slice costs what it adds to those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phalanx.errors import PlanError
from phalanx.expressions import evaluate
from phalanx.plan import fields
from phalanx.plan.plan import Plan

TOKENS = "tokens"  # the dim that slices cut

Tokens = tuple[int, int]  # of a slice: the first, and the one after its last
SliceCost = Callable[[int, int, int], float]  # block, micro-batch, slice → part of the time of the whole micro-batch


def num_tokens(plan: Plan, dims: Mapping[str, int]) -> int:
    """The tokens that a plan's slices cut; a PlanError where a model has none."""
    if TOKENS not in dims:
        shown = fields.write({"slices": plan.slices})
        message = f"plan: {shown} cuts tokens, and the model's inputs have none (dims: {', '.join(dims) or 'none'})"
        raise PlanError(message, "leave slices out")
    return dims[TOKENS]


def work_of(expression: str, dims: Mapping[str, int], tokens: Tokens | None) -> float:
    """What an expression over the dims of a micro-batch says for some of its tokens; None: for all of them.

    What does not depend on the tokens (of an encoder's output) is done again for every slice.
    """
    if tokens is None:
        return evaluate(expression, dims)
    start, begin, end = (evaluate(expression, {**dims, TOKENS: number}) for number in (0, *tokens))
    return end - begin + start

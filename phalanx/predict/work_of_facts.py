"""From the facts of a model to what it asks of devices (`planning/work.py`), for samples of a given length.

What blocks keep comes from the facts of the unsplit model, as compilers leave it, where they are shipped or were
described; how much of it tensor parallelism divides follows from what lies between units: of each, what enters it and
what it adds to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from phalanx.expressions import evaluate
from phalanx.model.facts.facts import DTYPE_BYTES, Dims, ModelFacts, fewest_heads
from phalanx.plan.plan import Plan
from phalanx.planning.work import BlockWork, Kept, ModelWork, Unit, merged
from phalanx.predict.from_facts import shipped
from phalanx.predict.split_facts import SplitFacts
from phalanx.predict.update import ADAMW, TrainingBytes, Update
from phalanx.program.shape import ModelShape

Describe = Callable[[Plan], SplitFacts]


def work_of_facts(facts: ModelFacts, dims: Dims, describe: Describe | None = None, update: Update = ADAMW) -> ModelWork:
    """dims: of one batch, whose number of samples does not matter. describe: from the graph, what is not shipped.
    update: as the options of a run."""
    one = {**dims, "batch": 1}
    known = {
        rung: found
        for rung, plan in (("none", Plan()), ("light", Plan(recompute=("light",))))
        if (found := shipped_or(facts, plan, describe)) is not None and (rung == "none" or found.split.recompute)
    }
    shapes, whole = {rung: found.compiled for rung, found in known.items()}, known["none"]
    tied = {name: row.parameters for row in facts.tied for name in row.blocks[1:]}
    blocks = [
        _block(facts, number, one, shapes, tied.get(block.name, 0), whole.learns(number))
        for number, block in enumerate(facts.blocks)
    ]
    classes, places = merged(blocks)
    tokens = facts.tokens_per_sample(one)
    width, heads = DTYPE_BYTES[facts.dtype], fewest_heads(facts.name)
    kept, causal = TrainingBytes.of(facts.dtype, update), facts.task == "causal-lm"
    state = float(kept.master + kept.moments)
    return ModelWork(
        facts.name, classes, places, tokens, facts.num_parameters, width, heads,
        1 - sum(whole.frozen) / facts.num_parameters, state, causal,
    )  # fmt: skip


def shipped_or(facts: ModelFacts, plan: Plan, describe: Describe | None) -> SplitFacts | None:
    found = shipped(facts, plan)
    is_whole = found is not None and found.compiled is not found.eager
    return describe(plan) if describe is not None and not is_whole else found


def _block(
    facts: ModelFacts, number: int, dims: Dims, shapes: dict[str, ModelShape], tied: int, learns: float
) -> BlockWork:
    block = facts.blocks[number]
    before = facts.blocks[number - 1].crossing if number else ()
    entering, leaving = (float(sum(t.bytes(dims) for t in crossing)) for crossing in (before, block.crossing))
    units = tuple(
        Unit(
            unit.parameters, products_and_attention(*(evaluate(unit.flops, own) for own in (dims, longer(dims))))[1] > 0
        )
        for unit in block.units
        if unit.name
    )
    kept = {rung: kept_by(shape, number, dims) for rung, shape in shapes.items()}
    flops = products_and_attention(*(evaluate(block.flops, own) for own in (dims, longer(dims))))
    seen = BlockNumbers(
        block.name, number == 0, *flops, block.parameters, tied, entering, leaving, units, kept,
        *_working(shapes["none"], number, dims), DTYPE_BYTES[facts.dtype], learns,
    )  # fmt: skip
    return block_work(seen)


class BlockNumbers(NamedTuple):
    """A block as it was seen, in numbers of one sample. entering, leaving: bytes of what crosses into it and out of it.
    kept: bytes, where nothing is computed again (`none`) and, if that is known, under `light`. working, fixed: bytes
    that it needs while it runs, of each sample and whatever their number. width: bytes of an element. learns: share of
    its parameters that is trained."""

    name: str
    is_first: bool
    products: float
    attention: float
    parameters: float
    tied: float
    entering: float
    leaving: float
    units: tuple[Unit, ...]
    kept: Mapping[str, float]
    working: float
    fixed: float
    width: int
    learns: float = 1.0


def block_work(seen: BlockNumbers) -> BlockWork:
    """What tensor parallelism divides of it follows from what lies between units."""
    units, entering = len(seen.units), seen.entering
    lies_between = units or int(bool(entering))  # the head, too, norms what enters it
    between = lies_between * entering
    kept = {"none": _divided(seen.kept["none"], between, between)}
    if units and "light" in seen.kept:
        # Where tensors are split, a unit begins with a redistribution, whose result is kept.
        kept["light"] = _divided(seen.kept["light"], 0.0, between)._replace(entries=between)
    if units:
        kept["unit"] = Kept(between, 0.0, between, between)
    kept["block"] = Kept(entering, 0.0, 0.0, entering)
    exchanges = units or int(seen.is_first)  # an embedding that is split by its vocabulary is summed, a head is not
    return BlockWork(
        seen.name, seen.products, seen.attention, seen.parameters, kept, kept["none"], seen.leaving or entering,
        exchanges, units, seen.working, seen.fixed, seen.tied,
        odd=not units and _is_odd(seen.products, entering, seen.width), learns=seen.learns,
        keys=2 * entering / seen.width if units else 0.0, parts=seen.units,
    )  # fmt: skip


def _is_odd(products: float, entering: float, width: int) -> bool:
    """Of a block that is one product, such as a head: whether its vocabulary is no multiple of 8."""
    vocabulary = products * width / (2 * entering) if entering else 0.0
    return vocabulary.is_integer() and vocabulary % 8 != 0


def _divided(total: float, entries: float, rest: float) -> Kept:
    entries, rest = min(entries, total / 2), min(rest, total / 2)
    return Kept(total, total - entries - rest, entries, rest)


def kept_by(shape: ModelShape, number: int, dims: Dims) -> float:
    """With the activations that its backward reads, which stay for it."""
    chain = [op for op in shape.ops_of(number) if op.kind == "segment"]
    reads = {name for op in chain for name in (*op.bw.reads, *op.bw.w_reads)}
    whole = {**dims, "whole_tokens": dims.get("tokens", 0)}
    own = sum(evaluate(text or "0", whole) for op in chain for text in (op.bw.saved_b, op.bw.saved_bw))
    return own + sum(evaluate(shape.sizes.get(name) or "0", whole) for name in reads)


def _working(shape: ModelShape, number: int, dims: Dims) -> tuple[float, float]:
    """Bytes for each sample, and whatever their number: a line through two numbers of samples. What is computed of
    weight gradients is among them, and their sums are not."""

    def needed(samples: int) -> float:
        own = {**dims, "batch": samples, "whole_tokens": dims.get("tokens", 0)}
        chain = [op for op in shape.ops_of(number) if op.kind == "segment"]
        return max((evaluate(text, own) for op in chain for text in op.working), default=0)

    one, two = needed(1), needed(2)
    return two - one, 2 * one - two


def longer(dims: Dims) -> dict[str, int]:
    """Samples twice as long."""
    return {dim: size * (1 if dim == "batch" else 2) for dim, size in dims.items()}


def products_and_attention(once: float, twice: float) -> tuple[float, float]:
    """Of FLOPs, what is linear in the tokens, and what is quadratic in them: attention. twice: of longer samples."""
    attention = max(0.0, (twice - 2 * once) / 2)
    return once - attention, attention

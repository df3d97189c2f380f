"""Bytes that a rank needs for a plan, by what holds them: weights, gradients, optimizer state, activations, and what is
at work. Arithmetic on a model's work; `predict/memory.py` follows every value of a program and is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from phalanx.plan.plan import CHUNK, Plan
from phalanx.planning.work import BlockWork, Kept, ModelWork

HELD_BACK = 1.75  # of a micro-batch's activations, what waits for its weight gradients
IN_V = 1.35  # times a micro-batch's activations, what one takes under ZB-V
MOVING = 3  # layers whose activations are on the device while those of all lie on the host: leaving, at work, coming
HOLDING_BACK = ("zb-h1", "zb-v")  # weight gradients, beside what they need
STAGED = 3  # parts of state that are on the device while all of it lies on the host: coming, updated, leaving
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "working")


def place_blocks(plan: Plan, place: int) -> list[int]:
    """The blocks that a place in the pipeline holds."""
    return [block for stage in plan.stages_of(place) for block in plan.stage_blocks(stage)]


def parameters_of(model: ModelWork, blocks: Sequence[int]) -> float:
    """Elements, tied ones once where several of their blocks are here."""
    return sum(untied_of(model, blocks))


def untied_of(model: ModelWork, blocks: Sequence[int]) -> list[float]:
    """Elements of each; what a head shares is the embedding's, and counts where the backward comes first."""
    shared = sum(model.block(block).tied for block in blocks)
    return [model.block(block).parameters - (shared if block == 0 else 0.0) for block in blocks]


def kept_bytes(kept: Kept, plan: Plan) -> float:
    """Of one sample on one rank."""
    if plan.tp == 1:
        return kept.alone
    if not plan.sequence:
        return kept.split / plan.tp + kept.entries + kept.rest
    entries = kept.entries / (plan.tp if plan.saves == "input" else 1)
    return kept.split / plan.tp + entries + kept.rest / plan.tp


class Largest(NamedTuple):
    """Parameters of the largest block of a place, and of the two neighbours that have most together."""

    block: float
    pair: float


def largest_of(works: Sequence[BlockWork]) -> Largest:
    """A block that is no layer stands beside one, where there is any."""
    most = max(work.parameters for work in works)
    return Largest(most, most + max((work.parameters for work in works if work.is_layer), default=most))


class Widths(NamedTuple):
    """Bytes for each of a rank's parameters: during the whole step, and only while their block is one of two at work.
    hosted: in the memory of its host. single: of the gradients, those that a block's backward leaves in the place of
    what was kept for it, as that of a single micro-batch does; sums of several are there from the first to the last."""

    weights: float
    gathered: float
    gradients: float
    reduced: float
    optimizer: float
    hosted: float
    single: float

    def state(self, parameters: float, largest: Largest) -> dict[str, float]:
        """Of a place with so many parameters."""
        at_work = min(parameters, largest.pair)
        return {
            "weights": self.weights * parameters + self.gathered * at_work,
            "gradients": self.gradients * parameters + self.reduced * at_work,
            "optimizer": self.optimizer * parameters,
        }

    def total(self, parameters: float, largest: Largest) -> float:
        """Of the state on the device."""
        at_work = min(parameters, largest.pair)
        always = self.weights + self.gradients + self.optimizer
        return always * parameters + (self.gathered + self.reduced) * at_work


def state_widths(model: ModelWork, plan: Plan, gradient: float = 4.0) -> Widths:
    """gradient: bytes of a parameter's sum; where nothing is added up, it is as wide as the parameter."""
    width, tp, shards = model.width, plan.tp, plan.shards
    state = model.trained * model.state_width / tp / (shards if plan.zero else 1)
    weights, gathered = width / tp, 0.0
    single = width if not plan.adds_gradients else plan.sum_bytes(max(gradient, width))
    gradients, reduced = model.trained * single / tp, 0.0
    hosted, fetched = hosted_share(model, plan), fetched_share(model, plan)
    on_host = (fetched * weights + (hosted if plan.steps_on_host else fetched) * gradients) / shards + hosted * state
    if plan.zero == 3:
        always = plan.gathers == "step"
        weights, gathered = weights / shards + (weights if always else 0.0), 0.0 if always else weights
    elif fetched:
        gathered = weights
    if plan.zero >= 2 and plan.reduces == "micro-batch":
        gradients, reduced = gradients / shards, gradients
    elif fetched and leaves_block_by_block(plan):
        reduced = gradients
    if leaves_block_by_block(plan):
        gradients *= 1 - fetched
    is_single = not plan.adds_gradients and plan.schedule not in HOLDING_BACK
    return Widths(
        (1 - fetched) * weights, gathered, gradients, reduced, (1 - hosted) * state, on_host,
        gradients if is_single else 0.0,
    )  # fmt: skip


def leaves_block_by_block(plan: Plan) -> bool:
    """Whether a block's gradients are complete, and may leave for the host, before those of the next are begun."""
    return plan.mb == 1 or plan.schedule == "block-major"


def fetched_share(model: ModelWork, plan: Plan) -> float:
    """Of the parameters of an average place, those that lie on the host and come for each use."""
    count = dict(plan.offload).get("parameters")
    if not count or not model.layers:
        return 0.0 if count is None else 1.0
    in_layers = sum(model.block(block).parameters for block in model.layers) / model.num_parameters
    return min(1.0, count * plan.pp / len(model.layers)) * min(1.0, in_layers)


def hosted_share(model: ModelWork, plan: Plan) -> float:
    """Of the elements, those whose optimizer state lies on the host: where parameters lie there, so does it."""
    stays = (1 - plan.hosted_share) * (1 - fetched_share(model, plan))
    return 1 - stays


def again_bytes(work: BlockWork, rung: str, plan: Plan) -> float:
    """What a sample needs more while its block is computed again."""
    if rung in ("none", "light"):
        return 0.0
    whole = kept_bytes(work.kept["none"], plan) - kept_bytes(work.kept[rung], plan)
    return 0.75 * whole if rung == "unit" else whole  # of two units the larger


def working_bytes(
    work: BlockWork, rung: str, plan: Plan, samples: float, moved: float = 0.0, logits: float = 0.0
) -> float:
    """While a block is at work, beside all that is kept: also the gradients of what enters and leaves it. moved: of
    what it keeps, the share that lies on the host in between. logits: bytes of each that every rank has whole."""
    own = (work.working / plan.tp + again_bytes(work, rung, plan) + 2 * work.crossing) * samples / most_slices(plan)
    if plan.schedule == "block-major":  # all micro-batches wait between two blocks
        own += (plan.mb - 1) * work.crossing * samples
    moving = MOVING * kept_bytes(work.kept[rung], plan) * samples if moved and work.is_layer else 0.0
    whole = logits * work.logits * samples * (1 - 1 / plan.tp)
    return own + moving + work.fixed / plan.tp + whole


def past_bytes(work: BlockWork, plan: Plan, samples: float) -> float:
    """Where tokens are cut: keys and values of two micro-batches under way in 16 bits, and sums of their gradients."""
    return (2 * 2 + 4) * work.keys * samples / plan.tp if plan.slices else 0.0


def kept_here(work: BlockWork, rung: str, plan: Plan, samples: float, moved: float = 0.0) -> float:
    """Of a micro-batch, on the device. moved: the share that lies on the host in between."""
    return kept_bytes(work.kept[rung], plan) * samples * (1 - moved)


def most_slices(plan: Plan) -> int:
    return max(map(len, plan.slices)) if plan.slices else 1


def moved_share(plan: Plan, num_layers: int) -> float:
    """Of what the layers of a place in the pipeline keep, what lies on the host in between."""
    count = dict(plan.offload).get("activations")
    if count is None or not num_layers:
        return 0.0
    return min(1.0, count * plan.v / num_layers) if count else 1.0


def num_held(plan: Plan, place: int) -> float:
    """The most micro-batches whose activations a rank holds at once, each of all its stages. Where they are cut into
    slices, parts of them."""
    return held_by(plan.schedule, plan.pp, plan.mb, plan.v, most_slices(plan), place)


def held_by(schedule: str, pp: int, mb: int, v: int, parts: int, place: int) -> float:
    """The same, of a schedule with so many micro-batches in so many parts."""
    ahead = pp - 1 - place
    match schedule:
        case "gpipe" | "block-major":
            held = mb
        case "eager-1f1b":
            held = 1 + 2 * ahead / parts
        case "interleaved":
            first = mb if mb < 2 * pp else pp + mb % pp // (mb // pp)
            held = ((v - 1) * first + 2 * ahead + 1) / v
        case "zb-h1":
            # A stage holds weight gradients back by its place, with what they need and gradients beside that.
            return min(mb, 1 + ahead / parts) + HELD_BACK * min(mb, place / parts)
        case "zb-v":
            # Pieces of half a rank's stages are open until their weight gradients, with gradients beside them.
            return IN_V * min(mb, pp)
        case _:
            held = 1 + ahead / parts
    return min(mb, held)


def memory(
    model: ModelWork, plan: Plan, place: int, samples: int, rungs: Sequence[str], gradient: float = 4.0,
    logits: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """At the moment at which a rank holds most. rungs: of every block of the model. gradient, logits: bytes, as of
    `Software`.

    While a block is at work, what later blocks of its place kept for the same micro-batch is gone already: an
    embedding needs most when little else is there. Where gradients are not added up, only those of later blocks are
    there."""
    blocks = place_blocks(plan, place)
    moved = moved_share(plan, sum(model.block(block).is_layer for block in blocks))
    shares = [moved if model.block(block).is_layer else 0.0 for block in blocks]
    kept = [
        kept_here(model.block(block), rungs[block], plan, samples, share)
        for block, share in zip(blocks, shares, strict=True)
    ]
    widths, parameters = state_widths(model, plan, gradient), parameters_of(model, blocks)
    to_come = accumulate(-widths.single * elements for elements in untied_of(model, blocks))
    others = (num_held(plan, place) - 1) * sum(kept)
    moments = [
        (others + so_far, working_bytes(model.block(block), rungs[block], plan, samples, share, logits), less)
        for block, so_far, less, share in zip(blocks, accumulate(kept), to_come, shares, strict=True)
    ]
    held, working, less = max(moments, key=sum)
    held += sum(past_bytes(model.block(block), plan, samples) for block in blocks)
    largest = largest_of([model.block(block) for block in blocks])
    state = widths.state(parameters, largest)
    state["gradients"] += less
    needed = {**state, "activations": held, "working": working}
    updating = widths.total(parameters, Largest(0.0, 0.0)) + staged_bytes(model, plan, gradient)
    return needed | {"working": working + max(0.0, updating - sum(needed.values()))}


def staged_bytes(model: ModelWork, plan: Plan, gradient: float = 4.0) -> float:
    """What comes from the host while the optimizer's state that lies there is updated on the device: in parts as large
    as a layer, with gradients where parameters lie there too."""
    if not plan.offload or not model.layers or plan.steps_on_host or not hosted_share(model, plan):
        return 0.0
    part = min(CHUNK, model.block(model.layers[0]).parameters / plan.tp / plan.shards)
    beside = max(gradient, model.width) if fetched_share(model, plan) else 0.0
    return STAGED * model.trained * (model.state_width + beside) * part


def host_bytes(
    model: ModelWork, plan: Plan, place: int, samples: int, rungs: Sequence[str], gradient: float = 4.0
) -> float:  # fmt: skip
    """What a rank keeps in the memory of its host."""
    if not plan.offload:
        return 0.0
    blocks = place_blocks(plan, place)
    layers = [block for block in blocks if model.block(block).is_layer]
    moved = moved_share(plan, len(layers))
    kept = sum(kept_here(model.block(block), rungs[block], plan, samples) for block in layers) if moved else 0.0
    state = state_widths(model, plan, gradient).hosted * parameters_of(model, blocks)
    return moved * num_held(plan, place) * kept + state

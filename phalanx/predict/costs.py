"""What the simulator must know of a model and its devices: seconds, bytes and links, as plain numbers.

Where the numbers come from is not known here: `from_facts.py` derives them from a model and an assumed device,
measurements fill in the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from phalanx.errors import PlanError
from phalanx.expressions import evaluate
from phalanx.plan import fields
from phalanx.plan.plan import Plan
from phalanx.predict.contention import ALONE, Contention
from phalanx.program.instructions import Instruction, Op
from phalanx.program.shape import ModelShape

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


Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """What connects ranks. The default is a link that costs nothing."""

    latency_s: float = 0.0
    bytes_per_s: float = inf

    def send(self, size: float) -> float:
        return self.latency_s + size / self.bytes_per_s

    def gather(self, size: float, num_ranks: int) -> float:
        """All ranks of a ring end up with all of `size` bytes, of which each had an equal part (or scatter-reduced)."""
        return (num_ranks - 1) * self.send(size / num_ranks)

    def reduce(self, size: float, num_ranks: int) -> float:
        """All ranks of a ring end up with the sum of everyone's `size` bytes: each part is reduced, then gathered."""
        return 2 * self.gather(size, num_ranks)


Curve = tuple[tuple[float, float], ...]  # sizes in bytes, rising, and the seconds that were measured of each


def seconds_at(curve: Curve, size: float) -> float:
    """Between sizes that were measured on a straight line, which goes on beyond the last; what is smaller than the
    first takes as long."""
    place = next((i for i, (known, _) in enumerate(curve) if known >= size), len(curve) - 1)
    if place == 0:
        return curve[0][1]
    (less, before), (more, after) = curve[place - 1 : place + 1]
    return before + (after - before) * (size - less) / (more - less)


@dataclass(frozen=True)
class BucketCosts:
    """One bucket of parameters as a whole; ranks that shard it hold, or work on, their part of it. frozen_bytes: of its
    weights, those that are not trained."""

    weight_bytes: int = 0
    gradient_bytes: int = 0
    master_bytes: int = 0
    moment_bytes: int = 0
    step_seconds: float = 0.0
    host_step_seconds: float = 0.0  # where the host updates it
    frozen_bytes: int = 0

    @property
    def trained_bytes(self) -> int:
        return self.weight_bytes - self.frozen_bytes


@dataclass(frozen=True)
class Measured:
    """What instructions took in steps that ran, by `kind_of` them, for each place in the pipeline.

    own: of the rank's own time, without waiting. moving: of a collective or a message (by the one that receives it)
    from when all that take part had issued it until it was there.
    """

    own: tuple[Mapping[str, float], ...]
    moving: tuple[Mapping[str, float], ...]


def kind_of(it: Instruction) -> str:
    """Instructions of one kind take equally long: those that differ in their micro-batch, unless slices cut it."""
    first = 0 if it.micro_batch is not None and it.slice is None else it.micro_batch
    return str(it._replace(micro_batch=first, peer=None))


@dataclass(frozen=True)
class Costs:
    """Costs of one micro-batch on one rank, per block, and of parameters, per bucket.

    backward: gradients of inputs; weight: gradients of weights. What is computed again takes as long as the forward.
    host_link: between a device and the memory of its host, each way by itself.
    links: single links, by the two ranks of a message or the ranks of a group; all others are the default ones.
    transfers: of collectives by their names and numbers of ranks, of messages as ("send", 2), what sizes took where
        that was measured; before the default links, behind single ones.
    issue_seconds: what starting to send or receive a message takes of the rank's own time, start_seconds, what starting
        a redistribution does; input_seconds, what getting a micro-batch ready does, and step_seconds what a step takes
        besides its program. meeting_seconds: by their number, what ranks lose at a redistribution that all of them wait
        for, to which they do not come at the same time.
    dims: of a micro-batch, for the expressions in the ops of a block. element_bytes: of what redistributions send.
    slice_cost: the part of a block's seconds that a slice of a micro-batch takes, by what was measured or derived; the
        parts may add up to more than 1. None: by the arithmetic of the block's ops, or where
        it has none by the number of tokens.
    segments: seconds of ops of blocks where they were measured one by one: what is done, block, op; of a micro-batch
        or, where it is cut in two, a half. Of what is not there, a share of the block's.
    measured: seconds that stand before all of these.
    contention: how fast all of this gets on beside other things; the seconds here are those alone.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    buckets: tuple[BucketCosts, ...]
    message_link: Link = Link()
    group_link: Link = Link()
    host_link: Link = Link()
    links: Mapping[Ranks, Link] = field(default_factory=dict[Ranks, Link])
    transfers: Mapping[tuple[str, int], Curve] = field(default_factory=dict[tuple[str, int], Curve])
    issue_seconds: float = 0.0
    start_seconds: float = 0.0
    input_seconds: float = 0.0
    step_seconds: float = 0.0
    meeting_seconds: Mapping[int, float] = field(default_factory=dict[int, float])
    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    element_bytes: int = 4
    slice_cost: SliceCost | None = None
    segments: Mapping[tuple[Op, int, int], float] = field(default_factory=dict[tuple[Op, int, int], float])
    measured: Measured | None = None
    contention: Contention = ALONE

    def seconds(self, op: Op, block: int) -> float:
        """How long a computation of a whole block takes."""
        match op:
            case Op.F | Op.A:
                return self.forward[block]
            case Op.B:
                return self.backward[block]
            case Op.W:
                return self.weight[block]
            case _:
                assert op == Op.BW, f"{op} is not a computation"
                return self.backward[block] + self.weight[block]

    def message(self, source: int, target: int, size: float) -> float:
        curve = self.transfers.get(("send", 2))
        if curve and (source, target) not in self.links:
            return seconds_at(curve, size)
        return self.links.get((source, target), self.message_link).send(size)

    def collective(self, kind: str, ranks: Ranks, size: float) -> float:
        """size: bytes of the whole tensor that is reduced, gathered or scattered."""
        curve = self.transfers.get((kind, len(ranks)))
        if curve and ranks not in self.links:
            return seconds_at(curve, size)
        link = self.links.get(ranks, self.group_link)
        return (link.reduce if kind == "all_reduce" else link.gather)(size, len(ranks))


def uniform(shape: ModelShape, f: float = 1.0, b: float = 1.0, w: float = 1.0, send: float = 0.0) -> Costs:
    """Every block takes f, b and w, every message `send`, and everything else nothing."""
    n = shape.num_blocks
    return Costs(
        forward=(f,) * n,
        backward=(b,) * n,
        weight=(w,) * n,
        buckets=(BucketCosts(),) * shape.num_buckets,
        message_link=Link(latency_s=send),
    )

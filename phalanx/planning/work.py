"""What a model asks of devices, as numbers of one sample of a given length: arithmetic, what is kept and moved,
parameters, what ranks exchange. Blocks that ask for the same are of one class, of which there are few.

Nothing here belongs to a device or a plan. `predict/work_of_facts.py` makes it from a model's facts, `transformer` from
the shape of a model of which no more is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple


class BlockTime(NamedTuple):
    """Of one micro-batch of so many samples. backward: gradients of inputs; weight: what those of weights add to it."""

    samples: float
    forward: float
    backward: float
    weight: float


Times = Mapping[int, tuple[BlockTime, ...]]  # by tensor-parallel degree; samples rise


def seconds_at(known: Sequence[BlockTime], samples: float) -> tuple[float, float, float]:
    """On straight lines between numbers of samples that were measured; beyond the last in proportion to it, before the
    first as long as that."""
    first, last = known[0], known[-1]
    if samples <= first.samples:
        return first[1:]
    if samples >= last.samples:
        forward, backward, weight = (seconds * samples / last.samples for seconds in last[1:])
        return forward, backward, weight
    place = next(i for i, own in enumerate(known) if own.samples >= samples)
    less, more = known[place - 1], known[place]
    share = (samples - less.samples) / (more.samples - less.samples)
    forward, backward, weight = (a + share * (b - a) for a, b in zip(less[1:], more[1:], strict=True))
    return forward, backward, weight


def at_degree(times: Times, degree: int, samples: float) -> tuple[float, float, float]:
    """At a degree that was not measured: in proportion to the nearest below it that was, or the lowest of all."""
    nearest = max((own for own in times if own <= degree), default=min(times))
    forward, backward, weight = (nearest / degree * own for own in seconds_at(times[nearest], samples))
    return forward, backward, weight


def _learning(times: Times, share: float) -> Times:
    """Of a block of which only a share is trained: of the rest there are no weight gradients."""
    return {degree: tuple(own._replace(weight=share * own.weight) for own in known) for degree, known in times.items()}


RUNGS = ("none", "light", "unit", "block")  # what is computed again, as a plan says it: each keeps less than the last


class Kept(NamedTuple):
    """Bytes that a sample keeps for the backward. alone: on a rank that splits nothing. Otherwise split: what tensor
    parallelism divides; entries: what enters units, which is gathered whole even where tokens are split; rest: what
    lies between units, the same on every rank unless tokens are split."""

    alone: float
    split: float = 0.0
    entries: float = 0.0
    rest: float = 0.0


def kept(split: float, entries: float, rest: float) -> Kept:
    """The same with and without tensor parallelism."""
    return Kept(split + entries + rest, split, entries, rest)


class Unit(NamedTuple):
    """A unit of a block. parameters: elements. attends: whether its heads limit the ranks that it can be split over."""

    parameters: float
    attends: bool = False


class Exchange(NamedTuple):
    """Ranks that exchange something, each `stride` behind the last, and bytes of what each of them has of a sample
    afterwards."""

    ranks: int
    stride: int
    size: float


class Copied(NamedTuple):
    """Parameters of which several groups among the tensor-parallel ranks have the same. elements: counted once for each
    of these groups."""

    copies: int
    elements: float


@dataclass(frozen=True)
class BlockWork:
    """A class of blocks.

    products, attention: forward FLOPs, linear and quadratic in the tokens. parameters: elements, and `tied` of them
    are those of another block too. kept: by rung, of those it can have. moved: bytes that element-wise work goes over.
    exchanges: sums over tensor-parallel ranks in a forward, each of a tensor of `crossing` bytes, which is also what is
    sent to the next block. working: bytes that it needs while it runs, of each sample and (fixed) whatever their
    number; tensor parallelism divides both. units: with their own recompute. scores: bytes that attention moves which
    is not computed in one go. odd: a side of its products is not a multiple of 8, which tensor cores are slow with.
    keys: elements of its keys and values; where that is not known, as many as there can be. times: what it was seen to
    take on the device that is planned for. head_dim: elements of a head, where its scores are products by themselves;
    logits: that a head puts out; 0 where that is not known. apart: of its attention, so many times the kernels of a
    unit that are started one by one. parts: its units one by one, where they are known. learns: of its parameters, the
    share that is trained; of the others' products there are no weight gradients.

    Of a block whose units a plan splits over fewer than all tensor-parallel ranks (`degrees.py`), further: sums, moves:
    what its ranks exchange instead of `exchanges`, sums in a forward and gathered samples or tokens in a forward and
    its backward. copied: parameters that several groups of ranks have. side: of its matrices, times the ranks."""

    name: str
    products: float
    attention: float
    parameters: float
    kept: Mapping[str, Kept]
    moved: Kept
    crossing: float
    exchanges: int = 0
    units: int = 0
    working: float = 0.0
    fixed: float = 0.0
    tied: float = 0.0
    scores: float = 0.0
    odd: bool = False
    keys: float = 0.0
    times: Times = field(default_factory=dict[int, tuple[BlockTime, ...]])
    head_dim: float = 0.0
    logits: float = 0.0
    apart: float = 0.0
    parts: tuple[Unit, ...] = ()
    learns: float = 1.0
    sums: tuple[Exchange, ...] = ()
    moves: tuple[Exchange, ...] = ()
    copied: tuple[Copied, ...] = ()
    side: float = 0.0

    @property
    def is_layer(self) -> bool:
        return self.units > 0


@dataclass(frozen=True)
class ModelWork:
    """blocks: of each the place of its class. width: bytes of a weight. tokens: of a sample. heads: the most ranks that
    its attention can be split over; 0 where that is not known. trained: share of the parameters that learn. state:
    bytes that the optimizer keeps for each of those; None: two moments, and masters of weights below 32 bits. causal:
    no token sees later ones, so that tokens may be cut into slices."""

    name: str
    classes: tuple[BlockWork, ...]
    blocks: tuple[int, ...]
    tokens: int
    num_parameters: int
    width: int = 2
    heads: int = 0
    trained: float = 1.0
    state: float | None = None
    causal: bool = False

    @cached_property
    def state_width(self) -> float:
        """Bytes of optimizer state for each parameter that is trained."""
        wide = max(4, self.width)
        return self.state if self.state is not None else 2 * wide + (wide if self.width < wide else 0)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The blocks that a plan may give something one by one."""
        return tuple(i for i, place in enumerate(self.blocks) if self.classes[place].is_layer)

    @cached_property
    def flops(self) -> float:
        """Of training one sample, without anything computed again."""
        every = [self.classes[place] for place in self.blocks]
        return sum((2 + own.learns) * own.products + 3 * own.attention for own in every)

    def timed(self, times: Mapping[str, Times]) -> ModelWork:
        """With what blocks were seen to take, by the name of the first one of a class."""
        return replace(self, classes=tuple(replace(own, times=times.get(own.name, {})) for own in self.classes))

    def measured(self, times: Mapping[str, Times]) -> ModelWork:
        """The same, where blocks were measured as if all of them were trained."""
        learn = {own.name: own.learns for own in self.classes}
        return self.timed({name: _learning(own, learn.get(name, 1.0)) for name, own in times.items()})

    def block(self, index: int) -> BlockWork:
        return self.classes[self.blocks[index]]

    def counts(self, blocks: range) -> tuple[int, ...]:
        """How many of each class are among consecutive blocks."""
        own = self.blocks[blocks.start : blocks.stop]
        return tuple(own.count(place) for place in range(len(self.classes)))


class Shape(NamedTuple):
    """A decoder as papers describe it. gated: three products in the feed-forward. attention: `flash` keeps no scores,
    `fused` and `unfused` keep and move them. fused_norms: a norm leaves nothing but its result."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    tokens: int
    gated: bool = False
    attention: str = "flash"
    fused_norms: bool = True
    dropout: bool = False
    tied: bool = True


_SCORE_BYTES = {"flash": 0.0, "flash1": 0.0, "fused": 2.0, "unfused": 5.0}  # kept for every score
_SCORE_MOVES = {"flash": 0.0, "flash1": 0.0, "fused": 8.0, "unfused": 24.0}  # moved for every score
_DROPPED = 5.0  # more, where some are dropped: read, written, and a mask
_SCORE_WORK = {"flash": 0.0, "flash1": 0.0, "fused": 4.0, "unfused": 12.0}  # needed besides, while it is computed
_UNFUSED = 1.0  # casts, scaling, mask and softmax, and their gradients: about as many kernels again as a unit has
# The first flash attention took so much longer (Dao 2023); those that keep scores compute also what is masked.
_SLOWER = {"flash1": 1.7, "fused": 2.0, "unfused": 2.0}


def transformer(name: str, shape: Shape, width: int = 2) -> ModelWork:
    """Of embedding, equal layers and a head with the loss."""
    h, s, f = shape.hidden, shape.tokens, shape.ffn
    keys = h * shape.kv_heads // shape.heads
    attention_parameters, ffn_parameters = 2 * h * h + 2 * h * keys, (3 if shape.gated else 2) * h * f
    parameters = attention_parameters + ffn_parameters + 4 * h
    scores = shape.heads * s * s
    moves = _SCORE_MOVES[shape.attention] + (_DROPPED if shape.dropout and _SCORE_MOVES[shape.attention] else 0.0)
    layer = BlockWork(
        "layer", 2.0 * s * (attention_parameters + ffn_parameters),
        2.0 * s * s * h * _SLOWER.get(shape.attention, 1.0), parameters,
        _kept_of_layer(shape, width), _moved_by_layer(shape, width), width * s * h, exchanges=2, units=2,
        working=4.0 * s * f + _SCORE_WORK[shape.attention] * scores, scores=moves * scores,
        keys=2.0 * s * keys, head_dim=h / shape.heads if moves else 0.0,
        apart=_UNFUSED if shape.attention == "unfused" else 0.0,
        parts=(Unit(attention_parameters + 2 * h, attends=True), Unit(ffn_parameters + 2 * h)),
    )  # fmt: skip
    vocabulary = shape.vocabulary * h
    token = kept(8.0 * s, 0, 0)
    embedding = BlockWork("embedding", 0, 0, vocabulary, dict.fromkeys(RUNGS, token), kept(0, 0, 2.0 * width * s * h),
                          width * s * h, exchanges=1)  # fmt: skip
    logits = kept((4.0 + width) * s * shape.vocabulary, width * s * h, width * s * h)
    head = BlockWork(
        "head", 2.0 * s * vocabulary, 0, vocabulary + h, {"none": logits, "block": kept(0, 0, width * s * h)},
        kept(16.0 * s * shape.vocabulary, width * s * h, width * s * h), width * s * h,
        working=4.0 * s * shape.vocabulary,
        tied=vocabulary if shape.tied else 0, odd=shape.vocabulary % 8 != 0, logits=s * shape.vocabulary,
    )  # fmt: skip
    total = shape.layers * parameters + (1 if shape.tied else 2) * vocabulary + h
    blocks = (0, *(1,) * shape.layers, 2)
    return ModelWork(name, (embedding, layer, head), blocks, s, int(total), width, shape.heads, causal=True)


def _kept_of_layer(shape: Shape, width: int) -> dict[str, Kept]:
    h, s, f = shape.hidden, shape.tokens, shape.ffn
    keys = h * shape.kv_heads // shape.heads
    scores = _SCORE_BYTES[shape.attention] * shape.heads * s * s
    products = width * s * (2 * h + 2 * keys + (2 if shape.gated else 1) * f) + 4.0 * shape.heads * s
    activated = width * s * f * (1 if shape.fused_norms else 2 if shape.gated else 1)
    entry, residual = width * s * h, width * s * h
    norms = 0 if shape.fused_norms else 2 * s * h * (4 + width)
    masks = 2 * s * h if shape.dropout else 0
    return {
        "none": kept(products + activated + scores, 2 * entry, 2 * residual + norms + masks),
        "light": Kept(products + 2 * residual, products, 2 * entry, 2 * residual),
        "unit": Kept(2 * residual, 0, 2 * entry, 2 * residual),
        "block": kept(0, 0, residual),
    }


def _moved_by_layer(shape: Shape, width: int) -> Kept:
    h, s, f = shape.hidden, shape.tokens, shape.ffn
    norms = 4 * width * s * h * (1 if shape.fused_norms else 4)
    rotary = (4 if shape.fused_norms else 12) * width * s * h if shape.gated else 0
    return kept(3.0 * width * s * f + rotary, 0, norms + 6.0 * width * s * h)


def merged(classes: Sequence[BlockWork]) -> tuple[tuple[BlockWork, ...], tuple[int, ...]]:
    """Of one for each block: those that differ in more than their name, and the place of each block's."""
    found: list[BlockWork] = []
    places: list[int] = []
    for own in classes:
        alike = [i for i, other in enumerate(found) if replace(own, name=other.name) == other]
        if not alike:
            found.append(own)
        places.append(alike[0] if alike else len(found) - 1)
    return tuple(found), tuple(places)

"""Costs of a plan from what was measured of the model's segments, of transfers and of what they do to each other.

Everything was measured apart from the plan that is predicted. Segments, and what a step takes besides, were measured
while all ranks computed, as in training; here they become the seconds of a rank alone, which the simulation slows
again by what runs beside it. Plain data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.planning.work import BlockTime, Times
from phalanx.predict.contention import Contention, Speeds, Work
from phalanx.predict.costs import Costs, Curve, Link, Ranks
from phalanx.program.instructions import Op

Key = tuple[int, int]  # a block, and an op of it


@dataclass(frozen=True)
class SegmentSeconds:
    """together: of input and weight gradients at once."""

    forward: float
    backward: float
    weight: float
    together: float


@dataclass(frozen=True)
class RankProfile:
    """What ranks were seen to do. update: seconds of an element in the optimizer, with its norm. input, step: of a
    micro-batch and of a step besides their computations. issue, start: of starting a message, and a sum over ranks.
    meeting, transfers, links: as of `Costs`. beside: as of `Contention`."""

    update: float = 0.0
    input: float = 0.0
    step: float = 0.0
    issue: float = 0.0
    start: float = 0.0
    meeting: Mapping[int, float] = field(default_factory=dict[int, float])
    transfers: Mapping[tuple[str, int], Curve] = field(default_factory=dict[tuple[str, int], Curve])
    links: Mapping[Ranks, Link] = field(default_factory=dict[Ranks, Link])
    beside: Mapping[tuple[Work, Work], Speeds] = field(default_factory=dict[tuple[Work, Work], Speeds])

    def crowded(self, ranks: int) -> float:
        """How fast a rank computes while all of these do, as a share of its speed alone."""
        speeds = self.beside.get((Work.COMPUTE, Work.COMPUTE), ())
        return speeds[min(ranks - 1, len(speeds)) - 1] if speeds and ranks > 1 else 1.0


def profiled(
    assumed: Costs, segments: Mapping[Key, SegmentSeconds], elements: Sequence[int], known: RankProfile,
    devices: Sequence[int], nodes: Sequence[int] = (),
) -> Costs:  # fmt: skip
    """assumed: with the right bytes. segments: of every op that computes; elements: of every bucket. devices, nodes: of
    every rank, those of one device having been measured at the same time."""
    speed = known.crowded(max((list(devices).count(own) for own in set(devices)), default=1))
    buckets = zip(assumed.buckets, elements, strict=True)
    return replace(
        assumed,
        segments=by_instruction(segments, speed),
        buckets=tuple(replace(own, step_seconds=speed * known.update * count) for own, count in buckets),
        transfers=known.transfers, links=known.links, issue_seconds=speed * known.issue,
        start_seconds=speed * known.start,
        input_seconds=speed * known.input, step_seconds=speed * known.step, meeting_seconds=known.meeting,
        contention=Contention(tuple(devices), tuple(nodes), known.beside),
    )  # fmt: skip


def by_instruction(segments: Mapping[Key, SegmentSeconds], speed: float = 1.0) -> dict[tuple[Op, int, int], float]:
    """What is computed again takes as long as the forward."""
    found: dict[tuple[Op, int, int], float] = {}
    for (block, op), own in segments.items():
        named = {Op.F: own.forward, Op.A: own.forward, Op.B: own.backward, Op.W: own.weight, Op.BW: own.together}
        found |= {(what, block, op): speed * seconds for what, seconds in named.items()}
    return found


@dataclass(frozen=True)
class Reference:
    """A step of one rank that does everything, measured, and what is known of its computations and its update."""

    micro_batches: int
    measured: float
    simulated: float


def overheads(found: Sequence[Reference]) -> tuple[float, float]:
    """(of a micro-batch, of a step): the straight line through what steps took beyond what was simulated of them, by
    the number of their micro-batches; neither is below zero."""
    left = [(own.micro_batches, own.measured - own.simulated) for own in found]
    mean = sum(count for count, _ in left) / len(left)
    rest = sum(seconds for _, seconds in left) / len(left)
    spread = sum((count - mean) ** 2 for count, _ in left)
    slope = sum((count - mean) * (seconds - rest) for count, seconds in left) / spread if spread else 0.0
    slope = max(0.0, min(slope, rest / mean))
    return slope, max(0.0, rest - slope * mean)


def block_times(rows: Iterable[tuple[str, Mapping[str, str | int], float]]) -> dict[str, Times]:
    """Rows of a profile (kind, key, seconds) as planning uses them, by the name of the block. Those of which a part is
    missing are left out."""
    found: dict[tuple[str, int, int], dict[str, float]] = {}
    for kind, key, seconds in rows:
        where, part = kind.partition(" ")[::2]
        block, degree, samples = key.get("block"), key.get("degree"), key.get("samples")
        is_whole = isinstance(block, str) and isinstance(degree, int) and isinstance(samples, int)
        if where == "block" and is_whole and seconds >= 0:
            found.setdefault((block, degree, samples), {})[part] = seconds  # pyright: ignore
    times: dict[str, dict[int, tuple[BlockTime, ...]]] = {}
    for (block, degree, samples), own in sorted(found.items()):
        if {"forward", "backward", "together"} <= own.keys():
            more = max(0.0, own["together"] - own["backward"])
            known = times.setdefault(block, {}).get(degree, ())
            times[block][degree] = (*known, BlockTime(samples, own["forward"], own["backward"], more))
    return dict(times)

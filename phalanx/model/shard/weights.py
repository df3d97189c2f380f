"""What of a parameter lies on which rank, who else has the same, and over whom its gradient must be summed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from phalanx.model.shard.localise import Item, Segment
from phalanx.model.shard.placement import Cuts, tiles
from phalanx.model.shard.sharded import LocalParameter
from phalanx.model.shard.walk import Walk
from phalanx.program.shape import Partition
from phalanx.state.local import Local


@dataclass(frozen=True)
class Use:
    """How a segment uses a parameter: its degree, whether its ranks compute different things, or have other tokens."""

    degree: int
    is_heavy: bool
    by_tokens: bool


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut, for all inner indices of the degree, and by whom it is used."""

    dim: int = 0
    cuts: Cuts = ()
    uses: frozenset[Use] = frozenset()

    def and_used(self, other: Cut) -> Cut:
        return replace(self, uses=self.uses | other.uses)


def cut_of(walk: Walk, parameter: fx.Node, items: Sequence[Item]) -> Cut:
    dim, cuts = walk.weights.get(parameter, (0, ()))
    uses = frozenset(
        Use(item.degree, item.is_heavy, _by_tokens(walk, item, parameter))
        for item in items
        if isinstance(item, Segment) and parameter in item.sources
    )
    return Cut(dim, cuts, uses)


def _by_tokens(walk: Walk, segment: Segment, parameter: fx.Node) -> bool:
    """Whether it meets values of which each rank has some tokens. Other values of the segment do not matter: what they
    need of it, if anything, a redistribution brings them."""
    reached, mine = {parameter}, set(segment.nodes)
    for node in walk.graph.nodes:
        from_it = any(source in reached and (node, source) not in walk.wants for source in node.all_input_nodes)
        if from_it and (node in mine or walk.is_weight(node)):
            reached.add(node)
    return any(getattr(walk.places[node], "kind", "") == "tokens" for node in reached & mine)


def local_parameter(shape: tuple[int, ...], cut: Cut, tp: int, index: int) -> LocalParameter:
    """What rank `index` keeps of a parameter."""
    degrees = {use.degree for use in cut.uses} or {tp}
    assert len(degrees) == 1, "a parameter is used by units of different degrees"
    degree = degrees.pop()
    if cut.cuts:
        assert tiles(tuple(set(cut.cuts))), "ranks have the same of a part of a parameter, and not of all of it"
        ranges = [cut.cuts[rank % degree] for rank in range(tp)]
        locals = tuple(Local(shape, cut.dim, each) for each in ranges)
        return LocalParameter(locals, index, _proper(_cells(ranges), tp))
    everyone: Partition = (tuple(range(tp)),)
    summands = {use.is_heavy or use.by_tokens for use in cut.uses}
    assert len(summands) <= 1, "a whole parameter is used both where ranks agree and where they differ"
    sums = everyone if True in summands else _cells([rank % degree for rank in range(tp)])
    return LocalParameter((Local(shape),) * tp, index, _proper(sums, tp))


def _cells(keys: Iterable[object]) -> Partition:
    """Ranks with equal keys."""
    found: dict[object, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def _proper(cells: Partition, tp: int) -> Partition:
    """No cells where every rank is alone."""
    return () if len(cells) == tp else cells

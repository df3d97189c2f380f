"""Places every value of one block's graph: which weights are cut, and how all else follows.

Products whose input is whole tentatively cut their weight by columns; the rules of the operators (`rules/`) carry the
split on until a contraction ends it as a sum over ranks. Where that does not work out, the split is ended earlier, or
the product that began it is done whole, and everything is placed again. No architecture is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from phalanx.model.shard.placement import (
    TOKENS,
    WHOLE,
    Conflict,
    Cuts,
    Cutting,
    NoElement,
    Origin,
    Placement,
    Refined,
    TooFew,
)

Place = Placement | tuple["Place", ...]  # of a node that gives several tensors: one each
Rule = Callable[["Walk", fx.Node], "Place"]

aten = torch.ops.aten
_VIEWS = (aten.transpose.int, aten.t.default, aten.permute.default, aten.unsqueeze.default)
_BY_ELEMENT = (aten.to.dtype, aten.add.Tensor, aten.mul.Tensor, aten.neg.default, aten.type_as.default)


@dataclass
class Choices:
    """What has been decided about a graph and survives placing it again."""

    cuttings: dict[tuple[fx.Node, int], Cutting] = field(default_factory=dict)  # by weight and dim
    whole: dict[fx.Node, str] = field(default_factory=dict)  # products that are not split, and why
    ended: set[fx.Node] = field(default_factory=set[fx.Node])  # products of which a split that could go on is a sum


@dataclass(frozen=True)
class Setting:
    """degree: of a node's unit. sequence: values between split regions are split along the tokens. has_tokens: whether
    a shape is [samples, tokens, features]. allow_whole: attention with fewer heads than ranks is done whole."""

    degree: Callable[[fx.Node], int]
    sequence: bool
    has_tokens: Callable[[torch.Size], bool]
    allow_whole: bool


class Walk:
    """One placing of one graph. `places` per node; `wants[user, arg]` where a user needs an argument otherwise than it
    lies; `weights` per parameter that is cut: (dim, cuts); `rewritten` per node that is built otherwise on a rank."""

    def __init__(
        self,
        graph: fx.Graph,
        rules: Mapping[Any, Rule],
        otherwise: Rule,
        activations: Mapping[fx.Node, Placement],
        setting: Setting,
        choices: Choices,
    ) -> None:
        self.graph, self.setting, self.choices, self._activations = graph, setting, choices, activations
        self._rules, self._otherwise = rules, otherwise
        self.live = depends_on(graph, lambda node: node.name.startswith(("activation", "parameter")))
        self.differentiable: Mapping[fx.Node, bool] = self.live  # whether a gradient flows to a value
        self.places: dict[fx.Node, Any] = {}
        self.wants: dict[tuple[fx.Node, fx.Node], Placement] = {}
        self.weights: dict[fx.Node, tuple[int, Cuts]] = {}
        self.rewritten: dict[fx.Node, Callable[[Any, int], fx.Node]] = {}  # how a node is built on an inner rank

    def run(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.places[node] = self._activations.get(node, WHOLE)
            elif node.op == "call_function":
                self.places[node] = self._place(node)

    def _place(self, node: fx.Node) -> Place:
        if not self.live[node]:
            return WHOLE
        return self._rules.get(node.target, self._otherwise)(self, node)

    # What rules ask.

    def degree(self, node: fx.Node) -> int:
        return self.setting.degree(node)

    def of(self, value: Any, user: fx.Node) -> Placement:
        """How an argument lies, as seen by a user: what comes from a unit of another degree is home there."""
        if not isinstance(value, fx.Node) or not self.live[value]:
            return WHOLE
        place = self.places[value]
        assert isinstance(place, Placement), f"{value} is several tensors"
        if self.is_weight(value) or self.degree(value) == self.degree(user):
            return place
        if place.kind in ("split", "stacked"):
            raise Conflict("a split value is used by a unit of another degree", place)
        return self.home(value)

    def home(self, value: fx.Node) -> Placement:
        """How a value lies between split regions."""
        return TOKENS if self.setting.sequence and self.setting.has_tokens(shape(value)) else WHOLE

    def need(self, user: fx.Node, value: Any, wanted: Placement) -> Placement:
        """Notes that `user` needs an argument to lie like this."""
        if isinstance(value, fx.Node) and self.live[value] and not self.is_weight(value):
            place = self.of(value, user)
            if place.kind == "split" and not place.same_as(wanted):
                raise Conflict(f"{user} needs {value} {wanted.kind}", place)
            if not place.same_as(wanted) or self.degree(value) != self.degree(user):
                self.wants[user, value] = wanted
        return wanted

    def need_home(self, user: fx.Node, value: Any) -> Placement:
        """Sums are taken before a value is used; everything else stays as it is."""
        place = self.of(value, user)
        if place.kind == "partial":
            return self.need(user, value, self.home(value))
        return self.need(user, value, place)

    def need_whole(self, user: fx.Node, value: Any) -> Placement:
        return self.need(user, value, WHOLE)

    # Weights.

    def is_weight(self, value: Any) -> bool:
        """A parameter, or one that is only transposed, cast or has a number added: computed wherever it is used, unless
        other blocks use it."""
        return isinstance(value, fx.Node) and self._root(value) is not None

    def _root(self, value: fx.Node) -> tuple[fx.Node, tuple[int, ...]] | None:
        """The parameter that a value is a view of, and which of its dims each dim of the value is."""
        if value.op == "placeholder":
            is_parameter = value.name.startswith("parameter")
            return (value, tuple(range(len(shape(value))))) if is_parameter else None
        if value.target not in _VIEWS + _BY_ELEMENT or len(value.all_input_nodes) != 1:
            return None
        if any(user.op == "output" for user in value.users):
            return None
        found = self._root(value.all_input_nodes[0])
        if found is None:
            return None
        root, dims = found
        return root, _moved(value, dims)

    def cut_weight(self, value: fx.Node, dim: int, product: fx.Node) -> Placement:
        """Begins a split: the weight's dim is divided between the ranks of the product's unit."""
        root, dims = self._root(value) or (value, ())
        cutting = self.choices.cuttings.setdefault((root, dims[dim]), Cutting(shape(root)[dims[dim]]))
        try:
            cuts = cutting.cuts(self.degree(product))
        except TooFew as reason:
            raise Conflict(str(reason), Placement("split", origin=Origin(product, root))) from None
        self._assign(root, dims[dim], cuts, product)
        return Placement("split", dim, cuts, Origin(product, root))

    def follow(self, value: fx.Node, dim: int, place: Placement, user: fx.Node) -> None:
        """Cuts a weight's dim as a value is split that meets it there."""
        found = self._root(value)
        assert found is not None
        root, dims = found
        self._assign(root, dims[dim], place.cuts, user, place)

    def _assign(self, root: fx.Node, dim: int, cuts: Cuts, user: fx.Node, place: Placement = WHOLE) -> None:
        if self.weights.setdefault(root, (dim, cuts)) != (dim, cuts):
            raise Conflict(f"{root} would be cut in two ways", place, Placement("split", origin=Origin(user, root)))

    def is_done_whole(self, product: fx.Node) -> bool:
        return product in self.choices.whole

    # Refining what was decided before.

    def edges(self, place: Placement) -> set[int]:
        """Where sections of the weight begin and end that a split began with."""
        assert place.origin is not None
        dim, _ = self.weights[place.origin.weight]
        return {edge for section in self.choices.cuttings[place.origin.weight, dim].sections() for edge in section}

    def refine(self, place: Placement, change: Callable[[Cutting, Origin], bool]) -> None:
        """Changes how the weight is cut that a split began with; `change` says whether it did."""
        assert place.origin is not None
        origin = place.origin
        dim, _ = self.weights[origin.weight]
        cutting = self.choices.cuttings[origin.weight, dim]
        try:
            changed = change(cutting, origin)
        except NoElement:
            changed = False
        if not changed:
            raise Conflict("the weight cannot be cut like that", place)
        raise Refined


def _moved(view: fx.Node, dims: tuple[int, ...]) -> tuple[int, ...]:
    if view.target is aten.transpose.int:
        a, b = (int(d) % len(dims) for d in view.args[1:3])  # pyright: ignore
        swapped = list(dims)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        return tuple(swapped)
    if view.target is aten.t.default:
        return dims[::-1]
    if view.target is aten.permute.default:
        return tuple(dims[int(d)] for d in view.args[1])  # pyright: ignore
    if view.target is aten.unsqueeze.default:
        at = int(view.args[1]) % (len(dims) + 1)  # pyright: ignore
        return (*dims[:at], -1, *dims[at:])  # which is none of the parameter's, and never split
    return dims


def depends_on(graph: fx.Graph, wanted: Callable[[fx.Node], bool]) -> dict[fx.Node, bool]:
    """Whether each value depends on one of some placeholders. Those that depend on no activation and no parameter are
    computed wherever they are used."""
    found: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        own = node.op == "placeholder" and wanted(node)
        found[node] = own or any(found[source] for source in node.all_input_nodes)
    return found


def shape(node: fx.Node) -> torch.Size:
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node} is not a tensor"
    return value.shape


def place_all(
    graph: fx.Graph,
    rules: Mapping[Any, Rule],
    otherwise: Rule,
    activations: Mapping[fx.Node, Placement],
    setting: Setting,
    choices: Choices,
) -> Walk:
    """Places a graph, again and again until nothing conflicts."""
    for _ in range(1000):
        walk = Walk(graph, rules, otherwise, activations, setting, choices)
        try:
            walk.run()
            _settle_outputs(walk)
            return walk
        except Refined:
            continue
        except Conflict as conflict:
            if not conflict.origins:
                raise AssertionError(f"nothing to do whole: {conflict}") from conflict
            for origin in conflict.origins:
                if origin.last is not None:
                    choices.ended.add(origin.last)
                else:
                    choices.whole.setdefault(origin.product, str(conflict))
    raise AssertionError("placing does not come to an end")


def _settle_outputs(walk: Walk) -> None:
    """What leaves a block lies as it does between split regions."""
    output = walk.graph.output_node()
    for value in output.all_input_nodes:
        place = walk.of(value, value)
        if place.kind == "split":
            raise Conflict("a split value leaves the block", place)
        wanted = walk.home(value)
        if not place.same_as(wanted):
            walk.wants[output, value] = wanted

"""A captured model whose tokens can be run slice by slice: attention finds the tokens before it in buffers, dropout and
positions know where a slice begins.

Everything that depends on inputs alone is computed for whole micro-batches and cut; what is computed inside a layer for
keys as well as queries (biases, segments) is computed whole there. Blocks without tokens (an encoder) run once per
micro-batch.

A model with an operator that brings different tokens together (a mean over tokens, a convolution along them, a
recurrence) is refused: a slice would compute it from its own tokens alone, nothing would fail, and the numbers would be
wrong. That is decided by shapes, in sizes that tell tokens from everything else. Sorting rows and sending them to
experts keeps every token to itself; attention and what is computed from the inputs alone are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from phalanx.errors import PlanError
from phalanx.model.captured import Captured
from phalanx.model.graph import graphs
from phalanx.model.graph.blocks import Block, Port, Template
from phalanx.model.shard.outlines import Dims, Outlines

IsTokens = Callable[[int], bool]  # whether a size counts tokens

_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # whose last dim is summed over
_KEEP_APART = {"unsqueeze", "squeeze", "stack", "permute", "unflatten", "sort"}  # although they name a dim
_BRING_TOGETHER = ("lstm", "gru", "rnn", "scaled_dot_product_attention", "unfold", "as_strided")


def tokens_meet(node: fx.Node, is_tokens: IsTokens) -> bool:
    """Whether a node with its value in `meta` computes a token from others."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or torch.Tag.pointwise in target.tags:
        return False
    shapes = [tuple(v.shape) for v in (n.meta.get("val") for n in node.all_input_nodes) if isinstance(v, Tensor)]
    if not any(map(is_tokens, (size for shape in shapes for size in shape))):
        return False
    name, arguments = target._schema.name.removeprefix("aten::"), _arguments(node, target)
    if name.startswith(_BRING_TOGETHER):
        return True
    return any(is_tokens(size) for size in _mixed_sizes(name, arguments, node.meta["val"]))


def _mixed_sizes(name: str, arguments: dict[str, Any], result: Any) -> Iterable[int]:
    """The sizes of the dims along which elements are added, moved or left out."""
    values = list(arguments.values())
    if name in _PRODUCTS:
        return _shape(values[_PRODUCTS[name]])[-1:]
    if name == "einsum":
        return _summed(*values[:2])
    if name.startswith("conv"):
        return _shape(values[0])[2:]
    if name in ("pad", "constant_pad_nd"):
        widths, shape = values[1], _shape(values[0])
        return [shape[-1 - i // 2] for i, width in enumerate(widths) if width]
    shape = _shape(values[0][0] if isinstance(values[0], list | tuple) else values[0])
    if isinstance(result, Tensor) and not result.dim():  # a loss is a sum, and those of slices add up
        return () if name == "sum" else shape
    if name in _KEEP_APART or not arguments.keys() & {"dim", "dims"} or (name == "slice" and shape == _shape(result)):
        return ()
    dims = arguments.get("dim", arguments.get("dims"))
    return [shape[dim] for dim in ([dims] if isinstance(dims, int) else dims or range(len(shape)))]


def _summed(equation: str, operands: Iterable[Any]) -> list[int]:
    """The sizes behind letters that an einsum's result lacks; without an arrow those are the repeated ones."""
    sources, arrow, kept = equation.replace(" ", "").partition("->")
    kept = kept if arrow else {letter for letter in sources if sources.count(letter) == 1}
    found: list[int] = []
    for letters, shape in zip(sources.split(","), map(_shape, operands), strict=True):
        first, _, last = letters.partition("...")
        named = zip(first + last, (*shape[: len(first)], *shape[len(shape) - len(last) :]), strict=True)
        found += [size for letter, size in named if letter not in kept]
    return found


def _arguments(node: fx.Node, target: OpOverload) -> dict[str, Any]:
    """By name, with the defaults of what was not given."""
    names = [argument.name for argument in target._schema.arguments]
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    given = dict(zip(names, node.args, strict=False))
    return {name: (given | node.kwargs).get(name, defaults.get(name)) for name in names}


def _shape(value: Any) -> tuple[int, ...]:
    found = value.meta["val"] if isinstance(value, fx.Node) else value
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def counts_tokens(tokens: int, batch: int) -> IsTokens:
    """For sizes that stand for these dims alone: tokens, or samples × tokens, perhaps several rows of each."""
    return lambda size: size == tokens or size % math.lcm(tokens, batch) == 0


own = torch.ops.phalanx
TOKENS = "tokens"  # the dynamic dim that is sliced
WHOLE_TOKENS = "whole_tokens"  # its size in the whole micro-batch, for what is computed whole
_BIAS, _K_SEGMENTS = 5, 4  # arguments of an attention that are about keys as well as queries


@dataclass(frozen=True)
class Sliced:
    """captured: with blocks that run on slices. granularities: per block `slice` or `micro-batch`. per_micro_batch:
    activations that are the same for all slices. shapes: of the prologue's values, in sizes that tell tokens from
    everything else."""

    captured: Captured
    granularities: tuple[str, ...]
    per_micro_batch: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    dims: Dims

    @cached_property
    def _input_dims(self) -> dict[str, int | None]:
        """Which dim of an input the tokens are."""
        return {s.name: s.dims.index(TOKENS) if TOKENS in s.dims else None for s in self.captured.inputs}

    @cached_property
    def _value_dims(self) -> dict[str, list[tuple[int, bool]]]:
        """Which dims of a value are tokens, and whether samples × tokens."""
        tokens, batch = self.dims.sizes[TOKENS], self.dims.sizes["batch"]
        sizes = {tokens * batch: True, tokens: False}
        return {
            name: [(dim, sizes[size]) for dim, size in enumerate(shape) if size in sizes]
            for name, shape in self.shapes.items()
        }

    def cut_input(self, name: str, tensor: Tensor, edges: Sequence[int]) -> Sequence[Tensor]:
        """Its slices, between these tokens, all at once: one by one they would take longer than their computations."""
        dim = self._input_dims[name]
        return [tensor] * (len(edges) - 1) if dim is None else _cut(tensor, dim, edges)

    def cut_value(
        self, name: str, value: Tensor, samples: int, edges: Sequence[int], orders: dict[int, Tensor]
    ) -> Sequence[Tensor]:  # fmt: skip
        """The same for a value of the prologue. orders: what was worked out for others that are cut alike."""
        if not self._value_dims[name]:
            return [value] * (len(edges) - 1)
        parts: Sequence[Tensor] = ()
        for dim, joined in self._value_dims[name]:
            cut = partial(_cut_joined, samples=samples, orders=orders) if joined else _cut
            parts = [cut(part, dim, edges)[i] for i, part in enumerate(parts)] or cut(value, dim, edges)
        return parts


def _cut(tensor: Tensor, dim: int, edges: Sequence[int]) -> Sequence[Tensor]:
    """What lies before the first edge and behind the last belongs to none."""
    sizes = [stop - start for start, stop in pairwise((0, *edges, tensor.shape[dim]))]
    return tensor.split_with_sizes(sizes, dim)[1:-1]


def _cut_joined(
    value: Tensor, dim: int, edges: Sequence[int], samples: int, orders: dict[int, Tensor]
) -> Sequence[Tensor]:  # fmt: skip
    """Samples × tokens in one dim: brought into the order of slices, in each of them as before, and cut."""
    if samples not in orders:
        places = torch.arange(value.shape[dim], device=value.device).view(samples, -1)
        orders[samples] = torch.cat([places[:, start:stop].flatten() for start, stop in pairwise(edges)])
    ordered = value.index_select(dim, orders[samples])
    return _cut(ordered, dim, [samples * (edge - edges[0]) for edge in edges])


def slice_model(captured: Captured, dtype: torch.dtype) -> Sliced:
    """Refuses a model whose tokens see later ones."""
    outlines = Outlines(captured, dtype)
    if TOKENS not in outlines.dims.sizes:
        message = f"plan: slices cut tokens, and this model's inputs have none ({', '.join(outlines.dims.sizes)})"
        raise PlanError(message, "leave slices out")
    return _Slicer(captured, outlines).run()


@dataclass
class _Cut:
    """A template for slices. added: ports that it needs besides those it has, without the block's own names."""

    template: Template
    key: str
    added: list[Port] = field(default_factory=list)


class _Slicer:
    def __init__(self, captured: Captured, outlines: Outlines) -> None:
        self._captured, self._outlines, self._tokens = captured, outlines, outlines.dims.sizes[TOKENS]
        self._cuts: dict[fx.Graph, _Cut] = {}
        self._whole: set[str] = set()
        self._granularities: list[str] = []

    def run(self) -> Sliced:
        blocks = tuple(self._block(block, graph) for block, graph in self._outlines.raw_blocks())
        templates = {cut.key: cut.template for cut in self._cuts.values()}
        sliced = replace(self._captured, blocks=replace(self._captured.blocks, blocks=blocks, templates=templates))
        shapes = {name: tuple(self._outlines.value(name).shape) for name in self._captured.blocks.values}
        self._require_cuttable(shapes)
        return Sliced(sliced, tuple(self._granularities), frozenset(self._whole), shapes, self._outlines.dims)

    def _block(self, block: Block, graph: fx.Graph) -> Block:
        has_tokens = any(self._has_tokens(node) for node in graph.nodes if node.op != "output")
        self._granularities.append("slice" if has_tokens else "micro-batch")
        if not has_tokens:
            self._whole.update(block.outputs)
        if graph not in self._cuts:
            self._cuts[graph] = self._cut(block, graph)
        cut = self._cuts[graph]
        names = {"past": lambda port: f"{block.name}@{port.name}"}
        added = [replace(port, name=names.get(port.kind, lambda p: p.name)(port)) for port in cut.added]
        return replace(block, template=cut.key, ports=(*block.ports, *added))

    def _has_tokens(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and any(size % self._tokens == 0 for size in value.shape)

    def _cut(self, block: Block, annotated: fx.Graph) -> _Cut:
        template = self._captured.blocks.templates[block.template]
        editor = _Editor(block, annotated, self._tokens)
        editor.run()
        self._require_apart(block, editor.of_slices())
        text = graphs.dump(annotated)
        units = dict(zip([n for n in annotated.nodes if n.op == "call_function"], editor.units(), strict=True))
        cut = Template(text, tuple(units.get(node, "") for node in annotated.nodes), template.flops)
        return _Cut(cut, graphs.fingerprint(f"{block.template}\n{text}"), editor.added)

    def _require_apart(self, block: Block, nodes: Iterable[fx.Node]) -> None:
        is_tokens = counts_tokens(self._tokens, self._outlines.dims.sizes["batch"])
        for node in nodes:
            if tokens_meet(node, is_tokens):
                place = f"in {block.name} they meet in {node.target}"
                raise PlanError(
                    f"plan: slices need tokens to meet in attention alone, and {place}",
                    "leave slices out: this model cannot be run slice by slice",
                )

    def _require_cuttable(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        used = {name for cut in self._captured.blocks.blocks for name in cut.names("value")}
        simple = (self._tokens, self._tokens * self._outlines.dims.sizes["batch"])
        for name in used:
            odd = [size for size in shapes[name] if size % self._tokens == 0 and size not in simple]
            if odd or sum(size == self._tokens for size in shapes[name]) > 1:
                raise PlanError(
                    f"plan: slices cannot cut what the model computes from its inputs ({list(shapes[name])})",
                    "leave slices out",
                )


class _Editor:
    """Rewrites one block's graph in place; new placeholders follow the others."""

    def __init__(self, block: Block, graph: fx.Graph, tokens: int) -> None:
        self._block, self._graph, self._tokens = block, graph, tokens
        self._ports = dict(zip(self._placeholders(), block.ports, strict=True))
        self.added: list[Port] = []
        self._new: dict[Port, fx.Node] = {}
        self._wholes: dict[fx.Node, fx.Node] = {}
        self._num_attentions = 0

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.target is own.dropout.default and self._has_tokens(node):
                x, keys, p = node.args
                self._replace(node, own.dropout_part.default, (x, keys, p, 0, 0, self._port(Port("start", ""))))
            elif node.target is own.attention.default:
                self._attention(node)
        output = self._graph.output_node()
        output.args = (map_arg(output.args[0], lambda node: self._wholes.get(node, node)),)  # what others use whole too
        self._graph.eliminate_dead_code()
        assert all(node.users for node in self._new.values()), "every new port is read"

    def of_slices(self) -> list[fx.Node]:
        """The nodes that see a slice's tokens and no others."""
        whole = set(self._wholes.values())
        return [node for node in self._graph.nodes if node.op == "call_function" and node not in whole]

    def units(self) -> list[str]:
        return [node.meta.get("unit", "") for node in self._graph.nodes if node.op == "call_function"]

    def _placeholders(self) -> list[fx.Node]:
        return [node for node in self._graph.nodes if node.op == "placeholder"]

    def _has_tokens(self, value: object) -> bool:
        return isinstance(value, fx.Node) and any(size % self._tokens == 0 for size in value.meta["val"].shape)

    def _attention(self, node: fx.Node) -> None:
        q, k = node.args[:2]
        if not self._has_tokens(q):
            return
        if not self._has_tokens(k):  # to an encoder: every slice sees all of it, and drops as the whole would
            if node.args[11]:
                self._replace(node, own.attention.default, (*node.args[:12], 0, self._port(Port("start", ""))))
            return
        if not node.args[7]:
            raise PlanError(
                f"plan: slices need causal attention, and in {self._block.name} tokens see later ones",
                "leave slices out: this model cannot be run slice by slice",
            )
        handle = self._port(Port("past", str(self._num_attentions)))
        self._num_attentions += 1
        rest = list(node.args[3:])
        for place in (_K_SEGMENTS, _BIAS):
            rest[place - 3] = self._whole(rest[place - 3])
        self._replace(node, own.attention_slice.default, (*node.args[:3], handle, *rest))

    def _replace(self, node: fx.Node, target: object, args: Sequence[object]) -> None:
        with self._graph.inserting_before(node):
            new = self._graph.call_function(target, tuple(args))  # pyright: ignore
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _port(self, port: Port) -> fx.Node:
        if port not in self._new:
            last = self._placeholders()[-1]
            with self._graph.inserting_after(last):
                self._new[port] = self._graph.placeholder(f"{port.kind}{len(self._ports) + len(self.added)}")
            self.added.append(port)
        return self._new[port]

    def _whole(self, value: Any) -> Any:
        """A value for all tokens of the micro-batch, where what it is computed from can be had whole."""
        if not isinstance(value, fx.Node):
            return value
        if value in self._wholes:
            return self._wholes[value]
        if value.op == "placeholder":
            whole = self._whole_port(value)
        else:
            with self._graph.inserting_before(value):
                args, kwargs = (map_arg(a, self._whole) for a in (value.args, value.kwargs))
                whole = self._graph.call_function(value.target, args, kwargs)  # pyright: ignore
            whole.meta.update(value.meta)
        self._wholes[value] = whole
        return whole

    def _whole_port(self, node: fx.Node) -> fx.Node:
        port = self._ports[node]
        if port.kind == "size" and TOKENS in port.name:
            return self._port(Port("size", port.name.replace(TOKENS, WHOLE_TOKENS)))
        if port.kind in ("value", "input"):
            return self._port(Port(f"whole_{port.kind}", port.name))
        return node  # parameters and activations are whole as they are

"""Models cut into blocks: what crosses each cut, who uses which parameter, and gradients that arrive everywhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.errors import CaptureError
from phalanx.model.graph.blocks import Block, Blocks, Port
from phalanx.model.graph.units import LayerList, find_layers, layer_of
from tests import captured

CROSSING = {
    captured.GPT2: [1, 1, 1, 1, 1],
    captured.T5: [1, 2, 2, 2, 1, 2, 3, 3, 3, 1],  # hidden states, and the position biases that layer 0 makes for all
    captured.WHISPER: [1, 1, 1, 1, 1, 2, 2, 2, 2, 1],  # the decoder carries the encoder's output along
}


@pytest.mark.parametrize("name", CROSSING)
def test_only_what_later_blocks_need_crosses_a_cut(name: str) -> None:
    blocks = captured.named(name).blocks
    assert [len(blocks.crossing(i)) for i in range(1, len(blocks.blocks))] == CROSSING[name]
    assert blocks.crossing(0) == blocks.crossing(len(blocks.blocks)) == ()


@pytest.mark.parametrize("name", CROSSING)
def test_every_parameter_is_in_exactly_the_blocks_that_use_it(name: str) -> None:
    case = captured.named(name)
    assert set(case.blocks.parameters()) == set(case.captured.shapes)
    users = {p: [b.name for b in case.blocks.blocks if p in b.names("parameter")] for p in case.captured.shapes}
    shared = {p for p, blocks in users.items() if len(blocks) > 1}
    assert shared == set(case.captured.aliases.values())  # tied: embedding and head
    for parameter, blocks in users.items():
        inside = layer_of(parameter, find_layers(case.model))
        if inside is not None:
            assert blocks == [f"{inside[0]}.{inside[1]}"]


@pytest.mark.parametrize("name", [captured.GPT2, captured.WHISPER])
def test_activations_are_made_before_they_are_used_and_values_come_from_the_prologue(name: str) -> None:
    blocks = captured.named(name).blocks
    made: set[str] = set()
    for block in blocks.blocks:
        assert set(block.names("activation")) <= made
        assert set(block.names("value")) <= set(blocks.values)
        made |= set(block.outputs)
    assert blocks.loss in made and blocks.count in blocks.values
    assert not any(port.kind in ("parameter", "activation") for port in blocks.prologue_ports)


def test_layers_alike_share_one_template() -> None:
    blocks = captured.named(captured.GPT2).blocks
    assert len({b.template for b in blocks.blocks if b.name.startswith("transformer.h.")}) == 1
    assert set(blocks.templates) == {b.template for b in blocks.blocks}


def test_crossing_sets_of_a_hand_made_chain() -> None:
    def block(name: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Block:
        return Block(name, "t", tuple(Port("activation", activation) for activation in reads), writes)

    chain = (block("a", (), ("a:0", "a:1")), block("b", ("a:0",), ("b:0",)), block("c", ("b:0", "a:1"), ("c:0",)))
    blocks = Blocks(chain, {}, "", (), (), "c:0", "n")
    assert [blocks.crossing(i) for i in range(4)] == [(), ("a:0", "a:1"), ("a:1", "b:0"), ()]


class Layer(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Layers, the order in which they are applied, and skips: (from, to) adds the input of one layer to another's."""

    def __init__(self, order: list[int], skips: list[tuple[int, int]] = ()) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(max(order) + 1))
        self.order, self.skips = order, list(skips)

    def forward(self, x: Tensor) -> Tensor:
        x, inputs = self.embed(x), []
        for place, index in enumerate(self.order):
            inputs.append(x)
            for start, end in self.skips:
                if end == place:
                    x = x + inputs[start].square()
            x = self.layers[index](x)
        return self.head(x).square().mean()


X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def require_exact_in_blocks(case: captured.Case, sizes: tuple[int, ...] = (2, 3)) -> None:
    captured.require_equal(case.step(case.rank(), sizes, "zb-h1"), case.plain())


def names(case: captured.Case) -> list[str]:
    return [block.name for block in case.blocks.blocks]


def test_a_list_of_layers_is_cut_at_each() -> None:
    case = captured.own(Stack([0, 1, 2]), x=X)
    assert names(case) == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    require_exact_in_blocks(case)


def test_a_sequential_stack_is_cut_at_each_layer_too() -> None:
    class Sequential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(Layer(3), Layer(3), Layer(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().mean()

    case = captured.own(Sequential(), x=X)
    assert names(case) == ["body.0", "body.1", "body.2", "head"]
    require_exact_in_blocks(case)


def test_a_module_without_repeated_layers_is_one_block() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).square().mean()

    case = captured.own(Plain(), x=X)
    assert len(case.blocks.blocks) == 1
    assert set(case.blocks.blocks[0].names("parameter")) == set(case.parameters)
    require_exact_in_blocks(case)


def test_a_skip_from_an_early_to_a_late_layer_is_carried_over_every_cut_between() -> None:
    case = captured.own(Stack([0, 1, 2, 3], skips=[(1, 3)]), x=X)
    assert [len(case.blocks.crossing(i)) for i in range(1, 6)] == [1, 1, 2, 1, 1]
    require_exact_in_blocks(case)


def test_a_layer_applied_twice_is_two_blocks_and_gets_the_summed_gradient() -> None:
    case = captured.own(Stack([0, 1, 0, 1]), x=X)
    assert names(case) == ["embedding", "layers.0", "layers.1", "layers.0#2", "layers.1#2", "head"]
    require_exact_in_blocks(case)


def test_two_names_of_one_gradient_do_not_share_its_memory() -> None:
    """`a + b` gives both parameters one gradient; sums over micro-batches would add to it twice."""

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ (self.a + self.b)).square().mean()

    require_exact_in_blocks(captured.own(Summed(), x=X), sizes=(2, 2, 1))


def test_tied_parameters_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.head = nn.Linear(3, 3), nn.ModuleList([Layer(3), Layer(3)]), nn.Linear(3, 3)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(self.embed(x))
            return self.head(x).square().mean()

    case = captured.own(Tied(), x=X)
    assert "head.weight" not in case.blocks.parameters()
    require_exact_in_blocks(case)


def test_code_that_counts_its_layers_is_captured_as_deep_as_it_is() -> None:
    class Averaging(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = x + layer(x) / len(self.layers)
            return self.head(x).square().mean()

    require_exact_in_blocks(captured.own(Averaging([0, 1, 2, 3, 4]), x=X))


def test_a_model_without_parameters_is_refused() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    with pytest.raises(CaptureError, match="the loss depends on no parameter"):
        captured.own(Empty(), x=X)


@given(data=st.data())
@settings(max_examples=10)
def test_gradients_of_random_residual_stacks_equal_autograd(data) -> None:
    num_layers = data.draw(st.integers(2, 4))
    order = [*range(num_layers), *data.draw(st.lists(st.integers(0, num_layers - 1), max_size=2))]
    place = st.integers(0, len(order) - 1)
    skips = data.draw(st.lists(st.tuples(place, place).filter(lambda s: s[0] < s[1]), max_size=3))
    sizes = data.draw(st.sampled_from([(5,), (2, 3), (1, 4), (1, 1, 3)]))
    require_exact_in_blocks(captured.own(Stack(order, skips), x=X), sizes)


@pytest.mark.parametrize("path, expected", [
    ("layers.11.linear", ("layers", 11)), ("layers.1", ("layers", 1)), ("layersx.1", None), ("head", None), ("", None),
])  # fmt: skip
def test_a_path_lies_in_a_layer_or_in_none(path: str, expected: tuple[str, int] | None) -> None:
    assert layer_of(path, [LayerList("layers", 12)]) == expected


def test_lists_are_found_outermost_and_only_when_they_repeat() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleDict({"blocks": nn.ModuleList(Stack([0, 1]) for _ in range(3))})
            self.once = nn.ModuleList([Layer()])
            self.mixed = nn.ModuleList([Layer(), nn.Linear(4, 4)])
            self.activations = nn.ModuleList([nn.GELU(), nn.GELU()])

    assert find_layers(Nested()) == [LayerList("encoder.blocks", 3)]

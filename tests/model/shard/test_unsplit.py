"""Blocks that are not split between ranks: whole, or one segment for each of their units."""

from __future__ import annotations

import pytest

from phalanx.model.graph import graphs
from phalanx.model.shard.unsplit import unsplit
from tests import captured

MODELS = [captured.GPT2, captured.LLAMA, captured.WHISPER, captured.MIXTRAL, captured.T5]


@pytest.mark.parametrize("name", [captured.GPT2, captured.WHISPER])
def test_blocks_that_are_not_cut_are_themselves(name: str) -> None:
    blocks = captured.named(name).blocks
    found = unsplit(blocks)
    assert found.blocks == blocks
    assert [len(chain) for chain in found.parts] == [1] * len(blocks.blocks)
    assert [chain[0].writes for chain in found.ops] == [block.outputs for block in blocks.blocks]


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_cut_into_one_segment_for_each_unit(name: str) -> None:
    blocks = captured.named(name).blocks
    found = unsplit(blocks, blocks.layers)
    for number, (block, steps) in enumerate(zip(blocks.blocks, found.ops, strict=True)):
        units = blocks.units(block) if number in blocks.layers else ("",)
        assert tuple(step.unit for step in steps) == units
        made = [activation for step in steps for activation in step.writes]
        assert len(set(made)) == len(made) and set(block.outputs) <= set(made)
        given = {activation for step in steps for activation in step.reads} - set(made)
        assert given == set(block.names("activation"))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_belongs_to_one_unit_and_every_operation_is_done_once(name: str) -> None:
    blocks = captured.named(name).blocks
    found = unsplit(blocks, blocks.layers)
    for number in blocks.layers:
        block = blocks.blocks[number]
        segments = [found.blocks.blocks[part.segment] for part in found.parts[number] if part.segment is not None]
        used = [parameter for segment in segments for parameter in set(segment.names("parameter"))]
        assert sorted(used) == sorted(set(block.names("parameter")))
        products = [_products(found.blocks.templates[segment.template].text) for segment in segments]
        assert sum(products) == _products(blocks.templates[block.template].text) > 0


def test_layers_of_one_kind_share_the_templates_of_their_units() -> None:
    blocks = captured.named(captured.GPT2).blocks
    found = unsplit(blocks, blocks.layers[:2])
    chains = [[found.blocks.blocks[part.segment or 0].template for part in found.parts[n]] for n in blocks.layers]
    assert chains[0] == chains[1] and len(set(chains[0])) == 2
    assert chains[2] == [blocks.blocks[blocks.layers[2]].template]


def _products(text: str) -> int:
    names = ("linear", "mm", "addmm", "bmm", "matmul", "grouped_matmul", "attention")
    targets = [str(node.target) for node in graphs.load(text).nodes if node.op == "call_function"]
    return sum(target.split(".")[1] in names for target in targets if "." in target)

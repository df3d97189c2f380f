"""What a rank keeps, by the model's own names, so that any other plan can take it up from there: tensors for the shards
that `layout_of` describes.

Where they go and come from is the caller's business; how they lie on the device is `buckets.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx.params.flat import Piece
from phalanx.params.layout_of import StateLayout
from phalanx.params.optimizer import Optimizer
from phalanx.params.parameters import Parameters
from phalanx.state.checkpoint import Checkpoint
from phalanx.state.layout import StateShard

Filled = tuple[StateShard, Tensor]  # with its data


def of_parameters(state: StateLayout, rank: int, parameters: Parameters) -> Iterator[Filled]:
    """Parameters by their own names, in the precision of training."""
    for shard in state.parameters(rank):
        weight = parameters.weights[shard.name]
        yield shard, weight.piece.packed(weight.copy)


def of_checkpoint(state: StateLayout, rank: int, parameters: Parameters, optimizer: Optimizer) -> Iterator[Filled]:
    """Everything that training must go on from; of the optimizer's state what there is by now."""
    kept = {each.facts.name: each for each in state.kept(rank)}
    for name, each in kept.items():
        yield state.exact(each), each.piece.packed(parameters.weights[name].exact)
    for slot, name, tensor in optimizer.tensors():
        each, key, dtype = kept[name], f"optimizer/{slot}/{name}", str(tensor.dtype).removeprefix("torch.")
        if tensor.shape == parameters.weights[name].exact.shape:
            yield each.shard(key, dtype), each.piece.packed(tensor)
        else:
            yield each.beside(key, dtype, tuple(tensor.shape)), tensor.reshape(-1)


def from_checkpoint(found: Checkpoint, key: str, piece: Piece) -> Tensor:
    """What `of_checkpoint` gave of a piece, in its shape, under whatever plan; a counter as it is."""
    is_counter = found.shape(key) != piece.local.shape
    return found.read(key) if is_counter else piece.shaped(piece.read(found, key))

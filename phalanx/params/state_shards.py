"""What a rank keeps, described by the model's own names, so that any other plan can take it up from there.

Where it goes and comes from is the caller's business; how it lies on the device is `buckets.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from phalanx.params.flat import Piece
from phalanx.params.optimizer import Optimizer
from phalanx.params.parameters import Parameters
from phalanx.runtime.formation import Formation
from phalanx.state.checkpoint import Checkpoint
from phalanx.state.layout import StateShard
from phalanx.state.local import Local

Held = tuple[StateShard, Tensor]  # with its data


def of_parameters(formation: Formation, parameters: Parameters, *, exact: bool) -> Iterator[Held]:
    """Parameters by their own names, in the highest precision there is (`exact`) or in that of training."""
    for name, weight in parameters.weights.items():
        tensor = weight.exact if exact else weight.copy
        yield _described(name, weight.piece, tensor, formation.owns(weight))


def of_checkpoint(formation: Formation, parameters: Parameters, optimizer: Optimizer) -> Iterator[Held]:
    """Everything that training must go on from."""
    for weight in parameters.weights.values():
        yield _described(weight.key, weight.piece, weight.exact, formation.owns(weight))
    for slot, name, tensor in optimizer.tensors():
        weight = parameters.weights[name]
        piece, owned = weight.piece, formation.owns(weight)
        if tensor.shape != weight.exact.shape:  # a counter, the same on every rank that holds a part
            piece, owned = Piece.whole(name, Local(tuple(tensor.shape))), owned and piece.has_first
        yield _described(f"optimizer/{slot}/{name}", piece, tensor, owned)


def from_checkpoint(found: Checkpoint, key: str, piece: Piece) -> Tensor:
    """What `of_checkpoint` gave of a piece, in its shape, under whatever plan; a counter as it is."""
    is_counter = found.shape(key) != piece.local.shape
    return found.read(key) if is_counter else piece.shaped(piece.read(found, key))


def _described(key: str, piece: Piece, tensor: Tensor, owned: bool) -> Held:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StateShard(key, piece.local.shape, dtype, piece.boxes(), owned), piece.packed(tensor)

"""Optimizers that look at whole matrices (Muon, Adafactor), whatever lies where: every tensor that ranks hold parts of
has an owner among them, which gets all of it, updates it with the optimizer's own arithmetic, and gives it back.

What an owner keeps besides (momentum) it keeps whole, so that a checkpoint of it serves every plan. Tensors that every
rank has whole are updated where they are, and so is what an element-wise optimizer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from phalanx.comm.links import Group
from phalanx.errors import CheckpointError
from phalanx.params.flat import Piece
from phalanx.params.layout_of import Kept, StateLayout
from phalanx.params.parameters import Weight
from phalanx.plan.mesh import Mesh
from phalanx.state.layout import StateShard, whole

KIND = "kind"  # of a parameter group: which optimizer updates it
GroupOf = Callable[[str, Sequence[int]], int]


@dataclass(frozen=True)
class Kind:
    """An optimizer's class and arguments. by_matrix: whether it needs tensors whole."""

    make: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    by_matrix: bool


class Holders:
    """Who keeps which part of the trained tensors, among the ranks of one stage; and where they are updated."""

    def __init__(self, layout: StateLayout, rank: int, device: torch.device) -> None:
        self.rank, self.device, self._layout = rank, device, layout
        self.dtype = torch.float32 if layout.facts.masters else getattr(torch, layout.facts.dtype)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        mesh = Mesh.of(self._layout.plan)
        stage = mesh.coordinates(self.rank)[0]
        return tuple(each for each in mesh.world if mesh.coordinates(each)[0] == stage)

    @property
    def num_ranks(self) -> int:
        """Of the plan, those of other stages too."""
        return self._layout.plan.world

    @cached_property
    def _kept(self) -> dict[int, list[Kept]]:
        return {rank: [kept for kept in self._layout.kept(rank) if kept.facts.trained] for rank in self.ranks}

    @cached_property
    def pieces(self) -> dict[int, dict[str, Piece]]:
        return {rank: {kept.facts.name: kept.piece for kept in own} for rank, own in self._kept.items()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {kept.facts.name: kept.facts.shape for own in self._kept.values() for kept in own}

    @cached_property
    def counts(self) -> set[str]:
        """Those whose state is saved from this stage: a tied one is on two."""
        return {kept.facts.name for own in self._kept.values() for kept in own if kept.owned}

    @cached_property
    def split(self) -> tuple[str, ...]:
        """What not every rank has whole, the largest first, so that those updated at once are alike."""
        found = [name for name in self.shapes if not all(self._has_whole(rank, name) for rank in self.ranks)]
        return tuple(sorted(found, key=lambda name: -torch.Size(self.shapes[name]).numel()))

    def _has_whole(self, rank: int, name: str) -> bool:
        piece = self.pieces[rank].get(name)
        return piece is not None and piece.is_whole and piece.local.is_whole

    def largest(self, name: str) -> int:
        """The most elements that one of them keeps."""
        return max(piece.stop - piece.start for own in self.pieces.values() if (piece := own.get(name)) is not None)


def owners(holders: Holders, is_by_matrix: Callable[[str, Sequence[int]], bool]) -> dict[str, int]:
    """Of the tensors that are split and that their optimizer needs whole, each one's owner, in turn."""
    wanted = [name for name in holders.split if is_by_matrix(name, holders.shapes[name])]
    return {name: holders.ranks[index % len(holders.ranks)] for index, name in enumerate(wanted)}


class MatrixWise(torch.optim.Optimizer):
    """Updates pieces of parameters as their kinds of optimizer would update whole ones. groups: each names its kind.
    group_of: the number of a parameter's group, also of one that has no piece here. holders: None in a process that is
    alone."""

    def __init__(
        self, groups: list[dict[str, Any]], kinds: Mapping[str, Kind], weights: Mapping[str, Weight], lr: float,
        group_of: GroupOf, holders: Holders | None,
    ) -> None:  # fmt: skip
        super().__init__(groups, {"lr": lr})
        self._kinds, self._weights, self._group_of, self._holders = kinds, weights, group_of, holders
        self._owner_of = {} if holders is None else owners(holders, self._is_by_matrix)
        self._exchanged = list(self._owner_of)
        self._owned: dict[str, torch.optim.Optimizer] = {}
        self._group_of_ranks: Group | None = None
        elsewhere = {id(weights[name].exact) for name in self._exchanged if name in weights}
        self._here = [self._made(group, elsewhere) for group in self.param_groups]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that must be connected; none where nothing is exchanged."""
        return self._holders.ranks if self._holders is not None and self._exchanged else ()

    def connect(self, group: Group) -> None:
        """group: of `ranks`."""
        self._group_of_ranks = group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Every rank of `ranks` makes it."""
        for inner, group in zip(self._here, self.param_groups, strict=True):
            if inner is not None:
                inner.param_groups[0].update(_options(group))
                inner.step()
        at_once = len(self.ranks) or 1  # every rank owns one of them
        for first in range(0, len(self._exchanged), at_once):
            self._update_together(self._exchanged[first : first + at_once])

    def forget(self) -> None:
        """Lets go of all tensors."""
        self._weights, self._here = {}, []
        self._owned.clear()

    def go_on_as(self, other: MatrixWise) -> None:
        """From now on with what another one updates, which has the same groups."""
        for name in ("_weights", "_holders", "_owner_of", "_exchanged", "_owned", "_group_of_ranks", "_here"):
            setattr(self, name, getattr(other, name))

    def owned(self) -> Iterator[tuple[StateShard, Tensor]]:
        """What is kept whole here, as a checkpoint has it."""
        for name, inner in self._owned.items():
            assert self._holders is not None
            for slot, value in inner.state[inner.param_groups[0]["params"][0]].items():
                if not isinstance(value, Tensor):
                    raise CheckpointError(
                        f"{type(inner).__name__} keeps a {type(value).__name__} in {slot} of {name}, which cannot be "
                        "saved",
                        "choose an optimizer whose state holds tensors",
                    )
                if name in self._holders.counts:
                    yield whole(f"optimizer/{slot}/{name}", value)

    def take(self, slot: str, name: str, read: Callable[[str, str], Tensor]) -> bool:
        """Takes back what `owned` gave of one tensor; whether it is one that is exchanged."""
        if name not in self._exchanged:
            return False
        if self._owner(name) == self._rank:
            assert self._holders is not None
            inner = self._optimizer_of(name, torch.empty(self._shape(name), device=self._holders.device))
            inner.state[inner.param_groups[0]["params"][0]][slot] = read(slot, name).to(self._holders.device)
        return True

    # One after the other: tensors are gathered, each to its owner; owners update; what they made is given to all.

    def _update_together(self, names: Sequence[str]) -> None:
        group, ranks = self._connected, len(self.ranks)
        sent = [self._mine(name) for name in names]
        gathered = [torch.empty(ranks * own.numel(), dtype=own.dtype, device=own.device) for own in sent]
        for pending in [group.all_gather(*pair) for pair in zip(gathered, sent, strict=True)]:
            pending.wait("matrices for their owners")
        results = [self._updated(name, all_of.view(ranks, -1)) for name, all_of in zip(names, gathered, strict=True)]
        pending_results = [
            group.broadcast(result, self._owner(name)) for name, result in zip(names, results, strict=True)
        ]
        for name, pending, result in zip(names, pending_results, results, strict=True):
            pending.wait("matrices from their owners")
            if name in self._weights:
                weight = self._weights[name]
                weight.exact.copy_(weight.piece.of(result.view(self._shape(name))).view(weight.exact.shape))

    def _mine(self, name: str) -> Tensor:
        """This rank's part: values, gradient, and whether there is one."""
        assert self._holders is not None
        room = self._holders.largest(name)
        sent = torch.zeros(2 * room + 1, dtype=self._holders.dtype, device=self._holders.device)
        if name in self._weights:
            value = self._weights[name].exact
            sent[: value.numel()].copy_(value.reshape(-1))
            if value.grad is not None:
                sent[room : room + value.numel()].copy_(value.grad.reshape(-1))
                sent[-1] = 1
        return sent

    def _updated(self, name: str, parts: Tensor) -> Tensor:
        """parts: those of all ranks. The whole tensor after its update, flat; room for it where this is not its
        owner."""
        value = torch.empty(self._shape(name), dtype=parts.dtype, device=parts.device)
        if self._owner(name) != self._rank:
            return value.reshape(-1)
        room, gradient = (parts.shape[1] - 1) // 2, torch.empty_like(value)
        assert self._holders is not None
        for rank, part in zip(self.ranks, parts, strict=True):
            piece = self._holders.pieces[rank].get(name)
            if piece is not None:
                _put(value, piece, part[: piece.stop - piece.start])
                _put(gradient, piece, part[room : room + piece.stop - piece.start])
        if bool(parts[:, -1].any()):
            self._apply(name, value, gradient)
        return value.reshape(-1)

    def _apply(self, name: str, value: Tensor, gradient: Tensor) -> None:
        inner = self._optimizer_of(name, value)
        parameter = inner.param_groups[0]["params"][0]
        inner.param_groups[0].update(_options(self._group(name)))
        parameter.data, parameter.grad = value, gradient
        inner.step()
        parameter.data, parameter.grad = value.new_empty(0), None  # only its state stays

    def _optimizer_of(self, name: str, like: Tensor) -> torch.optim.Optimizer:
        if name not in self._owned:
            kind, parameter = self._kinds[self._group(name)[KIND]], torch.nn.Parameter(like)
            group = {"params": [parameter], **_options(self._group(name))}
            self._owned[name] = kind.make([group], **kind.arguments)
        return self._owned[name]

    def _made(self, group: dict[str, Any], elsewhere: set[int]) -> torch.optim.Optimizer | None:
        """What updates those of a group that are updated here; it keeps its state in this one's."""
        kind = self._kinds[group[KIND]]
        here = [tensor for tensor in group["params"] if id(tensor) not in elsewhere]
        if not here:
            return None
        inner = kind.make([{"params": here, **_options(group)}], **kind.arguments)
        inner.state = self.state
        return inner

    def _is_by_matrix(self, name: str, shape: Sequence[int]) -> bool:
        return self._kinds[self.param_groups[self._group_of(name, shape)][KIND]].by_matrix

    def _group(self, name: str) -> dict[str, Any]:
        return self.param_groups[self._group_of(name, self._shape(name))]

    def _shape(self, name: str) -> tuple[int, ...]:
        assert self._holders is not None
        return self._holders.shapes[name]

    def _owner(self, name: str) -> int:
        return self._owner_of[name]

    @property
    def _connected(self) -> Group:
        assert self._group_of_ranks is not None, "connected before its first step"
        return self._group_of_ranks

    @property
    def _rank(self) -> int:
        assert self._holders is not None
        return self._holders.rank


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", KIND, "lr_scale")}


def _put(tensor: Tensor, piece: Piece, elements: Tensor) -> None:
    """A piece to its place in the whole tensor."""
    data, at = piece.packed(elements), 0
    for box in piece.boxes():
        tensor[box.slices()] = data[at : at + box.numel].view(box.shape)
        at += box.numel

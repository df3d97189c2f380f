"""Sends and receives between stages on different ranks; stages on the same rank hand over by reference.

A result is sent directly after the computation that gives it, each slice and half of a micro-batch by itself; stages
that run once per micro-batch send and get theirs with slice 0. A receive is posted one computation of a stage ahead of
its use, or more, so that the message travels behind that computation, and on each channel in the order of the sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from phalanx.program.instructions import Instruction, Op, Program, insert
from phalanx.program.visits import in_visits, visit_of

Piece = tuple[Op, int, int, int | None]  # F, B or W (a BW counts as the B others wait for), stage, micro-batch, slice
Channel = tuple[Op, int]  # F or B, the pp index at the other end
Half = int | None


@dataclass
class Span:
    """Where a stage's computation on a micro-batch begins, and where it ends for each half."""

    begin: int
    ends: dict[Half, int] = field(default_factory=dict[Half, int])


@dataclass(frozen=True)
class Route:
    """Where a stage's inputs come from and its results go: stages in a row, each held by one rank of the pipeline."""

    num_stages: int
    holder: Callable[[int], int]  # stage → pp index

    def neighbour(self, stage: int, step: int) -> int | None:
        """The pp index that holds the stage `step` further on, where that is another rank."""
        if not 0 <= stage + step < self.num_stages:
            return None
        peer = self.holder(stage + step)
        return None if peer == self.holder(stage) else peer


def add_messages(programs: Sequence[Program], route: Route, split: bool, num_ahead: int = 1) -> tuple[Program, ...]:
    """Adds the messages to the programs of all ranks of a pipeline. Peers are pp indices. split: see `visits.py`.
    num_ahead: by how many computations of its stage a receive is posted before its use."""
    spans = [_spans(program, split) for program in programs]
    place = {piece: order for pieces in spans for order, piece in enumerate(pieces)}
    return tuple(_with_messages(program, spans[p], route, place, num_ahead) for p, program in enumerate(programs))


def _with_messages(
    program: Program, spans: dict[Piece, Span], route: Route, place: dict[Piece, int], num_ahead: int
) -> Program:
    begins = [span.begin for span in spans.values()]
    receives: defaultdict[int, list[Instruction]] = defaultdict(list)
    for (_, peer), pieces in _arriving(spans, route, place).items():
        pieces.sort(key=lambda piece: place[_next(piece, -1)])
        for piece, posted in zip(pieces, _posts([place[piece] for piece in pieces], num_ahead)):
            receives[begins[posted]] += [_receive(piece, peer, half) for half in spans[piece].ends]
    leaving = [piece for piece in spans if _next(piece, 1) in place]
    sends = {end: _sends(piece, route, half) for piece in leaving for half, end in spans[piece].ends.items()}
    return insert(program, receives, sends)


def _posts(uses: list[int], num_ahead: int) -> list[int]:
    """When to post receives that arrive in this order: so far ahead of the use, none after one that arrives later."""
    posts = [max(0, use - num_ahead) for use in uses]
    return list(accumulate(reversed(posts), min))[::-1]


def _spans(program: Program, split: bool) -> dict[Piece, Span]:
    """Each stage's computation on each micro-batch, in order."""
    spans: dict[Piece, Span] = {}
    for position, instruction in enumerate(program):
        if in_visits(instruction):
            visit = visit_of(instruction, split)
            assert visit.stage is not None and visit.micro_batch is not None
            piece = (Op.B if visit.op is Op.BW else visit.op, visit.stage, visit.micro_batch, visit.slice)
            spans.setdefault(piece, Span(position)).ends[instruction.half] = position
    return spans


def _next(piece: Piece, way: int) -> Piece:
    """The piece that comes after this one in its own direction (way = 1), or before it (-1)."""
    op, stage, micro_batch, slice = piece
    return (op, stage + (way if op is Op.F else -way), micro_batch, slice)


def _arriving(spans: dict[Piece, Span], route: Route, known: Container[Piece]) -> dict[Channel, list[Piece]]:
    arriving: defaultdict[Channel, list[Piece]] = defaultdict(list)
    for piece in spans:
        op, stage, *_ = piece
        if op is Op.W or _next(piece, -1) not in known:
            continue
        if (peer := route.neighbour(stage, -1 if op is Op.F else 1)) is not None:
            arriving[op, peer].append(piece)
    return arriving


def _receive(piece: Piece, peer: int, half: Half) -> Instruction:
    op, stage, micro_batch, slice = piece
    kind = Op.RECV_F if op is Op.F else Op.RECV_B
    return Instruction(kind, stage, micro_batch, peer=peer, half=half, slice=slice)


def _sends(piece: Piece, route: Route, half: Half) -> list[Instruction]:
    op, stage, micro_batch, slice = piece
    if op is Op.W or (peer := route.neighbour(stage, 1 if op is Op.F else -1)) is None:
        return []
    kind = Op.SEND_F if op is Op.F else Op.SEND_B
    return [Instruction(kind, stage, micro_batch, peer=peer, half=half, slice=slice)]

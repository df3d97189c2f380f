"""When a wire may be dropped: after the last instruction that reads it, as it was written last.

A segment that is computed again writes its wires anew, so what the forward wrote need not live until then; what the
repetition itself reads must. A wire made without communication is made when it is first read, and its source lives that
long. A wire that belongs to the whole micro-batch lives until the last of its slices has read it. Only wires are looked
at: what a forward keeps for its backward is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.shape import ModelShape
from phalanx.program.wires import Wires

Leaving = Callable[[int], Collection[str]]  # stage → wires that it hands on, the last one the loss
Place = tuple[int | None, int | None, int | None, int | None]  # stage, micro-batch, slice, half
_FORWARD = frozenset((Op.F, Op.CF))
_AGAIN = frozenset((Op.A, Op.CA))
_AFTERWARDS = _AGAIN | {Op.B, Op.BW}


def drops(program: Program, shape: ModelShape, leaving: Leaving) -> dict[Instruction, tuple[str, ...]]:
    """Per instruction the wires that its stage needs no more once it has run.

    A wire that leaves is dropped by what hands it on, and not named here; unless it `stays` there and is read again.
    """
    return {instruction: tuple(wires) for instruction, wires in _followed(program, shape, leaving).dropped.items()}


def stays(program: Program, shape: ModelShape, leaving: Leaving) -> dict[int, frozenset[str]]:
    """Per stage the wires that it hands on and still reads, when it computes again or in later slices: handing on must
    not drop them."""
    return {stage: frozenset(wires) for stage, wires in _followed(program, shape, leaving).stays.items()}


def _followed(program: Program, shape: ModelShape, leaving: Leaving) -> _Lifetimes:
    lifetimes = _Lifetimes(shape, leaving, program)
    for instruction in program:
        lifetimes.see(instruction)
    for place in list(lifetimes.live):
        lifetimes.end(place, list(lifetimes.live[place]))
    lifetimes.drop_what_stays()
    return lifetimes


@dataclass
class _Life:
    """One writing of a wire: by what, and what read it last."""

    maker: Instruction | None  # None: it came from the stage before
    last: Instruction


@dataclass
class _Lifetimes:
    shape: ModelShape
    leaving: Leaving
    program: Program
    live: dict[Place, dict[str, _Life]] = field(default_factory=dict[Place, dict[str, _Life]])
    dropped: dict[Instruction, list[str]] = field(default_factory=dict[Instruction, list[str]])
    stays: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    handed_on: list[tuple[Instruction, str]] = field(default_factory=list[tuple[Instruction, str]])

    def __post_init__(self) -> None:
        self.wires = Wires(self.shape)
        self._blocks: dict[int | None, set[int]] = {}
        for it in self.program:
            if it.op in _FORWARD and it.block is not None:
                self._blocks.setdefault(it.stage, set()).add(it.block)
        self._again = {(*_place(it), it.block, it.step) for it in self.program if it.op is Op.A}
        # What stays on the rank is handed on when the stage's forward has ended.
        self._handing = {_place(it): it for it in self.program if it.op in _FORWARD or it.op is Op.SEND_F}

    def see(self, it: Instruction) -> None:
        self._use(it)
        if self._handing.get(_place(it)) == it:
            for wire in self._handed_on_with(it):
                self._read(it, wire)

    def _use(self, it: Instruction) -> None:
        if it.block is None or it.step is None or it.op in (Op.W, Op.CB):
            return
        step = self.shape.steps_of(it.block)[it.step]
        if it.op in _FORWARD | _AGAIN:
            for wire in step.reads:
                self._read(it, wire)
            for wire in step.writes:
                self.end(self._where(it, wire), [wire])
                self.live[self._where(it, wire)][wire] = _Life(it, it)
        elif (*_place(it), it.block, it.step) not in self._again:
            for wire in step.reads:
                self._read_gathered(it, wire)

    def end(self, place: Place, wires: Iterable[str]) -> None:
        """These wires are written anew or never read again, and so is what was made of them."""
        own = self.live.setdefault(place, {})
        for wire in wires:
            if (life := own.pop(wire, None)) is not None:
                self._drop(place, wire, life)
            for where in self._readers(place, wire):
                self.end(where, [other for other in self.live[where] if self._source(where, other) == wire])

    def _read(self, it: Instruction, wire: str) -> None:
        own = self.live.setdefault(self._where(it, wire), {})
        if wire in own:
            own[wire].last = it
            return
        source = self._source(_place(it), wire)
        if source is not None:
            self._read(it, source)
        own[wire] = _Life(None if source is None else it, it)

    def _read_gathered(self, it: Instruction, wire: str) -> None:
        """A backward reads what was gathered again for it alone; anything else its forward kept."""
        made = self.wires.origin(wire)
        origin = self.live.get(self._where(it, made), {}).get(made)
        if origin is not None and origin.maker is not None and origin.maker.op is Op.CA:
            self._read(it, wire)

    def _handed_on_with(self, it: Instruction) -> list[str]:
        """The wires that leave with a stage's part of a micro-batch and were there: others only pass through."""
        assert it.stage is not None
        own = [wire for wire in self.leaving(it.stage) if self._is_handed_on_by(it, wire)]
        where, place = self._where, _place(it)
        return [w for w in own if w in self.live.get(where(it, w), {}) or self._source(place, w) is not None]

    def _where(self, it: Instruction, wire: str) -> Place:
        """Where a wire lives that an instruction reads or writes: with its slice, or with the micro-batch."""
        stage, micro_batch, slice, half = _place(it)
        return stage, micro_batch, None if wire in self.shape.whole_wires else slice, half

    def _readers(self, place: Place, wire: str) -> list[Place]:
        """The places that may hold something made of a wire."""
        if wire not in self.shape.whole_wires:
            return [place]
        stage, micro_batch, _, half = place
        return [other for other in self.live if (other[0], other[1], other[3]) == (stage, micro_batch, half)]

    def _source(self, place: Place, wire: str) -> str | None:
        """What a stage before has made arrives as it is."""
        return self.wires.source(wire, self._blocks.get(place[0], ()))

    def _drop(self, place: Place, wire: str, life: _Life) -> None:
        stage, *_ = place
        assert stage is not None
        written_again = life.maker is not None and life.maker.op in _AFTERWARDS
        if wire in self.leaving(stage) and not written_again:
            if self._is_handed_on_by(life.last, wire):
                self.handed_on.append((life.last, wire))
                return
            self.stays.setdefault(stage, set()).add(wire)
        self.dropped.setdefault(life.last, []).append(wire)

    def drop_what_stays(self) -> None:
        """Where other micro-batches have more slices, a wire stays too that nothing reads once it is handed on."""
        for it, wire in self.handed_on:
            if it.stage is not None and wire in self.stays.get(it.stage, ()):
                self.dropped.setdefault(it, []).append(wire)

    def _is_handed_on_by(self, it: Instruction, wire: str) -> bool:
        return self._handing.get(_place(it)) == it and not (it.slice and wire in self.shape.whole_wires)


def _place(it: Instruction) -> Place:
    return it.stage, it.micro_batch, it.slice, it.half

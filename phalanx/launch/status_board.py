"""The status board: memory that all local ranks and their supervisor see, one slot per rank and one abort flag.

A rank writes what it is doing, the supervisor reads it to notice who stopped answering and to say where. It carries
nothing that training depends on, so a reader may see a text that is half written.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Seconds a rank may show no sign of life: in a step (the option `silence`), and at least in phases with long calls that
# keep every Python thread of the rank waiting.
SILENCE = 15.0
LONG_SILENCE = 60.0
PHASES = ("start", "capture", "compile", "step", "evaluate", "save", "generate", "recover", "loop", "finished")
QUICK_PHASES = ("step", "evaluate")
_LONGEST_LOOK = 2.0

_HEADER = 256
_SLOT = 1024
_COUNTERS = struct.Struct("<Qq")  # sign of life, step
_PHASE = slice(16, 32)
_PLACE = slice(32, 64)
_INSTRUCTION = slice(64, 192)
_BEGUN = struct.Struct("<Q")  # how many instructions
_BEGUN_AT = 192
_RECENT_AT, NUM_RECENT, _TEXT = 200, 25, 32  # the newest of them, in a ring
_GUARDED_AT = 1000  # whether the rank goes on when another is lost
_TOLD_AT = 1001  # whether what led to the generation that the rank is in was told
_WAITS_AT = 1002  # whether the rank waits for others
_ASKED_AT = 1003  # whether the rank is to show where it stands
_ENTERED, _ENTERED_AT = struct.Struct("<I"), 1004  # the generation that the rank is in
_AWAITED_AT = 1008  # the generation that the rank waits for
_FINISHED_AT = 1016  # how many steps the rank has finished
_GENERATION_AT = 8  # of the board: the newest that was published
_INVITED_AT, _GROWS_AT = 16, 17  # of the board: whether processes wait to be taken in; whether more can be had
_WANTED_AT = 24  # of the board: how many ranks are asked for
_STORE = slice(64, 256)  # of the board: where the job's store is now


@dataclass(frozen=True)
class StatusView:
    """What a slot said when it was read; `step` is -1 before the first."""

    beat: int
    step: int
    phase: str
    place: str
    instruction: str
    recent: tuple[str, ...] = ()  # the instructions begun last, the newest last

    def where(self) -> str:
        """'in step 5 at F1.3', 'during save after step 5', 'during capture'."""
        text = f"during {self.phase or 'start'}"
        if self.phase == "step" and self.step >= 0:
            text = f"in step {self.step}"
        elif self.phase in ("evaluate", "save", "generate") and self.step > 0:
            text = f"{text} after step {self.step}"
        return f"{text} at {self.instruction}" if self.instruction else text


class StatusSlot:
    """One rank's part of the board."""

    def __init__(self, memory: mmap.mmap, rank: int) -> None:
        start = _HEADER + rank * _SLOT
        self._memory, self._start = memory, start
        self._phase, self._place, self._instruction = (
            slice(start + part.start, start + part.stop) for part in (_PHASE, _PLACE, _INSTRUCTION)
        )
        self._beat, self._step = _COUNTERS.unpack_from(memory, start)
        self._begun, self._ring = 0, start + _RECENT_AT

    def clear(self) -> None:
        """As before the first job, but with the next sign of life, so that a reader sees the change."""
        self._memory[self._start + _PHASE.start : self._start + _SLOT] = bytes(_SLOT - _PHASE.start)
        self._step, self._begun = -1, 0
        self.enter("start")
        self.beat()

    def beat(self) -> None:
        self._beat += 1
        _COUNTERS.pack_into(self._memory, self._start, self._beat, self._step)

    def at_step(self, step: int) -> None:
        self._step = step
        self.at("")
        self.beat()

    def enter(self, phase: str) -> None:
        """Begin one of PHASES."""
        assert phase in PHASES, phase
        self._memory[self._phase] = phase.encode().ljust(16, b"\0")
        self.at("")

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """A phase in the middle of another, which then goes on; an error leaves the board as it is, to be read."""
        before = self.read(with_recent=False).phase
        self.enter(phase)
        yield
        self.enter(before)

    def at(self, instruction: str) -> None:
        """The instruction that now begins; "" for none."""
        if instruction:
            self.show(*shown(instruction))
        else:
            self._memory[self._instruction] = bytes(128)

    def show(self, text: bytes, short: bytes) -> None:
        """An instruction (`shown`). Called for each that begins, so it must stay near a microsecond."""
        self._memory[self._instruction] = text
        place = self._ring + self._begun % NUM_RECENT * _TEXT
        self._memory[place : place + _TEXT] = short
        self._begun += 1
        _BEGUN.pack_into(self._memory, self._start + _BEGUN_AT, self._begun)

    @property
    def begun(self) -> int:
        """How many instructions this process has begun."""
        return _BEGUN.unpack_from(self._memory, self._start + _BEGUN_AT)[0]

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others."""
        return self._memory[self._start + _WAITS_AT] != 0

    def wait(self, waits: bool) -> None:
        """Called for every message. What threads in the background wait for keeps nobody waiting."""
        if threading.get_ident() == threading.main_thread().ident:
            self._memory[self._start + _WAITS_AT] = waits

    @property
    def is_asked(self) -> bool:
        """Whether the rank is to show where it stands."""
        return self._memory[self._start + _ASKED_AT] != 0

    def ask_where(self, asks: bool) -> None:
        self._memory[self._start + _ASKED_AT] = asks

    @property
    def guarded(self) -> bool:
        """Whether this rank goes on in a new generation when another is lost."""
        return self._memory[self._start + _GUARDED_AT] != 0

    def guard(self, guarded: bool) -> None:
        self._memory[self._start + _GUARDED_AT] = int(guarded)

    @property
    def awaited(self) -> int:
        """The generation that this rank waits for because its links are broken, 0 if it does not."""
        return _BEGUN.unpack_from(self._memory, self._start + _AWAITED_AT)[0]

    def await_generation(self, number: int) -> None:
        _BEGUN.pack_into(self._memory, self._start + _AWAITED_AT, number)

    @property
    def entered(self) -> int:
        """The generation that this rank is in."""
        return _ENTERED.unpack_from(self._memory, self._start + _ENTERED_AT)[0]

    def enter_generation(self, number: int) -> None:
        self._memory[self._start + _TOLD_AT] = 0
        _ENTERED.pack_into(self._memory, self._start + _ENTERED_AT, number)
        self.await_generation(0)

    @property
    def has_told(self) -> bool:
        """Whether this rank went on in its generation, and what led to it was told."""
        return self._memory[self._start + _TOLD_AT] != 0

    def went_on(self) -> None:
        self._memory[self._start + _TOLD_AT] = 1

    @property
    def finished(self) -> int:
        """How many steps this process has ended, those included that were made again."""
        return _BEGUN.unpack_from(self._memory, self._start + _FINISHED_AT)[0]

    def finish_step(self) -> None:
        _BEGUN.pack_into(self._memory, self._start + _FINISHED_AT, self.finished + 1)

    def content(self) -> bytes:
        """All that it shows, for a board on another machine."""
        return self._memory[self._start : self._start + _SLOT]

    def fill(self, content: bytes) -> None:
        """Shows what a slot of another board does."""
        self._memory[self._start : self._start + _SLOT] = content

    def set_place(self, place: str) -> None:
        """What this rank is in the plan, for messages: 'stage 1'."""
        self._memory[self._place] = place.encode()[:32].ljust(32, b"\0")

    def read(self, with_recent: bool = True) -> StatusView:
        """with_recent: with the newest instructions, which takes most of the time."""
        beat, step = _COUNTERS.unpack_from(self._memory, self._start)
        texts = (self._memory[part].rstrip(b"\0").decode(errors="replace") for part in
                 (self._phase, self._place, self._instruction))  # fmt: skip
        return StatusView(beat, step, *texts, recent=self._read_recent() if with_recent else ())

    def _read_recent(self) -> tuple[str, ...]:
        (begun,) = _BEGUN.unpack_from(self._memory, self._start + _BEGUN_AT)
        places = [self._ring + n % NUM_RECENT * _TEXT for n in range(max(0, begun - NUM_RECENT), begun)]
        texts = (self._memory[p : p + _TEXT].rstrip(b"\0").decode(errors="replace") for p in places)
        return tuple(text for text in texts if text)  # those of an earlier job were cleared


def shown(instruction: str) -> tuple[bytes, bytes]:
    """What the board shows of an instruction now, and among the newest ones."""
    text = instruction.encode()[:128].ljust(128, b"\0")
    return text, text[:_TEXT]


class StatusBoard:
    """The whole board, in a file that several processes map or in the memory of one."""

    def __init__(self, memory: mmap.mmap, num_slots: int) -> None:
        self._memory = memory
        self.slots = tuple(StatusSlot(memory, rank) for rank in range(num_slots))

    @classmethod
    def create(cls, path: Path, num_slots: int) -> StatusBoard:
        path.write_bytes(bytes(_HEADER + num_slots * _SLOT))
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> StatusBoard:
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        return cls(memory, (len(memory) - _HEADER) // _SLOT)

    @classmethod
    def private(cls, num_slots: int) -> StatusBoard:
        """A board that no other process sees."""
        return cls(mmap.mmap(-1, _HEADER + num_slots * _SLOT), num_slots)

    @property
    def aborted(self) -> bool:
        return self._memory[0] != 0

    def abort(self) -> None:
        """Tell every rank that the job is over."""
        self._memory[0] = 1

    @property
    def generation(self) -> int:
        """The newest that was published; 0 is the one that a job begins with."""
        return _BEGUN.unpack_from(self._memory, _GENERATION_AT)[0]

    def publish(self, generation: int) -> None:
        """Tell every rank that the ranks of the job are others from now on."""
        _BEGUN.pack_into(self._memory, _GENERATION_AT, generation)

    @property
    def invited(self) -> bool:
        """Whether processes that were added wait for the ranks to meet them between two steps."""
        return self._memory[_INVITED_AT] != 0

    def invite(self, waits: bool) -> None:
        self._memory[_INVITED_AT] = int(waits)

    @property
    def room(self) -> int:
        """How many ranks the job may have; 0 where it cannot get others."""
        return len(self.slots) if self._memory[_GROWS_AT] else 0

    def let_grow(self, grows: bool) -> None:
        self._memory[_GROWS_AT] = int(grows)

    @property
    def wanted(self) -> int:
        """How many ranks the job asks for; 0 if it does not."""
        return _BEGUN.unpack_from(self._memory, _WANTED_AT)[0]

    def want(self, num_ranks: int) -> None:
        _BEGUN.pack_into(self._memory, _WANTED_AT, num_ranks)

    @property
    def store(self) -> tuple[str, int] | None:
        """Host and port of the job's store, where that has moved since the job began."""
        host, _, port = self._memory[_STORE].rstrip(b"\0").decode().rpartition(" ")
        return (host, int(port)) if host else None

    def move_store(self, host: str, port: int) -> None:
        """Before a generation is published that meets there."""
        self._memory[_STORE] = f"{host} {port}".encode().ljust(_STORE.stop - _STORE.start, b"\0")

    def reset(self) -> None:
        self._memory[0] = 0
        self._memory[_STORE] = bytes(_STORE.stop - _STORE.start)
        self.invite(False)
        self.let_grow(False)
        self.want(0)
        self.publish(0)
        for slot in self.slots:
            slot.clear()


class BoardWatch:
    """Looks on while an engine runs: writes each instruction on the board before it begins."""

    def __init__(self, slot: StatusSlot) -> None:
        self._slot = slot
        self._shown: dict[Hashable, tuple[bytes, bytes]] = {}

    def begin(self, instruction: Hashable) -> None:
        texts = self._shown.get(instruction)
        if texts is None:
            texts = self._shown[instruction] = shown(str(instruction))
        self._slot.show(*texts)

    def ready(self, instruction: Hashable) -> None:
        pass

    def end(self, instruction: Hashable) -> None:
        pass


class RunningClock:
    """Seconds in which this process ran and looked.

    Whoever looks every moment and finds that long has passed was itself stopped, starved or kept waiting; what others
    did meanwhile was not seen, and so does not count.
    """

    def __init__(self, longest_look: float = _LONGEST_LOOK) -> None:
        self._longest, self._seconds, self._looked = longest_look, 0.0, time.monotonic()

    def read(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._looked, self._longest)
        self._looked = now
        return self._seconds


class SilenceWatch:
    """Notices when a counter that should move has not moved for as long as its phase allows."""

    def __init__(self, clock: RunningClock, silence: float = SILENCE) -> None:
        self._clock, self._silence = clock, silence
        self._beat, self._since = -1, clock.read()

    def silent_for(self, view: StatusView, *, suspect: float | None = None) -> float | None:
        """Seconds of silence, if they are more than the phase allows; or, where there is reason to suspect that the
        rank is lost, more than `suspect`."""
        now = self._clock.read()
        if view.beat != self._beat:
            self._beat, self._since = view.beat, now
        allowed = self._silence if view.phase in QUICK_PHASES else max(self._silence, LONG_SILENCE)
        silence = now - self._since
        return silence if silence > min(allowed, suspect or allowed) else None

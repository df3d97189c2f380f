"""Programs in the short view as a grid of text, ranks against time, for people.

Every instruction starts as early as its rank and what it needs allow, in units of time per kind and without
communication; `predict/simulate.py` is for real durations. What can never run is drawn with a `?`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from phalanx.program.instructions import Instruction, Op, Program
from phalanx.program.visits import in_visits, seems_split, visit_of

UNITS: Mapping[Op, int] = {Op.F: 1, Op.B: 1, Op.W: 1, Op.BW: 2}
IDLE = "·"
HERE = "<-- here"


@dataclass(frozen=True)
class Cell:
    """An instruction with its time; `runs` is False where it waits for something that never comes."""

    instruction: Instruction
    start: int
    end: int
    runs: bool = True


@dataclass(frozen=True)
class Mark:
    """A row of the grid, and the instruction in it that is pointed at (none: the row's end)."""

    row: int
    instruction: Instruction | None = None


def short_view(program: Program) -> Program:
    """The computations of stages in a lowered program, in the order in which they begin."""
    split = seems_split(program)
    return tuple(dict.fromkeys(visit_of(instruction, split) for instruction in program if in_visits(instruction)))


def place(programs: Sequence[Program], units: Mapping[Op, int] = UNITS) -> tuple[tuple[Cell, ...], ...]:
    """When each instruction of each program runs."""
    num_stages = 1 + max((it.stage or 0 for program in programs for it in program), default=0)
    known = {_result(it) for program in programs for it in program}
    ends: dict[Instruction, int] = {}  # of F and B (a BW is a B that takes longer)
    rows: list[list[Cell]] = [[] for _ in programs]
    progress = True
    while progress:
        progress = False
        for row, program in zip(rows, programs):
            for it in program[len(row) :]:
                needs = [_at_its_grain(need, known) for need in _needs(it, num_stages)]
                if any(need not in ends for need in needs):
                    break
                start = max([ends[need] for need in needs] + [row[-1].end if row else 0])
                row.append(Cell(it, start, start + units[it.op]))
                ends[_result(it)] = row[-1].end
                progress = True
    return tuple((*row, *_stuck(row, program, units)) for row, program in zip(rows, programs))


def draw(programs: Sequence[Program], labels: Sequence[str], mark: Mark | None = None, width: int = 0) -> str:
    """The grid as lines of text. `width` breaks it into bands of at most so many characters; with a mark only the band
    with the marked place is drawn."""
    rows = place(programs)
    longest = max((len(str(cell.instruction)) for row in rows for cell in row), default=0)
    unit = longest + (3 if mark else 1)  # room for the brackets of the mark, or for a space
    lines = [_line(row, unit, mark.instruction if mark and mark.row == i else None) for i, row in enumerate(rows)]
    margin = max(map(len, labels)) + 2
    num_units = max((cell.end for row in rows for cell in row), default=0)
    per_band = max(1, (width - margin - len(HERE)) // unit) if width else max(1, num_units)
    begins = range(0, max(1, num_units), per_band)
    if mark:
        begins = [_begin_of(mark, rows) // per_band * per_band]
    bands = [_band(lines, labels, margin, begin * unit, (begin + per_band) * unit, mark) for begin in begins]
    return "\n\n".join(bands)


def _needs(it: Instruction, num_stages: int) -> list[Instruction]:
    stage = it.stage
    assert stage is not None
    if it.op is Op.F:
        return [it._replace(stage=stage - 1)] if stage > 0 else []
    if it.op is Op.W:
        return [it._replace(op=Op.B)]
    after = [it._replace(op=Op.B, stage=stage + 1)] if stage + 1 < num_stages else []
    return [it._replace(op=Op.F), *after]


def _at_its_grain(need: Instruction, known: Container[Instruction]) -> Instruction:
    """A stage that runs once per micro-batch does so with slice 0."""
    return need._replace(slice=0) if need.slice and need not in known else need


def _result(it: Instruction) -> Instruction:
    return it._replace(op=Op.B) if it.op is Op.BW else it


def _stuck(row: Sequence[Cell], program: Program, units: Mapping[Op, int]) -> list[Cell]:
    """What never runs, one after the other behind what does."""
    cells: list[Cell] = []
    start = row[-1].end if row else 0
    for it in program[len(row) :]:
        cells.append(Cell(it, start, start + units[it.op], runs=False))
        start = cells[-1].end
    return cells


def _line(row: Sequence[Cell], unit: int, marked: Instruction | None) -> str:
    line = ""
    for cell in row:
        line += IDLE.ljust(unit) * (cell.start - len(line) // unit)
        text = str(cell.instruction) + ("" if cell.runs else "?")
        text = f"[{text}]" if cell.instruction == marked else text
        line += text.ljust(unit * (cell.end - cell.start))
    return line


def _begin_of(mark: Mark, rows: Sequence[Sequence[Cell]]) -> int:
    starts = [cell.start for cell in rows[mark.row] if cell.instruction == mark.instruction]
    return starts[0] if starts else max((cell.end - 1 for cell in rows[mark.row]), default=0)


def _band(lines: Sequence[str], labels: Sequence[str], margin: int, begin: int, end: int, mark: Mark | None) -> str:
    band: list[str] = []
    for row, (label, line) in enumerate(zip(labels, lines)):
        text = (label.ljust(margin) + line[begin:end]).rstrip()
        band.append(f"{text} {HERE}" if mark and mark.row == row else text)
    return "\n".join(band)

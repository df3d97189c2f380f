"""Who looks on while an engine runs: the board, from which a supervisor reads what a rank is doing."""

from __future__ import annotations

from phalanx.launch.board import Slot
from phalanx.program.instructions import Instruction


class BoardWatch:
    """Writes each instruction on the board before it runs."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._texts: dict[Instruction, str] = {}

    def begin(self, instruction: Instruction) -> None:
        text = self._texts.get(instruction)
        if text is None:
            text = self._texts[instruction] = str(instruction)
        self._slot.at(text)

    def ready(self, instruction: Instruction) -> None:
        pass

    def end(self, instruction: Instruction) -> None:
        pass

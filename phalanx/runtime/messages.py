"""Messages between stages: the wires that cross a cut one way, their gradients the other.

Both ends know from `wires.py` what comes, so a message is nothing but the tensors, in order. A message is posted where
the program says so and waited for by the computation that needs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from phalanx.comm.links import Channel, Direction, Pending
from phalanx.model.segment.joint import Outline
from phalanx.program.instructions import Instruction, Op
from phalanx.runtime.micro_batch import MicroBatch, Place, StageRun, place_of
from phalanx.runtime.wires import Wires


class Messages:
    """first_block: the first block of each stage, and as the last entry the number of blocks. channel: what leads from
    one rank to another, for wires ("f") or for gradients ("b"). whole: wires that are the same for all slices of a
    micro-batch, and travel with the first."""

    def __init__(
        self,
        wires: Wires,
        first_block: tuple[int, ...],
        rank: int,
        channel: Callable[[int, int, Direction], Channel],
        device: torch.device,
        whole: Collection[str] = (),
    ) -> None:
        self._whole = whole
        self._wires, self._first, self._rank, self._channel, self._device = wires, first_block, rank, channel, device
        self._arriving: dict[tuple[str, int, Place], list[tuple[str, Tensor, bool, Pending]]] = {}
        self._leaving: deque[Pending] = deque()

    def send_forward(self, instruction: Instruction, batch: MicroBatch, stays: Collection[str] = ()) -> None:
        """The wires alive after a stage; whoever is still to use them has them now, but for those that stay."""
        stage, peer = _ends(instruction)
        run = batch.stages[stage]
        for wire, _ in self._crossing(stage + 1, batch):
            tensor = run.wires[wire] if wire in stays else run.wires.pop(wire)
            self._leave(self._channel(self._rank, peer, "f").send(tensor))

    def send_backward(self, instruction: Instruction, batch: MicroBatch) -> None:
        """The gradients of a stage's inputs; zero for one that the loss does not depend on."""
        stage, peer = _ends(instruction)
        run = batch.stages[stage]
        for wire, outline in self._crossing(stage, batch):
            if outline.differentiable:
                gradient = run.gradients.pop(wire, None)
                gradient = outline.empty(self._device).zero_() if gradient is None else gradient.contiguous()
                self._leave(self._channel(self._rank, peer, "b").send(gradient))

    def post(self, instruction: Instruction, batch: MicroBatch) -> None:
        """Makes room for what is to come and starts receiving it."""
        stage, peer = _ends(instruction)
        forward = instruction.op is Op.RECV_F
        coming: list[tuple[str, Tensor, bool, Pending]] = []
        for wire, outline in self._crossing(stage if forward else stage + 1, batch):
            if forward or outline.differentiable:
                buffer = outline.empty(self._device)
                pending = self._channel(peer, self._rank, "f" if forward else "b").recv(buffer)
                coming.append((wire, buffer, outline.differentiable, pending))
        key = ("f" if forward else "b", stage, place_of(instruction))
        assert key not in self._arriving, f"{instruction} posted twice"
        self._arriving[key] = coming

    def inputs(self, stage: int, place: Place, run: StageRun) -> None:
        """Waits for a stage's inputs, if they were to come by message."""
        for wire, buffer, differentiable, pending in self._arriving.pop(("f", stage, place), ()):
            pending.wait(f"{Op.RECV_F}{stage}.{place[0]}")
            run.wires[wire], run.differentiable[wire] = buffer, differentiable

    def output_gradients(self, stage: int, place: Place, run: StageRun) -> None:
        for wire, buffer, _, pending in self._arriving.pop(("b", stage, place), ()):
            pending.wait(f"{Op.RECV_B}{stage}.{place[0]}")
            run.gradients[wire] = buffer

    def _crossing(self, stage: int, batch: MicroBatch) -> list[tuple[str, Outline]]:
        """What a message between a stage and the one before it holds."""
        found = self._wires.crossing(self._first[stage], batch)
        return [(wire, outline) for wire, outline in found if wire not in self._whole or batch.begin == 0]

    def settle(self) -> None:
        """Waits until everything sent has left, so that its memory may be used for something else."""
        while self._leaving:
            self._leaving.popleft().wait("messages to leave")

    def _leave(self, pending: Pending) -> None:
        self._leaving.append(pending)
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft().wait()


def _ends(instruction: Instruction) -> tuple[int, int]:
    assert instruction.stage is not None and instruction.peer is not None
    return instruction.stage, instruction.peer

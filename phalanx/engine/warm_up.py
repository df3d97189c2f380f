"""Every function of a program run once on zeros before ranks depend on each other, for each new shape.

A message that is being received occupies the GPU until it arrives. Loading a kernel, which happens when it is first
launched, waits for all that the GPU is doing; two ranks that load kernels while each waits for a message of the other
would wait for ever. So all kernels are loaded, and all segments compiled, while nothing is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.compute import Compute
from phalanx.engine.gradients import Sum
from phalanx.engine.linked import ComputeCall, Linked
from phalanx.model.segment.segments import Call, WeightCall
from phalanx.program.instructions import Op

Around = Callable[[ComputeCall, Callable[[], Any]], None]  # what is done with the running of a call


def warm_up(linked: Linked, compute: Compute, done: set[object], around: Around | None = None) -> None:
    """Runs those calls whose functions are not in `done`; forwards come first, as in the program. One that attends to
    a past comes after the forward of its own slice, which leaves it: segments that share functions have one each."""
    new = {call.call.function: call for call in linked.calls if call.call.function not in done}
    forwards = {_place(call): call for call in linked.calls if call.instruction.op is Op.F}
    with torch.no_grad():
        for call in new.values():
            forward = forwards.get(_place(call), call)
            if forward is not call and _attends(call):
                _run(forward, compute.device, None)
            _run(call, compute.device, around)
    done.update(new)
    for inputs in {id(call.inputs): call.inputs for call in new.values()}.values():
        inputs.forget_past()
    if new and compute.device.type == "cuda":
        torch.cuda.synchronize(compute.device)


def _place(call: ComputeCall) -> tuple[int, int, int]:
    return id(call.inputs), call.number, call.instruction.slice or 0


def _attends(call: ComputeCall) -> bool:
    return any(key is not None and key[2] == "past" for key in call.keys)


def _run(call: ComputeCall, device: torch.device, around: Around | None) -> None:
    arguments = arguments_of(call, device)

    def run() -> None:
        run_once(call.call, arguments)

    run() if around is None else around(call, run)


def arguments_of(call: ComputeCall, device: torch.device) -> list[Tensor]:
    """Zeros, but for what comes from the micro-batch's inputs."""
    return [
        zeros_like(call.segment.like(source), device) if key is None else call.inputs[key]
        for source, key in zip(call.call.arguments, call.keys, strict=True)
    ]


def zeros_like(look: Tensor, device: torch.device) -> Tensor:
    """look: without contents."""
    return torch.empty_strided(look.shape, look.stride(), dtype=look.dtype, device=device).zero_()


def run_once(call: Call, arguments: Sequence[Tensor]) -> None:
    """Weight gradients are added up, too."""
    if not isinstance(call, WeightCall):
        call.function(*arguments)
        return
    results, sums = call.function(*arguments[: call.num_taken]), Sum()
    for _ in range(2):
        gradients = call.gradients(arguments, results)
        sums.add({str(i): gradient for i, gradient in enumerate(gradients) if gradient is not None})

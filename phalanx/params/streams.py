"""Work on many tensors spread over a few streams of the device.

torch's kernels for lists of tensors come as a row of launches that each fill the device only in part; two rows side by
side fill it. Nothing else runs on these streams, and whoever calls `run` finds the work in order with its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Streams:
    """`count` streams of a GPU; elsewhere the parts of the work are done one after the other."""

    def __init__(self, device: torch.device, count: int) -> None:
        self._device, self._count = device, count
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" and count > 1 else []

    def run(self, work: Callable[[dict[str, Tensor]], Result], tensors: Mapping[str, Tensor]) -> list[Result]:
        """Calls `work` once for each stream's part of the tensors; the same tensors always fall to the same stream.

        What the streams allocate may be freed at any time: they wait for the caller's stream before they use it again.
        """
        parts = divide(tensors, self._count)
        if not self._streams:
            return [work(part) for part in parts]
        callers = torch.cuda.current_stream(self._device)
        results: list[Result] = []
        for stream, part in zip(self._streams, parts, strict=False):  # few tensors make fewer parts
            stream.wait_stream(callers)
            with torch.cuda.stream(stream):
                results.append(work(part))
        for stream in self._streams:
            callers.wait_stream(stream)
        return results


def divide(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """At most `count` parts of about equal size, none of them empty; each in the order of `tensors`."""
    sizes, stream_of = [0] * count, dict[str, int]()
    for name in sorted(tensors, key=lambda name: -tensors[name].numel()):
        stream_of[name] = sizes.index(min(sizes))
        sizes[stream_of[name]] += tensors[name].numel()
    parts = [{name: tensor for name, tensor in tensors.items() if stream_of[name] == number} for number in range(count)]
    return [part for part in parts if part]

"""How long the blocks of a model take on the device at hand: each distinct one, by tensor-parallel degree and samples.

Rows are kept by graph, shapes, precision, device, number of ranks at work and version of torch, so that what no longer
holds is never found; a block's four parts are kept together once all are known. Planning takes them instead of what a
device's figures say (`planning/work.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from phalanx import tasks
from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.errors import PhalanxError
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.captured import Captured
from phalanx.model.zoo.zoo import ModelSpec
from phalanx.plan.plan import Plan
from phalanx.planning.work import Times
from phalanx.predict.from_profile import block_times
from phalanx.profile.beside import Together
from phalanx.profile.hardware import device_name
from phalanx.profile.segments import PARTS, Effort, Segments, SegmentTimes, alone, time_segment
from phalanx.profile.store import Key, Row, Store, matching
from phalanx.tasks.base import Batch

EFFORT = Effort()
SECONDS = 60.0  # that measuring may take


class Size(NamedTuple):
    """One rank of so many that split tensors, with a micro-batch of so many samples."""

    degree: int
    samples: int


@dataclass(frozen=True)
class Subject:
    """What is measured. tokens: of a sample, where its size is not fixed. ranks: that compute at the same time."""

    spec: ModelSpec
    captured: Captured
    dtype: str
    device: torch.device
    ranks: int
    tokens: int

    @cached_property
    def length(self) -> int:
        """Tokens of a sample as planning counts them: source and target together."""
        dims = self.captured.dims(dict(samples_of(self.spec, 1, self.tokens)))
        return sum(size for dim, size in dims.items() if dim != "batch") or 1

    def first_blocks(self) -> dict[str, str]:
        """Of each template, the name of the first block that has it."""
        found: dict[str, str] = {}
        for block in self.captured.blocks.blocks:
            found.setdefault(block.template, block.name)
        return found

    def key(self, template: str, size: Size) -> Key:
        return {
            "model": self.spec.name, "block": self.first_blocks()[template], "graph": template, "degree": size.degree,
            "samples": size.samples, "tokens": self.length, "dtype": self.dtype, "device": device_name(self.device),
            "ranks": self.ranks, "torch": torch.__version__.split("+")[0],
        }  # fmt: skip


def samples_of(spec: ModelSpec, count: int, tokens: int) -> Batch:
    return tasks.get(spec.task).synthetic(spec.config, batch=count, tokens=tokens, seed=0)


class Outcome(NamedTuple):
    """left: what there was no time for; refused: degrees that the model cannot be split into, and why."""

    measured: int
    known: int
    left: list[Size]
    refused: dict[int, str]


def measure(
    store: Store, subject: Subject, sizes: Sequence[Size], seconds: float = SECONDS,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> Outcome:  # fmt: skip
    """Measures what is not in the store yet, until `seconds` have passed; the first size in any case."""
    missing = [size for size in sizes if not _is_known(store, subject, size)]
    refused: dict[int, str] = {}
    done, until = 0, time.monotonic() + seconds
    with ExitStack() as stack:
        several = subject.ranks > 1 and missing
        pool = stack.enter_context(WorkerPool(subject.ranks, device=subject.device.type)) if several else None
        for number, size in enumerate(missing):
            on_progress(len(sizes) - len(missing) + number, len(sizes))
            if done and time.monotonic() > until:
                return Outcome(done, len(sizes) - len(missing), missing[number:], refused)
            if size.degree in refused:
                continue
            given = (subject.spec, subject.captured, subject.dtype, size, subject.tokens)
            try:
                if pool is None:
                    found = [measure_on_rank(RankContext.alone(str(subject.device)), *given)]
                else:
                    found = pool.run(measure_on_rank, *given)
            except PhalanxError as error:
                if size.degree == 1:
                    raise
                refused[size.degree] = error.message
                continue
            _keep(store, subject, size, found)
            done += 1
    on_progress(len(sizes), len(sizes))
    return Outcome(done, len(sizes) - len(missing), [], refused)


def _is_known(store: Store, subject: Subject, size: Size) -> bool:
    keys = [subject.key(template, size) for template in subject.first_blocks()]
    return all(store.get(f"block {part}", key) is not None for key in keys for part in PARTS)


def _keep(store: Store, subject: Subject, size: Size, found: Sequence[Mapping[str, SegmentTimes]]) -> None:
    """Of all ranks, what the slowest took."""
    for template in found[0]:
        for number, part in enumerate(PARTS):
            slowest = max(own[template][number] for own in found)
            store.put(f"block {part}", subject.key(template, size), slowest)


def forget(store: Store, subject: Subject, sizes: Iterable[Size]) -> None:
    for size in sizes:
        for template in subject.first_blocks():
            for part in PARTS:
                store.forget(f"block {part}", subject.key(template, size))


def measure_on_rank(
    context: RankContext, spec: ModelSpec, captured: Captured, dtype: str, size: Size, tokens: int
) -> dict[str, SegmentTimes]:
    """Of each template the parts of a block; all ranks measure at the same time, each as if it were the first of those
    that split tensors."""
    device = torch.device(context.device)
    plan = Plan(tp=size.degree, stages=(len(captured.blocks.blocks),))
    config = RunConfig.create(dtype=dtype, batch_size=size.samples)
    compiled = Compiled(
        captured, config, plan, rank=0, device=device, trainable=captured.trainable,
        buffers=captured.buffers_on(device),
    )  # fmt: skip
    segments = Segments(compiled, samples_of(spec, size.samples, tokens))
    with ExitStack() as stack:
        links = stack.enter_context(Links(context, name="model profile")) if context.world > 1 else None
        meet = Together(links).most if links is not None else alone
        times = [(found, time_segment(segments, found, device, meet, EFFORT)) for found in segments.found]
    blocks = captured.blocks.blocks
    first = {block.template: number for number, block in reversed(list(enumerate(blocks)))}
    return {
        template: SegmentTimes(*map(sum, zip(*(own for found, own in times for place in found.places
                                                if place.block == number), strict=True)))
        for template, number in first.items()
    }  # fmt: skip


def times_here(
    rows: list[Row], captured: Captured, dtype: str, device: torch.device, ranks: int, tokens: int
) -> dict[str, Times]:
    """By the name of the first block of each template: what was measured of exactly these graphs, here, by this version
    of torch."""
    version = torch.__version__.split("+")[0]
    graphs = {block.template for block in captured.blocks.blocks}
    own = matching(rows, dtype=dtype, device=device_name(device), ranks=ranks, tokens=tokens, torch=version)
    return block_times([(row.kind, row.key, row.value) for row in own if row.key.get("graph") in graphs])

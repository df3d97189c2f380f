"""How long the blocks of a model take on the device at hand: each distinct one, by tensor-parallel degree and samples;
measured by ranks that are started for it, or by those of a job, which all come to it.

Rows are kept by graph, shapes, precision, device, number of ranks at work and version of torch, so that what no longer
holds is never found; a block's four parts are kept together once all are known. Planning takes them instead of what a
device's figures say (`planning/work.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch

from phalanx import tasks
from phalanx.comm.links import Links
from phalanx.config import RunConfig
from phalanx.engine.compiled import Compiled
from phalanx.errors import PhalanxError, counted
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.captured import Captured
from phalanx.model.segment.compile import resolve_mode
from phalanx.model.zoo.zoo import ModelSpec
from phalanx.plan.plan import Plan
from phalanx.planning.work import Times
from phalanx.predict.from_profile import block_times
from phalanx.profile.beside import Together
from phalanx.profile.hardware import CAREFUL, device_name
from phalanx.profile.segments import PARTS, Effort, Meet, Segments, SegmentTimes, alone, time_segment
from phalanx.profile.store import Key, Row, Say, Store, careful_first, matching, torch_version
from phalanx.tasks.base import Batch

EFFORT = Effort()
SECONDS = 60.0  # that measuring may take
TURNS = 5  # of ranks that all measure in a job of theirs
_ASKED = "blocks to measure"


class Size(NamedTuple):
    """One rank of so many that split tensors, with a micro-batch of so many samples."""

    degree: int
    samples: int


@dataclass(frozen=True)
class Subject:
    """What is measured. samples: so many, as the model is given them. ranks: that compute at the same time. compile:
    how segments are compiled. by: whom, with more or less care."""

    spec: ModelSpec
    captured: Captured
    dtype: str
    device: torch.device
    ranks: int
    samples: Callable[[int], Batch]
    compile: str = "auto"
    by: str = CAREFUL.by

    @staticmethod
    def synthetic(
        spec: ModelSpec, captured: Captured, dtype: str, device: torch.device, ranks: int, tokens: int,
        compile: str = "auto",
    ) -> Subject:  # fmt: skip
        """tokens: of a sample, where its size is not fixed."""
        task = tasks.get(spec.task)
        samples = partial(task.synthetic, spec.config, tokens=tokens, seed=0)
        return Subject(spec, captured, dtype, device, ranks, lambda count: samples(batch=count), compile)

    @cached_property
    def length(self) -> int:
        """Tokens of a sample as planning counts them: source and target together."""
        dims = self.captured.dims(dict(self.samples(1)))
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
            "ranks": self.ranks, "torch": torch_version(), "by": self.by,
            "compile": resolve_mode(self.compile, self.device),
        }  # fmt: skip


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
            given = (subject.captured, _config(subject, size), size.degree, subject.samples(size.samples))
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
    """With as much care or more."""
    return any(_has_all(store, own, size) for own in (subject, replace(subject, by=CAREFUL.by)))


def _has_all(store: Store, subject: Subject, size: Size) -> bool:
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


def _config(subject: Subject, size: Size) -> RunConfig:
    return RunConfig.create(dtype=subject.dtype, batch_size=size.samples, compile=subject.compile)


def measure_on_rank(
    context: RankContext, captured: Captured, config: RunConfig, degree: int, batch: Batch
) -> dict[str, SegmentTimes]:
    """As a job of ranks that were started for it, which all measure at the same time."""
    with ExitStack() as stack:
        links = stack.enter_context(Links(context, name="model profile")) if context.world > 1 else None
        meet = Together(links).most if links is not None else alone
        return Blocks(torch.device(context.device), captured, config, degree, batch).times(meet, EFFORT)


class Blocks:
    """The distinct blocks of a model at one size, as this rank runs them if it is the first of those that split
    tensors."""

    def __init__(self, device: torch.device, captured: Captured, config: RunConfig, degree: int, batch: Batch) -> None:
        plan = Plan(tp=degree, stages=(len(captured.blocks.blocks),))
        compiled = Compiled(
            captured, config, plan, rank=0, device=device, trainable=captured.trainable,
            buffers=captured.buffers_on(device),
        )  # fmt: skip
        self._device, self._segments = device, Segments(compiled, batch)
        blocks = captured.blocks.blocks
        self._first = {block.template: number for number, block in reversed(list(enumerate(blocks)))}

    def times(self, meet: Meet, effort: Effort) -> dict[str, SegmentTimes]:
        """Of each template the parts of a block."""
        segments = self._segments
        times = [(found, time_segment(segments, found, self._device, meet, effort)) for found in segments.found]
        return {
            template: SegmentTimes(*map(sum, zip(*(own for found, own in times for place in found.places
                                                    if place.block == number), strict=True)))
            for template, number in self._first.items()
        }  # fmt: skip


# By the ranks of a job, which all come here.


def measure_joined(
    context: RankContext, store: Store | None, subject: Subject, sizes: Sequence[Size], effort: Effort, seconds: float,
    say: Say = lambda text: None,
) -> None:  # fmt: skip
    """Of the sizes that rank 0 asks for what is not in its store yet, as long as `seconds` have not passed: all of them
    in turn, and of each the quickest turn, since what else the machine does makes some turns slower. store, sizes: rank
    0's; where it has no store, nothing is asked."""
    asked = _agreed(context, [] if store is None else [own for own in sizes if not _is_known(store, subject, own)])
    if not asked:
        return
    say(f"measuring the blocks of {subject.spec.name} (in {counted(len(asked), 'size')}), to plan by them")
    began, found = time.monotonic(), dict[Size, dict[str, SegmentTimes]]()
    with Links(context, name="model profile") as links:
        ranks, blocks = Together(links), dict[Size, Blocks]()
        for turn in range(TURNS):
            for size in asked:
                if turn and ranks.most(time.monotonic() - began) > seconds:
                    break
                with suppress(PhalanxError):  # on all ranks alike: the model cannot be split so
                    if turn == 0:
                        given = subject.captured, _config(subject, size), size.degree, subject.samples(size.samples)
                        blocks[size] = Blocks(subject.device, *given)
                if size in blocks:
                    own = {name: SegmentTimes(*map(ranks.most, times))
                           for name, times in blocks[size].times(ranks.most, effort).items()}  # fmt: skip
                    found[size] = _quickest(found.get(size, own), own)
    for size, own in found.items():
        if store is not None:
            _keep(store, subject, size, [own])


def _agreed(context: RankContext, missing: list[Size]) -> list[Size]:
    """What rank 0 asks."""
    if context.rank == 0:
        context.store.set(_ASKED, json.dumps(missing))
        return missing
    return [Size(*size) for size in json.loads(context.store.get(_ASKED))]


def _quickest(one: dict[str, SegmentTimes], other: dict[str, SegmentTimes]) -> dict[str, SegmentTimes]:
    return {name: SegmentTimes(*map(min, own, other[name])) for name, own in one.items()}


def times_here(
    rows: list[Row], captured: Captured, dtype: str, device: torch.device, ranks: int, tokens: int,
    compile: str = "auto",
) -> dict[str, Times]:  # fmt: skip
    """By the name of the first block of each template: what was measured of exactly these graphs, compiled so, here, by
    this version of torch; with care, else by a run."""
    graphs = {block.template for block in captured.blocks.blocks}
    here = {"device": device_name(device), "ranks": ranks, "torch": torch_version(),
            "compile": resolve_mode(compile, device)}  # fmt: skip
    own = careful_first(list(matching(rows, dtype=dtype, tokens=tokens, **here)), CAREFUL.by)
    return block_times([(row.kind, row.key, row.value) for row in own if row.key.get("graph") in graphs])


def of_every_block(captured: Captured, times: Mapping[str, Times]) -> dict[str, Times]:
    """Of each block what the first one of its template takes: they may differ in what of them is trained."""
    blocks = captured.blocks.blocks
    first = {block.template: block.name for block in reversed(blocks)}
    return {block.name: times[first[block.template]] for block in blocks if first[block.template] in times}

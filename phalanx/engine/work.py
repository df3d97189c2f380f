"""What a model asks of devices (`planning/work.py`), from its own graph at the shape of a run's samples.

The graph is traced without contents as the run's compiler has it: with everything kept and, where that is asked for,
with products and attention only. So any model that can be captured can be planned for, without facts that are shipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from phalanx.engine.compiled import Compiled
from phalanx.engine.measure import parameters_of_units
from phalanx.engine.step import micro_batches
from phalanx.engine.trace import Traced
from phalanx.expressions import evaluate
from phalanx.model.captured import Captured
from phalanx.model.graph.blocks import Block
from phalanx.model.segment.segments import Segment
from phalanx.plan.plan import Plan
from phalanx.planning.work import ModelWork, Unit, merged
from phalanx.predict.work_of_facts import BlockNumbers, block_work, kept_by, longer, products_and_attention
from phalanx.program.shape import ModelShape
from phalanx.tasks.base import Batch


def work_of_graph(
    name: str, compiled: Compiled, batch: Batch, heads: int = 0, light: bool = True, causal: bool = False
) -> ModelWork:
    """compiled: of one rank that holds the whole model and keeps everything. batch: the first samples of the data.
    heads, causal: as of `ModelWork`. light: whether to find out what `recompute=light` keeps, which takes as long
    again."""
    captured, traces = compiled.captured, {"none": _trace(compiled, batch)}
    if light:
        lighter = Plan(stages=(compiled.formation.shape.num_blocks,), recompute=("light",))
        traces["light"] = _trace(compiled.under(lighter), batch)
    dims = captured.dims(dict(batch))
    blocks = [block_work(own) for own in _numbers(compiled, captured, traces, dims)]
    classes, places = merged(blocks)
    sizes = {own: math.prod(captured.shapes[own]) for own in captured.blocks.parameters()}
    tokens = sum(size for dim, size in dims.items() if dim != "batch") or 1
    total, learning = sum(sizes.values()), sum(compiled.formation.shape.elements)
    return ModelWork(
        name, classes, places, tokens, total, compiled.dtype.itemsize, heads, learning / total, _state_width(compiled),
        causal,
    )  # fmt: skip


def _trace(compiled: Compiled, batch: Batch) -> tuple[Traced, ModelShape, int]:
    """Of the largest micro-batch, with its samples."""
    inputs = next(iter(micro_batches(compiled.training.feeder, compiled.plan, batch, 0).values()))
    traced = compiled.training.tracer(inputs)
    return traced, traced.shape(compiled.formation.shape), inputs.num_samples


def _numbers(
    compiled: Compiled, captured: Captured, traces: Mapping[str, tuple[Traced, ModelShape, int]], dims: dict[str, int]
) -> list[BlockNumbers]:
    traced, shape, samples = traces["none"]
    seen: set[str] = set()
    learning = {own.name for own in compiled.formation.facts.parameters if own.trained}
    found: list[BlockNumbers] = []
    one = {**dims, "batch": 1}
    once, twice = (captured.blocks.flops(own) for own in (one, longer(one)))
    crossing = [_crossing(shape, cut) / samples for cut in range(shape.num_blocks + 1)]
    for number, block in enumerate(captured.blocks.blocks):
        sizes = {name: math.prod(captured.shapes[name]) for name in block.names("parameter")}
        tied = sum(size for name, size in sizes.items() if name in seen)
        seen |= sizes.keys()
        flops = products_and_attention(once[number], twice[number])
        kept = {rung: kept_by(at, number, {}) / count for rung, (_, at, count) in traces.items()}
        segments = [part.segment for part in compiled.graph.parts[number] if part.segment is not None]
        working = max((_working(traced.segments[segment]) for segment in segments), default=0)
        gradients = max((float(op.bw.d_parameters or 0) for op in shape.ops_of(number)), default=0.0)
        inside = min(working, gradients)  # gradients of weights are made whatever the number of samples
        own = BlockNumbers(
            block.name, number == 0, *flops, sum(sizes.values()), tied, crossing[number], crossing[number + 1],
            _units(captured, block, one), kept, (working - inside) / samples, inside,
            compiled.dtype.itemsize, sum(size for name, size in sizes.items() if name in learning) / sum(sizes.values())
            if sizes else 1.0,
        )  # fmt: skip
        found.append(own)
    return found


def _units(captured: Captured, block: Block, dims: dict[str, int]) -> tuple[Unit, ...]:
    names = captured.blocks.units(block)
    if not names:
        return ()
    owned, flops = parameters_of_units(captured, block), captured.blocks.templates[block.template].flops
    attends = {
        name: products_and_attention(*(evaluate(flops[name], own) for own in (dims, longer(dims))))[1] > 0
        for name in names
    }
    return tuple(Unit(owned[name], attends[name]) for name in names)


def _crossing(shape: ModelShape, cut: int) -> float:
    return sum(float(shape.sizes[name]) for name in shape.crossing(cut))


def _working(segment: Segment) -> int:
    found = segment.working
    return max((*found.forward, *found.backward, *found.weight, *found.together), default=0)


def _state_width(compiled: Compiled) -> float | None:
    """Bytes of masters and of what the optimizer keeps for each parameter that is trained; None where that is not
    known."""
    facts = compiled.formation.facts
    if facts.slots is None:
        return None
    slots = sum(getattr(torch, slot.dtype).itemsize for slot in facts.slots if not slot.is_counter)
    return slots + (torch.float32.itemsize if facts.masters else 0)

"""The plan side: the case run as a plan, through the same engine, optimizer and step as training."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.engine.compose import BucketNames, compose
from phalanx.engine.inputs import num_samples, split
from phalanx.expressions import evaluate
from phalanx.launch.context import RankContext, local_device
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.capture import capture
from phalanx.model.captured import Captured, attention_sites
from phalanx.model.ops import random
from phalanx.model.shard.sharded import Sharded
from phalanx.model.weights.weights import SafetensorsWeights, SeededWeights, Weights
from phalanx.model.zoo.configure import layer_drop
from phalanx.model.zoo.meta import parameters_on_meta
from phalanx.model.zoo.zoo import ModelSpec
from phalanx.plan.complete import complete
from phalanx.plan.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.prepare.initial_weights import open_weights
from phalanx.program.compile import compile_plan
from phalanx.program.holders import buckets_of
from phalanx.program.instructions import REDISTRIBUTIONS, Program
from phalanx.program.shape import ModelShape
from phalanx.state.dcp import DcpWeights
from phalanx.verification.case import Case, Execution, Part, Start, Step
from phalanx.verification.rank_side import Trace, facts_of, run_rank

_NOISE = 0.05  # added to fresh weights: zeros and ones (biases, norms) would hide errors that multiply or add them


def prepare(case: Case) -> tuple[ModelSpec, Captured, Start]:
    """The captured model of a case, and the values it begins with as far as nobody else has them."""
    spec = case.spec()
    inputs = case.task_of(spec).inputs(spec.config, padding=case.padding, documents=case.documents)
    captured = capture(spec, inputs, dtype=case.torch_dtype, dropout=case.dropout, check=False)
    return spec, captured, _start(spec, captured, case)


def _start(spec: ModelSpec, captured: Captured, case: Case) -> Start:
    weights, origin = open_weights(case.model, spec, case.seed)
    notes = list(_layer_drop(spec))
    if isinstance(weights, DcpWeights):
        notes.append(f"initial values are {origin}, as Phalanx reads them: transformers cannot")
        return Start(_read(weights, captured.shapes, captured, case), False, tuple(notes))
    fresh = weights.missing if isinstance(weights, SafetensorsWeights) else ()
    if isinstance(weights, SeededWeights):
        fresh = weights.names()
    given = _read(weights, fresh, captured, case)
    for name, value in given.items():
        generator = torch.Generator().manual_seed(random.site_hash(name))
        value += _NOISE * torch.randn(value.shape, generator=generator, dtype=torch.float32).to(value.dtype)
    return Start(given, len(given) < len(captured.shapes), tuple(notes))


def _read(weights: Weights, names: Iterable[str], captured: Captured, case: Case) -> dict[str, Tensor]:
    return {n: weights.read(n, dtype=None if n in captured.integers else case.torch_dtype) for n in names}


def _layer_drop(spec: ModelSpec) -> Iterator[str]:
    """What both sides leave out of the model."""
    found = layer_drop(spec.config) if spec.config is not None else {}
    if spec.factory is not None:
        with parameters_on_meta():
            modules = dict(spec.factory().named_modules())
        found |= {f"{path}.layerdrop": p for path, it in modules.items() if (p := vars(it).get("layerdrop"))}
    for name, value in found.items():
        yield f"{name} = {value:g} is 0 on both sides, as in training: whole layers are never skipped"


def run_plan(case: Case, captured: Captured, start: Start, pool: WorkerPool | None = None) -> Execution:
    """The case under its plan: in this process if the plan has one rank, else on the ranks of a worker pool."""
    plan = complete_plan(case, captured)
    with tempfile.TemporaryDirectory(prefix="phalanx-verify-") as folder:
        torch.save(vars(start), Path(folder) / "start.pt")
        job = (case, plan, captured, Path(folder))
        if plan.world == 1:
            traces = [run_rank(RankContext.alone(local_device(case.device, 0)), *job)]
        else:
            with contextlib.ExitStack() as stack:
                pool = pool or stack.enter_context(WorkerPool(plan.world, device=case.device))
                traces = pool.run(run_rank, *job, world=plan.world)
    steps = [_assemble(traces, number, captured) for number in range(case.steps)]
    initial = _joined([trace.initial for trace in traces], captured)
    copies = [copy for trace in traces for copy in trace.copies]
    return Execution(
        plan, initial, steps, copies, facts_of(traces, plan), _implied(plan, case, captured),
        attention_sites(captured.blocks),
    )  # fmt: skip


def complete_plan(case: Case, captured: Captured) -> Plan:
    _, batch = next(case.batches(case.spec()))
    costs = captured.blocks.flops(captured.dims(batch))
    return complete(case.plan, world=None, batch_size=case.fewest_samples, costs=costs).plan


def _assemble(traces: Sequence[Trace], number: int, captured: Captured) -> Step:
    """One step of all ranks as if there were one: every element comes from the rank that owns it."""
    losses = [trace.losses[number] for trace in traces]
    gradients = _joined([trace.gradients[number] for trace in traces], captured)
    return Step(losses, gradients, _joined([trace.parameters[number] for trace in traces], captured))


def _joined(parts: Sequence[list[Part]], captured: Captured) -> dict[str, Tensor]:
    """Whole tensors; what no rank answers for stays NaN, which equals nothing."""
    found: dict[str, Tensor] = {}
    for owned in (owned for rank in parts for owned in rank):
        whole = found.get(owned.name)
        if whole is None:
            whole = found[owned.name] = torch.full(captured.shapes[owned.name], math.nan, dtype=owned.data.dtype)
        for box, values in zip(owned.boxes, owned.data.split([box.numel for box in owned.boxes]), strict=True):
            whole[box.slices()] = values.view(box.shape)
    return found


def _implied(plan: Plan, case: Case, captured: Captured) -> dict[str, Any]:
    """What the plan says should have been done, for the names in `facts_of`."""
    ranks = [compose(captured, plan, index, case.torch_dtype, captured.trainable) for index in range(plan.tp)]
    captured, buckets = ranks[0].captured, ranks[0].buckets
    views = [rank.sharded for rank in ranks if rank.sharded is not None]
    compiled = compile_plan(plan, buckets.shape)
    programs = [compiled.program(rank) for rank in range(plan.world)]
    return {
        "instructions": [dict(Counter(str(i.op) for i in program for _ in range(case.steps))) for program in programs],
        "parameter elements kept": _kept(plan, buckets, captured, views),
        "only inputs kept for backward": plan.policies in (("unit",), ("block",)),
        "buckets gathered at once": [compiled.peak_gathered(rank) for rank in range(plan.world)],
        "bytes redistributed": [
            _redistributed(plan, buckets.shape, rank, program, case, captured) for rank, program in enumerate(programs)
        ],
    }


def _kept(plan: Plan, buckets: BucketNames, captured: Captured, views: Sequence[Sharded]) -> list[int]:
    """Elements of parameters on all replicas of each rank of the pipeline: whole on each, or once per ZeRO group; split
    between tensor-parallel ranks as far as they can be."""
    once = set() if plan.zero < 3 else captured.shapes.keys() - captured.integers.keys()
    copies = {name: plan.dp // plan.shards if name in once else plan.dp for name in captured.shapes}
    used = set(captured.blocks.parameters())
    found: list[int] = []
    for pp_index in range(plan.pp):
        names = [name for bucket in buckets_of(plan, buckets.shape, pp_index) for name in buckets.names[bucket]]
        names += [name for name in captured.shapes if name not in used and plan.pp_index(0) == pp_index]
        if views:
            found.append(sum(copies[name] * view.parameters[name].local.numel for view in views for name in names))
        else:
            found.append(sum(copies[name] * math.prod(captured.shapes[name]) for name in names))
    return found


def _redistributed(plan: Plan, shape: ModelShape, rank: int, program: Program, case: Case, captured: Captured) -> int:
    """Bytes of the whole tensors that one rank redistributes among those it splits tensors with, in all steps."""
    sent = [it for it in program if it.op in REDISTRIBUTIONS]
    total = 0
    for _, batch in case.batches(case.spec()) if sent else ():
        own = split(num_samples(batch), plan.dp)[Mesh.of(plan).coordinates(rank)[1]]
        sizes = [half for size in split(own, plan.mb) for half in split(size, plan.halves)]
        dims = [captured.dims({name: tensor[:size] for name, tensor in batch.items()}) for size in sizes]
        for it in sent:
            assert it.block is not None and it.op_index is not None
            micro_batch, slice_, half = it.micro_batch or 0, it.slice or 0, it.half or 0
            own_dims = dims[micro_batch * plan.halves + half]
            if plan.slices:
                edges = plan.slice_bounds(micro_batch, own_dims["tokens"])
                own_dims = own_dims | {"whole_tokens": own_dims["tokens"], "tokens": edges[slice_ + 1] - edges[slice_]}
            total += evaluate(shape.ops_of(it.block)[it.op_index].elements, own_dims)
    return total * case.torch_dtype.itemsize

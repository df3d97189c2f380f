"""The memory of a rank before anything lies on it: state as it will lie, values as they will live."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from phalanx import tasks
from phalanx.cli.models import capture_model
from phalanx.config import RunConfig
from phalanx.engine.describe import describe
from phalanx.engine.gradients import Sum
from phalanx.engine.measure import measure
from phalanx.engine.memory import bucket_costs, rank_memory
from phalanx.engine.step import micro_batches
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.params.buckets import Bucket
from phalanx.params.flat import Piece
from phalanx.plan.plan import Plan
from phalanx.planning.cluster import Cluster
from phalanx.planning.cost import Machine, Software
from phalanx.planning.estimate import estimate
from phalanx.predict.costs import uniform
from phalanx.predict.from_facts import Device, costs_of_facts
from phalanx.predict.memory import Sizes, changes_in_order, resident_bytes
from phalanx.predict.predict import predict
from phalanx.predict.update import TrainingBytes, Update
from phalanx.predict.work_of_facts import work_of_facts
from phalanx.program.compile import compile_plan
from phalanx.program.instructions import Instruction, Op
from phalanx.session.session import Session
from tests import captured
from tests.program.lives import live_bytes

long = pytest.mark.long
STATE = ("parameters", "masters", "moments")


def components(plan: str) -> dict[str, int]:
    case = captured.named(captured.GPT2, samples=6, tokens=64)
    session = case.session(plan)
    compiled = session.compiled
    try:
        return rank_memory(compiled, micro_batches(compiled.training.feeder, compiled.plan, case.batch, 0)).device
    finally:
        session.close()


def test_smaller_micro_batches_recomputation_and_slices_need_less() -> None:
    whole = sum(components("").values())
    assert sum(components("mb=3").values()) < whole
    assert sum(components("recompute=light").values()) < whole
    assert sum(components("recompute=block").values()) < sum(components("recompute=light").values())
    sliced = components("slices=2")
    assert sliced["activations"] > 0 and sum(sliced.values()) < 1.2 * whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_is_what_lies_there_after_a_step(dtype: str) -> None:
    case = captured.named(captured.GPT2, samples=6, tokens=64)
    session = case.session("", dtype=dtype)
    session.step(case.batch, 0, 0.0).read()
    compiled, state = session.compiled, session.state
    found = rank_memory(compiled, micro_batches(compiled.training.feeder, compiled.plan, case.batch, 0)).device
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.tensors()}
    assert sum(found.get(name, 0) for name in STATE) == sum(held.values())
    assert ("masters" in found) == (dtype == "bfloat16")
    session.close()


@pytest.mark.parametrize(
    ("dtype", "optimizer", "options", "master_weights"),
    [
        ("float32", "adamw", {}, True), ("bfloat16", "adamw", {}, True), ("float16", "adamw", {}, True),
        ("float16", "adamw", {"amsgrad": True}, False),
        ("float32", "sgd", {}, True), ("bfloat16", "sgd", {}, True), ("bfloat16", "sgd", {}, False),
        ("float16", "sgd", {"momentum": 0.9}, True),
        ("bfloat16", "torch.optim.Adagrad", {}, True),
        ("float32", "torch.optim.RMSprop", {"momentum": 0.9, "centered": True}, True),
    ],
)  # fmt: skip
def test_what_is_foreseen_of_an_optimizers_state_is_what_a_run_keeps(
    dtype: str, optimizer: str, options: dict[str, Any], master_weights: bool
) -> None:
    case = captured.named(captured.GPT2, samples=6, tokens=64)
    given = {"optimizer": optimizer, "optimizer_options": options}
    session = case.session("", dtype=dtype, **given, **({} if master_weights else {"master_weights": False}))
    session.step(case.batch, 0, 0.0).read()
    held = {t.untyped_storage().data_ptr(): t for t in session.state.tensors()}
    counters = sum(t.nbytes for t in held.values() if t.dim() == 0)
    kept = sum(t.untyped_storage().nbytes() for t in held.values()) - counters
    session.close()
    elements, width = sum(map(math.prod, case.captured.shapes.values())), getattr(torch, dtype).itemsize
    foreseen = TrainingBytes.of(dtype, Update.of(optimizer, options, master_weights))
    assert kept == elements * (width + foreseen.master + foreseen.moments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_have_gradients_masters_and_moments_in_facts_as_in_a_run(dtype: str) -> None:
    spec, adapted = capture_model("gpt2", None, dtype, tiny=True, lora="r=4,targets=c_attn")
    plan = Plan(stages=(len(adapted.blocks.blocks),))
    config = RunConfig.create(dtype=dtype, compile="off", batch_size=2)

    def read(name: str, is_master: bool, piece: Piece) -> torch.Tensor:
        return torch.full((piece.stop - piece.start,), 0.01)

    session = Session.open(
        adapted, config, plan, context=RankContext.alone(), trainable=adapted.trainable, read=read,
        buffers=adapted.buffers,
    )  # fmt: skip
    session.step(tasks.get(spec.task).synthetic(spec.config, batch=2, tokens=16, seed=0), 0, 0.0).read()
    held = {t.untyped_storage().data_ptr(): t for t in session.state.tensors() if t.dim()}
    facts = describe(adapted, Plan(), dtype, device="cpu")
    costs = costs_of_facts(facts, facts.eager, {"batch": 2, "tokens": 16}, Device())
    here = bucket_costs(session.compiled)
    session.close()
    assert [replace(own, step_seconds=0.0, host_step_seconds=0.0) for own in costs.buckets] == here
    kept = resident_bytes(compile_plan(plan, facts.shape(compiled=False)), costs, 0)
    assert sum(kept.values()) == sum(t.untyped_storage().nbytes() for t in held.values())
    learning = sum(math.prod(adapted.shapes[name]) for name in adapted.trainable)
    assert kept["moments"] == 8 * learning and sum(own.gradient_bytes for own in here) == 4 * learning
    shares = [facts.learns(block) for block in range(len(facts.parameters))]
    assert shares[0] == shares[-1] == 0 and all(0 < own < 0.1 for own in shares[1:-1])
    assert [own / alone for own, alone in zip(costs.weight, costs.forward, strict=True)] == pytest.approx(shares)


def test_estimates_of_adapters_are_those_of_their_program_and_count_no_gradients_of_frozen_weights() -> None:
    spec, adapted = capture_model("gpt2", None, "bfloat16", tiny=True, lora="r=4")
    facts, dims = measure(spec, adapted, torch.bfloat16), {"batch": 8, "tokens": 64}
    describing = cache(lambda plan: describe(adapted, plan, "bfloat16", device="cpu"))
    work = work_of_facts(facts, dims, describing)
    learning = sum(math.prod(adapted.shapes[name]) for name in adapted.trainable)
    for plan in ("mb=2", "pp=2,mb=4"):
        exact = predict(facts, plan, None, 8, dims, Device(), describing, compiled=False)
        chosen = exact.completed.plan
        told = estimate(work, chosen, Cluster.read(f"{chosen.world} H100"), Software(), 8)
        for place in range(chosen.pp):
            held = exact.timeline.memory[exact.compiled.mesh.rank(place, 0)]
            assert 0.95 <= sum(told.memory[place].values()) / sum(held.values()) <= 1.15
            assert chosen.pp > 1 or told.memory[0]["optimizer"] == pytest.approx(12 * learning)
    machine = Machine(Cluster.read("1 H100").nodes[0], Software(launch=0.0), Plan(), 1000)
    layer = work.block(1)
    whole, own = (machine.seconds(each, "none") for each in (replace(layer, learns=1.0), layer))
    assert own.weight == pytest.approx(layer.learns * whole.weight) and 0 < layer.learns < 0.15
    assert own[:2] == whole[:2] and work.flops < replace(work, classes=tuple(
        replace(each, learns=1.0) for each in work.classes)).flops  # fmt: skip


@pytest.mark.parametrize("frozen", ["", "mlp"])
@pytest.mark.parametrize("plan", ["", "recompute=block", "recompute=unit*2+light*2", "schedule=zb-h1", "mb=2"])
def test_gradients_of_a_step_are_as_wide_as_the_table_says(plan: str, frozen: str) -> None:
    """In half precision: one that is alone is as narrow as its weight, and sums are wide, that of the embedding and the
    head too, which share one. frozen: what has none, nor counts, among others of the same bucket."""
    case = captured.named(captured.GPT2, samples=4, tokens=8)
    still = [name for name in case.captured.shapes if frozen and frozen in name]
    session = case.session(plan, dtype="bfloat16", master_weights=False, frozen=still)
    engine, step = session.step.engine, session.step.begin(case.batch, 0, 0.0)
    engine.run(session.step.program, step, until=Op.NORM)
    table = step.linked.table
    held = sum(own.num_bytes for own in step.values if isinstance(own, Sum))
    costs = replace(uniform(session.compiled.formation.shape), buckets=tuple(bucket_costs(session.compiled)))
    size = Sizes.of(session.compiled.programs, costs)
    said = 0
    for row, changes in zip(table.rows, changes_in_order(table, size, size.single), strict=True):
        if row.instruction.op is Op.NORM:
            break
        said += sum(change for _, component, change in changes if component == "gradients")
    assert held == said > 0
    engine.run(session.step.program, step)
    session.close()


def test_what_lies_on_the_host_is_not_on_the_device() -> None:
    plan = "mb=2,offload=parameters+optimizer-step"
    case = captured.named(captured.GPT2, samples=6, tokens=64)
    session = case.session(plan)
    session.step(case.batch, 0, 0.0).read()
    compiled, state = session.compiled, session.state
    found = rank_memory(compiled, micro_batches(compiled.training.feeder, compiled.plan, case.batch, 0))
    state.settle()
    assert not {"parameters", "masters", "moments"} & found.device.keys() and not list(state.tensors())
    weights = [weight.copy for weight in state.parameters.weights.values()]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in weights}
    assert found.host["parameters"] == sum(held.values())
    session.close()


class Fetched:
    """Bytes of parameters that were fetched, after each instruction."""

    def __init__(self, session: Session) -> None:
        self._parameters = session.state.parameters
        self.found: list[int] = []

    def begin(self, instruction: Instruction) -> None: ...

    def ready(self, instruction: Instruction) -> None: ...

    def end(self, instruction: Instruction) -> None:
        buckets = map(self._parameters.bucket, self._parameters.held())
        self.found.append(sum(map(fetched_elements, buckets)))


def fetched_elements(bucket: Bucket) -> int:
    """Elements of parameters that came from the host and are here."""
    if not bucket.on_host:
        return 0
    here = list(bucket._fetched) if not bucket._is_whole else bucket.buffers if bucket._lent else []
    return sum(piece.stop - piece.start for flat in here for piece, _ in flat.pieces)


@pytest.mark.parametrize("plan", ["mb=2,offload=parameters:2", "mb=2,schedule=block-major,offload=parameters"])
def test_fetched_parameters_are_those_of_the_table_after_every_instruction(plan: str) -> None:
    case = captured.named(captured.GPT2, samples=4, tokens=8)
    session = case.session(plan)
    watched = Fetched(session)
    session.step.engine.watches.append(watched)
    session.step(case.batch, 0, 0.0).read()
    table = session.compiled.programs.tables[0]
    costs = replace(uniform(session.compiled.formation.shape), buckets=tuple(bucket_costs(session.compiled)))
    size = Sizes.of(session.compiled.programs, costs)
    live = live_bytes(table, lambda value: size(value) if value.kind == "fetched" else 0)
    assert [bytes // session.compiled.dtype.itemsize for bytes in live] == watched.found
    assert max(live) > 0
    session.close()


def of_rank(context: RankContext, plan: str) -> tuple[int, int]:
    """State as predicted, and as it lies there after a step."""
    case = captured.named(captured.GPT2, samples=4, tokens=8)
    session = case.session(plan, context=context)
    first, count = session.part(0, 4)
    batch = {name: tensor[first : first + count] for name, tensor in case.batch.items()}
    session.step(batch, first, 0.0).read()
    compiled, state = session.compiled, session.state
    found = rank_memory(compiled, micro_batches(compiled.training.feeder, compiled.plan, batch, first)).device
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.tensors()}
    session.close()
    return sum(found.get(name, 0) for name in STATE), sum(held.values())


@pytest.mark.parametrize(
    "plan", ["dp=2,zero=1", pytest.param("dp=2,zero=3", marks=long), "tp=2", pytest.param("pp=2", marks=long)]
)
def test_state_of_every_rank_is_what_lies_there(plan: str, pool: WorkerPool) -> None:
    found = pool.run(of_rank, plan, world=2)
    assert all(predicted == held for predicted, held in found)

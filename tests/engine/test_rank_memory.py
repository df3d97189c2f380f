"""The memory of a rank before anything lies on it: state as it will lie, values as they will live."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.engine.gradients import Sum
from phalanx.engine.memory import bucket_costs, rank_memory
from phalanx.engine.step import micro_batches
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.params.buckets import Bucket
from phalanx.predict.costs import uniform
from phalanx.predict.memory import Sizes, changes_in_order
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


@pytest.mark.parametrize("plan", ["", "recompute=block", "recompute=unit*2+light*2", "schedule=zb-h1", "mb=2"])
def test_gradients_of_a_step_are_as_wide_as_the_table_says(plan: str) -> None:
    """In half precision: one that is alone is as narrow as its weight, and sums are wide, that of the embedding and the
    head too, which share one."""
    case = captured.named(captured.GPT2, samples=4, tokens=8)
    session = case.session(plan, dtype="bfloat16", master_weights=False)
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

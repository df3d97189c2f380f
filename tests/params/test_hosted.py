"""The optimizer's state on the host: updated in parts, by the device or by the host, it is what it is without, bit for
bit."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.config import RunConfig
from phalanx.errors import ConfigError
from phalanx.params.flat import Piece
from phalanx.params.host_memory import Copying, HostBuffers, HostMemory
from phalanx.params.hosted import Given, Left
from phalanx.params.layout_of import StateLayout
from phalanx.params.rank_state import State
from phalanx.plan.plan import Plan
from tests.params.sharded_cases import CPU, Model, Split

SHAPES = {"embedding": (37, 11), "matrix": (8, 9), "bias": (13,), "norm": (5,), "head": (7, 11)}
MODEL = Model(
    (("embedding",), ("matrix", "bias", "norm"), ("head",)),
    {name: Split(shape, 0, (), (0,), summed=False) for name, shape in SHAPES.items()},
    tp=1,
)
PARTS = {0: 3, 1: 2}  # of the first two buckets; the last is the device's
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "masters": {"dtype": "bfloat16"},
    "sgd": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
    "nadam": {"optimizer": "torch.optim.NAdam"},
    "plain adamw": {"optimizer_options": {"fused": False}},
}


def state_of(plan: str, rank: int = 0, **options: Any) -> State:
    layout = StateLayout(Plan.parse(plan), MODEL.facts(options.get("dtype", "float32")))
    values = MODEL.values()

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        return piece.of(values[name])

    hosted, fetched = PARTS if "offload" in plan else {}, PARTS if "parameters" in plan else ()
    return State(layout, rank, read, RunConfig.create(**options), CPU, hosted=hosted, fetched=fetched)


def gradients(state: State, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    trained = {n: w for n, w in state.parameters.trained.items()}
    return {name: torch.randn(w.copy.shape, generator=generator) for name, w in trained.items() if name != "norm"}


def update(state: State, found: dict[str, Tensor], *, finite: bool = True, scale: float | None = None) -> None:
    """As the instructions of a step do it. Nothing ever gives `norm` a gradient."""
    given = Given(0.1, torch.tensor(3.0), torch.tensor(finite), None if scale is None else torch.tensor(scale))
    hosted, on_host = state.hosted, state.layout.plan.steps_on_host
    for bucket, count in PARTS.items() if hosted is not None else ():
        own = {piece.name for piece, _ in state.parameters.bucket(bucket).updated}
        left = hosted.leave(bucket, {name: tensor for name, tensor in found.items() if name in own})
        for part in range(count):
            if on_host:
                state.parameters.bucket(bucket).update(
                    hosted.step_behind((bucket, part), left, lambda: given, lambda: given)
                )
            else:
                hosted.fetch((bucket, part), left if state.parameters.bucket(bucket).on_host else None).wait()
                hosted.step((bucket, part), found, given)
                hosted.store((bucket, part)).wait()
    rest = {name: tensor.clone() for name, tensor in found.items() if name in state.optimizer.weights}
    state.optimizer.step(rest, *given)


def contents(state: State) -> dict[str, Tensor]:
    return {shard.name: data.clone() for shard, data in state.shards()} | {
        f"copy/{shard.name}": data.clone() for shard, data in state.values()
    }


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("word", [
    "optimizer", "optimizer-step", "optimizer:0.5+optimizer-step:0.5", "parameters", "parameters+optimizer-step",
    "parameters+optimizer:0.4+optimizer-step:0.6",
])  # fmt: skip
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_state_in_parts_on_the_host_is_what_it_is_without(options: dict[str, Any], word: str) -> None:
    plain, hosted = state_of("stages=3", **options), state_of(f"stages=3,offload={word}", **options)
    for step, finite in enumerate((True, False, True)):
        for state in (plain, hosted):
            update(state, gradients(state, step), finite=finite, scale=1024.0)
    require_same(contents(hosted), contents(plain))
    assert hosted.scalars() == plain.scalars()


@pytest.mark.parametrize("word", ["optimizer", "optimizer-step", "parameters"])
def test_a_shard_of_zero_is_divided_too(word: str) -> None:
    plain, hosted = state_of("dp=2,zero=3,stages=3", 1), state_of(f"dp=2,zero=3,stages=3,offload={word}", 1)
    for state in (plain, hosted):
        update(state, gradients(state, 0))
    require_same(contents(hosted), contents(plain))


@pytest.mark.parametrize("before, after", [
    ("", ",offload=optimizer-step"), (",offload=optimizer", ""), (",offload=parameters", ",offload=optimizer"),
    (",offload=optimizer:0.5+optimizer-step:0.5", ""), ("", ",offload=optimizer:0.5+optimizer-step:0.5"),
])  # fmt: skip
def test_state_is_taken_up_with_and_without(before: str, after: str) -> None:
    options = OPTIONS["nadam"]
    first, second = state_of(f"stages=3{before}", **options), state_of(f"stages=3{after}", **options)
    update(first, gradients(first, 0))
    saved, scalars = {shard.name: data.clone() for shard, data in first.shards()}, first.scalars()[0]
    slots = [tuple(key.split("/", 2)[1:]) for key in saved if key.startswith("optimizer/")]

    taken: set[tuple[str, str]] = set()

    def read(slot: str, name: str) -> Tensor:
        """What came from other ranks is there once."""
        assert (slot, name) not in taken
        taken.add((slot, name))
        found = saved[f"optimizer/{slot}/{name}"]
        return found.reshape(()) if found.numel() == 1 else found.view(second.parameters.weights[name].exact.shape)

    second.optimizer.load(slots, read, scalars)
    if second.hosted is not None:
        second.hosted.load(slots, read, scalars)
    for state in (first, second):
        for weight in state.parameters.trained.values():
            weight.exact.zero_()
        update(state, gradients(state, 1))
    require_same(contents(second), contents(first))


def test_what_is_saved_waits_for_the_host() -> None:
    state = state_of("stages=3,offload=optimizer-step")
    before = contents(state)
    update(state, gradients(state, 0))
    assert state.parameters.bucket(0).is_arriving
    after = contents(state)
    assert not state.parameters.bucket(0).is_arriving
    assert not torch.equal(after["copy/embedding"], before["copy/embedding"])
    assert torch.equal(after["copy/embedding"], after["model/embedding"])


def test_an_error_of_the_host_reaches_whoever_needs_its_parameters() -> None:
    state = state_of("stages=3,offload=optimizer-step")
    assert state.hosted is not None
    left = state.hosted.leave(0, {"embedding": torch.ones(3)})  # of another shape
    given = Given(0.1, torch.ones(()), torch.tensor(True), None)
    state.parameters.bucket(0).update(state.hosted.step_behind((0, 0), left, lambda: given, lambda: given))
    with pytest.raises(RuntimeError):
        state.parameters.settle()


def test_the_device_does_not_wait_for_the_host_beside_it_and_gradients_stay_until_both_have_read_them() -> None:
    state = state_of("stages=3,offload=optimizer:0.5+optimizer-step:0.5")
    hosted, plan, may_go_on = state.hosted, state.layout.plan, Event()
    assert hosted is not None
    here = next(part for part in range(PARTS[0]) if plan.updates_on_device(0, part))
    there = next(part for part in range(PARTS[0]) if not plan.updates_on_device(0, part))
    given, released = Given(0.1, torch.ones(()), torch.tensor(True), None), list[bool]()

    def given_later() -> Given:
        assert may_go_on.wait(60)
        return given

    own = {"embedding": torch.ones(SHAPES["embedding"])}
    left = Left(own, Copying(), lambda after=None: released.append(True), readers=2)
    on_host = hosted.step_behind((0, there), left, given_later, lambda: given)
    hosted.step_behind((0, here), left, given_later, lambda: given).result(60)
    assert not on_host.done() and not released
    may_go_on.set()
    on_host.result(60)
    assert released == [True]
    hosted.close()


class ByNorm(torch.optim.SGD):
    """Divides every gradient by its norm."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad = weight.grad / weight.grad.norm()
        return super().step(closure)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused() -> None:
    layout = StateLayout(Plan.parse("stages=3,offload=optimizer-step:0.5"), MODEL.facts())
    values = MODEL.values()
    with pytest.raises(ConfigError) as refused:
        State(layout, 0, lambda n, m, piece: piece.of(values[n]), RunConfig(), CPU, ByNorm, hosted=PARTS)
    assert "optimizer ByNorm does not update each element by itself, but the plan splits tensors" in str(refused.value)
    assert "or one of torch's ASGD, Adadelta" in str(refused.value)


def test_parameters_on_the_host_are_here_only_between_fetch_and_free() -> None:
    state, plain = state_of("stages=3,offload=parameters"), state_of("stages=3")
    parameters = state.parameters
    assert parameters.on_host == {"embedding", "matrix", "bias", "norm"} and set(parameters.values) == {"head"}
    assert {id(tensor) for tensor in state.tensors()} & {id(w.copy) for w in parameters.weights.values()} == {
        id(parameters.weights["head"].copy)
    }

    parameters.fetch(1)
    parameters.ready([1])
    for name in ("matrix", "bias", "norm"):
        assert torch.equal(parameters.values[name], plain.parameters.values[name])
        assert parameters.values[name].data_ptr() != parameters.weights[name].copy.data_ptr()
    parameters.free(1)
    assert set(parameters.values) == {"head"}


def test_what_is_on_the_device_for_a_while_comes_home() -> None:
    memory, tensor = HostMemory(CPU), torch.arange(6.0).view(2, 3)
    home = tensor.data_ptr()
    memory.fetch([tensor]).wait()
    assert tensor.data_ptr() != home and not memory.is_at_home(tensor)
    tensor.mul_(2)
    made = torch.ones(4)
    memory.store([tensor, made]).wait()
    assert tensor.data_ptr() == home and memory.is_at_home(tensor)
    assert torch.equal(tensor, 2 * torch.arange(6.0).view(2, 3)) and torch.equal(made, torch.ones(4))


def test_buffers_are_used_again_by_size() -> None:
    pool = HostBuffers(pinned=False)
    buffer, like = pool.like(torch.empty(2, 3), torch.bfloat16)
    assert (like.shape, like.dtype, buffer.numel()) == ((2, 3), torch.bfloat16, 12)
    pool.give([buffer])
    assert pool.take(13) is not buffer and pool.take(12) is buffer

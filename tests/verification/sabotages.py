"""Things done wrong on purpose inside the ranks of a verification, each with what its report must name.

`struck` is a target for a worker pool: it breaks one thing in its process, runs the rank, and mends it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.engine import inputs, reductions
from phalanx.engine.engine import Engine
from phalanx.engine.gradients import BucketGradients, FlatSum, Reduced
from phalanx.engine.redistribute import Arriving, Mover
from phalanx.engine.reductions import GlobalReductions, StepRun
from phalanx.launch.context import RankContext
from phalanx.launch.worker_pool import WorkerPool
from phalanx.model.captured import Captured
from phalanx.model.graph.blocks import Port
from phalanx.model.weights.weights import SafetensorsWeights
from phalanx.model.zoo.zoo import build, resolve
from phalanx.params import optimizer_groups
from phalanx.params.buckets import Bucket
from phalanx.params.optimizer import Optimizer
from phalanx.plan.plan import Plan
from phalanx.program.instructions import Op, Program
from phalanx.session.session import Session
from phalanx.verification import rank_side
from phalanx.verification.case import Case, Training


class Own(nn.Module):
    """Somebody's module: layers, norms, dropout, a buffer, a matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Dropout(0.3))
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.first(x + self.shift)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.last(self.norm(hidden)), labels)


def _own(plan: str) -> Case:
    torch.manual_seed(0)
    data = tuple({"x": torch.randn(size, 8), "labels": torch.randint(0, 8, (size,))} for size in (7, 6))
    return Case(Own(), plan, data=data, training=Training(clip=0.1))


def settings(folder: Path) -> dict[str, Case]:
    """Models under plans that are all right as long as nothing is broken. folder: for a stored model."""
    torch.manual_seed(0)
    model: Any = build(resolve("gpt2", tiny=True))
    for parameter in model.parameters():  # new norms are all alike
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return {
        "replicas": _own("dp=2,mb=2"),
        "zero": _own("dp=2,zero=1,mb=2"),
        "stages": _own("pp=2,mb=2"),
        "split": _own("tp=2"),
        "folder": Case(folder, "dp=2", steps=1),
    }


@dataclass
class Scene:
    """Where a sabotage takes place. It may put another captured model in the place of this one."""

    rank: int
    steps: int
    captured: Captured
    patch: pytest.MonkeyPatch

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """`around` gets what stood there before its arguments."""
        original = getattr(owner, name)
        self.patch.setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    def after_last_step(self, act: Callable[[Optimizer], None]) -> None:
        updates = []

        def step(original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            updates.append(1)
            if len(updates) == self.steps:
                act(optimizer)

        self.wrap(Optimizer, "step", step)


def _weights_too_large(scene: Scene) -> None:
    scene.wrap(SafetensorsWeights, "_values", lambda original, *args: [1.5 * values for values in original(*args)])


def _one_weight_of_another(scene: Scene) -> None:
    def values(original: Any, weights: Any, name: str, boxes: Any) -> list[Tensor]:
        return original(weights, name.replace("ln_1", "ln_2"), boxes)

    scene.wrap(SafetensorsWeights, "_values", values)


def _nudged_replica(scene: Scene) -> None:
    def nudge(optimizer: Optimizer) -> None:
        if scene.rank == 1:
            optimizer.weights["norm.bias"].exact.reshape(-1)[0] += 1e-6

    scene.after_last_step(nudge)


def _nudged_tensor_part(scene: Scene) -> None:
    def nudge(optimizer: Optimizer) -> None:
        if scene.rank == 1:
            optimizer.weights["norm.weight"].exact[0] += 1e-6

    scene.after_last_step(nudge)


def _stale_shards(scene: Scene) -> None:
    ended: list[bool] = []
    scene.after_last_step(lambda _: ended.append(True))
    scene.wrap(Bucket, "share", lambda original, *given: None if ended else original(*given))


def _no_reduction(scene: Scene) -> None:
    def reduce(bucket: BucketGradients, added: FlatSum) -> Arriving:
        buffer = added.close()
        return Arriving(bucket.how.zero._nothing(), lambda: Reduced(bucket, buffer, added.added))

    scene.patch.setattr(BucketGradients, "reduce", reduce)


def _no_tied_sum(scene: Scene) -> None:
    scene.patch.setattr(
        BucketGradients, "sum", staticmethod(lambda reduced, group: Arriving(group._nothing(), lambda: reduced))
    )


def _no_redistribute(scene: Scene) -> None:
    def backward(original: Any, mover: Mover, redistribution: Any, dims: Any) -> Callable[[Tensor], Any]:
        usual = original(mover, redistribution, dims)
        nothing = mover._group._nothing()
        return (lambda value: Arriving(nothing, lambda: value)) if redistribution.kind == "identity" else usual

    scene.wrap(Mover, "backward", backward)


def _no_second_micro_batch(scene: Scene) -> None:
    def run(original: Any, engine: Engine, program: Program, step: StepRun, until: Op | None = None) -> None:
        original(engine, tuple(it for it in program if (it.op, it.micro_batch) != (Op.BW, 1)), step, until)

    scene.wrap(Engine, "run", run)


def _same_part_for_all(scene: Scene) -> None:
    def part(session: Session, first: int, samples: int) -> tuple[int, int]:
        return first, inputs.split(samples, session.plan.dp)[0]

    scene.patch.setattr(Session, "part", part)


def _swapped_layers(scene: Scene) -> None:
    def other(port: Port) -> Port:
        before, layers, rest = port.name.partition("layers.")
        if port.kind != "parameter" or not layers:
            return port
        return Port(port.kind, f"{before}{layers}{1 - int(rest[0])}{rest[1:]}")

    blocks = scene.captured.blocks
    swapped = tuple(replace(block, ports=tuple(map(other, block.ports))) for block in blocks.blocks)
    scene.captured = replace(scene.captured, blocks=replace(blocks, blocks=swapped))


def _local_mean(scene: Scene) -> None:
    def count(counting: GlobalReductions, step: StepRun) -> Arriving:
        items = reductions.total_items(step.inputs.values())
        return Arriving(counting._replicas._nothing(), lambda: items)

    scene.patch.setattr(GlobalReductions, "count", count)


def _other_dropout(scene: Scene) -> None:
    scene.wrap(inputs, "sample_keys", lambda original, seed, *args: original(seed + 1, *args))


def _changed_buffer(scene: Scene) -> None:
    held: dict[str, Tensor] = {}

    def load(original: Any, *args: Any) -> dict[str, Tensor]:
        held.update(original(*args))
        return held

    def change(optimizer: Optimizer) -> None:
        held["shift"] = held["shift"] if scene.rank == 0 else held["shift"] + 1e-6

    scene.wrap(rank_side, "load_buffers", load)
    scene.after_last_step(change)


def _forgotten_buffer(scene: Scene) -> None:
    scene.patch.setattr(
        rank_side, "load_buffers", lambda captured, *_: {n: torch.zeros_like(b) for n, b in captured.buffers.items()}
    )


def _scaled_state(scene: Scene) -> None:
    def scale(optimizer: Optimizer) -> None:
        optimizer.inner.state[optimizer.weights["last.bias"].exact]["exp_avg_sq"].mul_(1 + 1e-6)

    scene.after_last_step(scale)


def _other_rate(scene: Scene) -> None:
    def step(original: Any, optimizer: Optimizer, gradients: Any, lr: float, *args: Any) -> None:
        original(optimizer, gradients, lr * (1 + 1e-3), *args)

    scene.wrap(Optimizer, "step", step)


def _everything_decays(scene: Scene) -> None:
    scene.patch.setattr(optimizer_groups, "decays", lambda shape: True)


def _other_betas(scene: Scene) -> None:
    scene.wrap(rank_side, "_config", lambda original, case: original(case).model_copy(update={"betas": (0.9, 0.951)}))


def _local_norm(scene: Scene) -> None:
    def norm(
        original: Any, counting: GlobalReductions, step: StepRun, items: Any, losses: Any, gradients: Any, left: Any
    ) -> Tensor:
        original(counting, step, items, losses, gradients, left)
        step.norm = counting._optimizer.squared_norm(gradients, items).sqrt()
        return step.norm

    scene.wrap(GlobalReductions, "norm", norm)


def _no_clipping(scene: Scene) -> None:
    scene.patch.setattr(Optimizer, "_divisor", lambda *_: None)


def _sums_off(scene: Scene) -> None:
    def add(original: Any, total: FlatSum, gradients: dict[str, Any]) -> None:
        original(total, gradients)
        if "norm.weight" in gradients:
            total._views["norm.weight"].mul_(1 + 1e-7)

    scene.wrap(FlatSum, "add", add)


@dataclass(frozen=True)
class Sabotage:
    """found: what must stand in one of the report's failures."""

    what: str
    setting: str
    strike: Callable[[Scene], None]
    found: str


SABOTAGES = {
    each.what: each
    for each in (
        Sabotage("all weights × 1.5 when they are loaded", "folder", _weights_too_large, "initial '"),
        Sabotage("one norm loaded with the values of another", "folder", _one_weight_of_another, "initial '"),
        Sabotage("a buffer not loaded", "replicas", _forgotten_buffer, "buffer 'shift' on rank 0"),
        Sabotage("a buffer changed on one rank", "replicas", _changed_buffer, "buffer 'shift' on rank 1"),
        Sabotage("a replica's parameter moved by 1e-6 after the last step", "replicas", _nudged_replica,
                 "copy 'norm.bias' on rank 1"),
        Sabotage("a tensor-parallel copy moved by 1e-6 after the last step", "split", _nudged_tensor_part,
                 "copy 'norm.weight' on rank 1"),
        Sabotage("ZeRO: updated shards not shared after the last step", "zero", _stale_shards, "copy '"),
        Sabotage("optimizer state × (1 + 1e-6) after the last step", "replicas", _scaled_state,
                 "optimizer 'exp_avg_sq/last.bias'"),
        Sabotage("gradients not summed over replicas", "replicas", _no_reduction, "gradient '"),
        Sabotage("one gradient × (1 + 1e-7)", "replicas", _sums_off, "gradient 'norm.weight'"),
        Sabotage("gradients of a tied weight not summed over stages", "stages", _no_tied_sum,
                 "gradient 'first.weight'"),
        Sabotage("a redistribution between tensor-parallel ranks left out", "split", _no_redistribute, "gradient '"),
        Sabotage("a micro-batch without its backward", "stages", _no_second_micro_batch, "instructions"),
        Sabotage("both replicas train on the same samples", "replicas", _same_part_for_all, "loss '"),
        Sabotage("two layers in the wrong order", "stages", _swapped_layers, "loss '"),
        Sabotage("the loss divided by one replica's items", "replicas", _local_mean, "loss '"),
        Sabotage("dropout drawn with another key", "stages", _other_dropout, "loss '"),
        Sabotage("learning rate × (1 + 1e-3)", "replicas", _other_rate, "parameter '"),
        Sabotage("weight decay on norms and biases", "replicas", _everything_decays, "parameter '"),
        Sabotage("β₂ = 0.951 instead of 0.95", "replicas", _other_betas, "optimizer 'exp_avg_sq/"),
        Sabotage("gradients clipped by each stage's own norm", "stages", _local_norm, "parameter '"),
        Sabotage("gradients not clipped", "stages", _no_clipping, "parameter '"),
    )
}  # fmt: skip


def struck(
    context: RankContext, what: str, target: Callable[..., Any], case: Case, plan: Plan, captured: Captured, *rest: Any
) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        scene = Scene(context.rank, case.steps, captured, patch)
        SABOTAGES[what].strike(scene)
        return target(context, case, plan, scene.captured, *rest)


@dataclass(frozen=True)
class StruckPool:
    """A pool whose ranks do one thing wrong."""

    pool: WorkerPool
    what: str

    def run(self, target: Callable[..., Any], *job: Any, world: int) -> list[Any]:
        return self.pool.run(struck, self.what, target, *job, world=world)

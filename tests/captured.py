"""Small models captured in float64, with the plain model beside them: what the tests of the model core share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.engine.inputs import Inputs
from phalanx.engine.reductions import StepRun
from phalanx.launch.context import RankContext
from phalanx.model import interpret, reference
from phalanx.model.capture import capture
from phalanx.model.captured import Captured, attention_sites
from phalanx.model.graph.blocks import Blocks
from phalanx.model.ops import random
from phalanx.model.zoo import zoo
from phalanx.params.flat import Piece
from phalanx.plan.complete import complete
from phalanx.program.instructions import Op, Program
from phalanx.program.lower import lower
from phalanx.session.session import Session
from phalanx.tasks.custom import infer_inputs

GPT2, LLAMA, NEO, GEMMA3 = "gpt2", "meta-llama/Llama-3.2-1B", "EleutherAI/gpt-neo-2.7B", "google/gemma-3-1b-it"
T5, WHISPER, MIXTRAL = "google-t5/t5-small", "openai/whisper-small", "mistralai/Mixtral-8x7B-v0.1"
DOUBLE = torch.float64
Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A captured model, the plain one with its values, and a batch for both."""

    captured: Captured
    model: nn.Module
    batch: dict[str, Tensor]
    raw: dict[str, Tensor]  # the batch as the plain model takes it

    @property
    def blocks(self) -> Blocks:
        return self.captured.blocks

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def plain(self, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of the plain model in train mode, with the dropout decisions of `seed`."""
        self.model.zero_grad()
        keys = random.sample_keys(seed, 0, next(iter(self.batch.values())).shape[0])
        with reference.injected(self.model, keys, attention_sites(self.blocks), DOUBLE):
            loss = reference.loss(self.model, self.raw)
        loss.backward()
        return loss.detach().reshape(()), {
            n: p.grad.to_dense() for n, p in self.model.named_parameters() if p.grad is not None
        }

    def interpreted(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of the captured graph, node by node, without dropout."""
        leaves = {name: value.clone().requires_grad_() for name, value in self.parameters.items()}
        dims = self.captured.dims(self.batch)
        total, count = interpret.sum_and_count(self.blocks, leaves, self.captured.buffers, self.batch, dims, {})
        loss = total / count
        loss.backward()
        return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}

    def count(self, samples: slice) -> Tensor:
        """What the loss of these samples is a mean over."""
        batch = {name: tensor[samples] for name, tensor in self.batch.items()}
        _, count = interpret.sum_and_count(
            self.blocks, self.parameters, self.captured.buffers, batch, self.captured.dims(batch), {}
        )
        return count

    def session(
        self, plan: str = "", *, context: RankContext | None = None, frozen: Sequence[str] = (), **options: object
    ) -> Session:
        """The only rank of a plan, or the one at `context`, with the plain model's values."""
        context, samples = context or RankContext.alone(), next(iter(self.batch.values())).shape[0]
        values = self.parameters

        def read(name: str, is_master: bool, piece: Piece) -> Tensor:
            return piece.of(values[name])

        costs = self.blocks.flops(self.captured.dims(self.batch))
        config = RunConfig.create(**{"dtype": "float64", "compile": "off", "batch_size": samples, **options})
        return Session.open(
            self.captured, config, complete(plan, world=context.world, batch_size=samples, costs=costs).plan,
            context=context, trainable=[name for name in self.captured.trainable if name not in frozen], read=read,
            buffers=self.captured.buffers,
        )  # fmt: skip

    def micro_batches(
        self, session: Session, sizes: Sequence[int], seed: int = 0, training: bool = True
    ) -> list[Inputs]:
        feeder = session.step.feeder if training else session._evaluator._feeder
        feeder._seed = seed
        return feeder(self.batch, 0, sizes)

    def step(
        self, session: Session, sizes: Sequence[int], schedule: str = "1f1b", seed: int = 0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of micro-batches of these sizes in the order of a schedule; they must leave nothing."""
        return run(session, before_step(session, schedule, len(sizes)), self.micro_batches(session, sizes, seed))


def before_step(session: Session, schedule: str, num_micro_batches: int) -> Program:
    """A program for the rank."""
    plan = replace(session.plan, schedule=schedule, mb=num_micro_batches)
    return lower(plan, session.compiled.formation.shape)[0]


def run(session: Session, program: Program, parts: list[Inputs]) -> tuple[Tensor, dict[str, Tensor]]:
    """Up to where the gradients are ready."""
    step = StepRun({(number, 0): part for number, part in enumerate(parts)}, lr=0.0)
    session.step.engine.run(program, step, until=Op.STEP)
    require_released(step)
    return step.loss, step.gradients


@cache
def named(name: str, *, samples=3, tokens=9, padding=False, dropout: float | None = None, **overrides: object) -> Case:
    """A tiny zoo model. Captures are shared between tests: nothing may change a case."""
    spec = zoo.resolve(name, tiny=True, overrides=overrides or None)
    task = tasks.get(spec.task)
    batch = _double(task.synthetic(spec.config, batch=samples, tokens=tokens, seed=1, padding=padding))
    inputs = task.inputs(spec.config, padding=padding)
    captured = capture(spec, inputs, dtype=DOUBLE, dropout=dropout, check=False)
    torch.manual_seed(0)
    model = reference.plain(spec, DOUBLE, dropout)
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones would hide errors
            parameter += 0.05 * torch.randn_like(parameter)
    return Case(captured, model, batch, task.reference_inputs(batch))


def own(model: nn.Module, **batch: Tensor) -> Case:
    """A module of the user's own, called with the batch as keyword arguments."""
    model, batch = model.double(), _double(batch)
    spec = zoo.resolve(model)
    captured = capture(spec, infer_inputs(batch), dtype=DOUBLE, check=False, use_cache=False)
    return Case(captured, model, batch, batch)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode for a while: other tests share the model."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def require_released(step: StepRun) -> None:
    """Nothing of the passes through the model is left."""
    kept = ("d_parameters", "reduced", "norm", "items", "state", "parameters")
    pairs = zip(step.linked.table.values, step.values, strict=False)
    assert [str(value) for value, there in pairs if there is not None and value.kind not in kept] == []


def require_equal(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Loss and every gradient, to 1e-10 of the largest gradient."""
    torch.testing.assert_close(got[0], expected[0], rtol=1e-11, atol=1e-12)
    largest = max(float(g.abs().max()) for g in expected[1].values())
    for name in set(got[1]) | set(expected[1]):
        ours, theirs = (side[1].get(name) for side in (got, expected))
        difference = ours - theirs if ours is not None and theirs is not None else ours if theirs is None else theirs
        assert float(difference.abs().max()) <= 1e-10 * largest, name


def _double(batch: Batch) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}

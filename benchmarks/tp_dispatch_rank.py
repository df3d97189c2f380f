"""The rank's side of `tp_dispatch.py`: steps under tp=2 with nothing sent, and of an unsplit model of that size."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from compare import quartiles
from overlap_silence import silent
from torch import Tensor

from phalanx import tasks
from phalanx.config import RunConfig
from phalanx.launch.context import RankContext
from phalanx.model.capture import capture
from phalanx.model.captured import Captured
from phalanx.model.zoo import zoo
from phalanx.params.flat import Piece
from phalanx.plan.complete import complete
from phalanx.session.session import Session

LR, WARM_UP, HEAD = 0.0, 3, 64


@dataclass(frozen=True)
class Shape:
    """layers x width of the whole model; `samples` of `tokens` tokens are one batch."""

    layers: int
    width: int
    samples: int
    tokens: int
    vocabulary: int = 1024

    def capture(self, parts: int) -> tuple[Captured, dict[str, Tensor]]:
        """The model whose layers hold one of `parts` parts of each tensor, and a batch for it."""
        from transformers import LlamaConfig

        heads = self.width // HEAD // parts
        config = LlamaConfig(
            hidden_size=self.width, intermediate_size=self.width * 4 // parts, num_hidden_layers=self.layers,
            num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD, vocab_size=self.vocabulary // parts,
            max_position_embeddings=self.tokens, tie_word_embeddings=False,
        )  # fmt: skip
        spec = zoo.resolve(config, task="causal-lm")
        task = tasks.get(spec.task)
        batch = task.synthetic(spec.config, batch=self.samples, tokens=self.tokens, seed=0)
        return capture(spec, task.inputs(spec.config), dtype=torch.float32, dropout=0.0, check=False), batch


def compare(context: RankContext, shape: Shape, rounds: int) -> dict[str, Any]:
    """The job of one rank; the second one is there because groups of two need it."""
    split = _rank(context, shape, "tp=2", 1)
    whole = _rank(RankContext.alone(), shape, "tp=1", 2)
    seconds: dict[str, list[float]] = {"tp=1": [], "tp=2": []}
    for number in range(WARM_UP + rounds):
        for name, (session, step) in {"tp=2": split, "tp=1": whole}.items():
            with silent(session) if name == "tp=2" else nullcontext():
                took = _processor_seconds(step)
            if number >= WARM_UP:
                seconds[name].append(took)
    split[0].close()
    whole[0].close()
    ratios = [a / b for a, b in zip(seconds["tp=2"], seconds["tp=1"], strict=True)]
    return {
        "seconds": {name: quartiles(values) for name, values in seconds.items()}, "ratio": quartiles(ratios),
        "instructions": {"tp=1": len(whole[0].step.program), "tp=2": len(split[0].step.program)},
    }  # fmt: skip


def _rank(context: RankContext, shape: Shape, text: str, parts: int) -> tuple[Session, Callable[[], object]]:
    captured, batch = shape.capture(parts)

    def read(name: str, is_master: bool, piece: Piece) -> Tensor:
        value = torch.empty(piece.stop - piece.start)
        return value.fill_(1.0) if len(captured.shapes[name]) == 1 else value.normal_(0, 0.02)

    config = RunConfig.create(batch_size=shape.samples, optimizer="sgd")
    costs = captured.blocks.flops(captured.dims(batch))
    plan = complete(text, world=context.world, batch_size=shape.samples, costs=costs).plan
    session = Session.open(
        captured, config, plan, context=context, trainable=captured.trainable, read=read, buffers=dict(captured.buffers)
    )
    return session, lambda: session.step(batch, 0, LR).read()


def _processor_seconds(step: Callable[[], object]) -> float:
    begin = time.thread_time()
    step()
    return time.thread_time() - begin

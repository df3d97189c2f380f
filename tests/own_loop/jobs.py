"""What ranks do in tests of loops of the user's own: open a session, train a few steps, and say what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import phalanx
from phalanx.adapt.migrate import ChangeRefused
from phalanx.config import RunConfig
from phalanx.engine.memory import state_memory
from phalanx.launch.context import RankContext
from phalanx.own_loop.open import open_on
from phalanx.own_loop.session import OwnSession
from phalanx.params.groups import ParameterGroup
from phalanx.verification.report import Report
from tests.adapt.jobs import _broken

SAMPLES, TOKENS, LR = 8, 12, 1e-2


class Net(nn.Module):
    """Returns outputs, no loss."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden))
        return self.head(self.norm(hidden)), hidden


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def numbers(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 5, (SAMPLES,), generator=generator)


def words(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 97, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def both(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """A loss of both outputs of a `Net`, as one function."""
    logits, hidden = outputs
    return F.cross_entropy(logits, target) + 0.1 * hidden.square().mean()


def contrastive(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """One that compares the samples of a batch with each other, so that no parts of it have a loss of their own."""
    logits, hidden = outputs
    like = F.normalize(hidden, dim=-1) @ F.normalize(hidden, dim=-1).T
    return F.cross_entropy(5 * like, torch.arange(like.shape[0]).roll(1)) + F.cross_entropy(logits, target)


@dataclass(frozen=True)
class Trained:
    """On rank 0 also the model."""

    losses: list[float]
    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def opened(context: RankContext, model: nn.Module, plan: str, example: Any, **options: Any) -> OwnSession:
    given = {name: options.pop(name) for name in ("loss", "outputs", "groups", "has_optimizer", "optimizer_class")
             if name in options}  # fmt: skip
    config = RunConfig.create(
        **{"dtype": "float64", **options}, plan=plan, clip=None, steps=1, lr_schedule="constant", device="cpu"
    )
    return open_on(context, model, config, example, **given)


def finished(session: OwnSession, losses: list[Any]) -> Trained:
    with session:
        return Trained([float(loss) for loss in losses], session.state_dict())


def clipped_adamw(context: RankContext, plan: str, language: bool = False, steps: int = 3) -> Trained:
    """An optimizer of one's own, clipping, a scheduler, accumulation; of a language model that returns its loss, or of
    a loss function."""
    batch = words if language else numbers
    session = opened(context, llama() if language else net(), plan, batch(0), loss=None if language else both)
    optimizer = torch.optim.AdamW(session.parameters(), lr=LR, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            losses.append(session.forward_backward(batch(2 * step + part), scale=0.5))
        losses.append(session.clip_grad_norm_(0.3))
        optimizer.step()
        scheduler.step()
    losses.append(session.evaluate(batch(100)))
    return finished(session, losses)


def own_step(context: RankContext, plan: str, optimizer: str = "adamw", steps: int = 3) -> Trained:
    """The session's own optimizer, with groups, on a loss function of two outputs."""
    groups = [
        ParameterGroup(is_vector, decay=0.3, lr=0.5),
        ParameterGroup("layers.1.*", freeze=True),
        ParameterGroup("head.*", lr=3.0),
    ]
    session = opened(
        context, net(), plan, numbers(0), loss=both, groups=groups, has_optimizer=True, optimizer=optimizer, lr=LR
    )
    losses: list[Any] = []
    for step in range(steps):
        losses.append(session.forward_backward(numbers(step)))
        session.step()
    return finished(session, losses)


def is_vector(name: str, tensor: Tensor) -> bool:
    return tensor.dim() == 1 and not name.startswith("layers.1.")


def outer(
    context: RankContext, plan: str, loss: Callable[..., Tensor], scope: Any = "whole", steps: int = 3
) -> Trained:
    """A loss outside."""
    session = opened(context, net(), plan, numbers(0)[0], loss="outer", outputs=scope)
    optimizer = torch.optim.SGD(session.parameters(), lr=LR, momentum=0.9)
    losses: list[Any] = []
    for step in range(steps):
        x, target = numbers(step)
        optimizer.zero_grad()
        value = loss(session(x), target if scope == "whole" else session.part(target))
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    with torch.no_grad():
        losses.append(session(numbers(0)[0])[0].sum())
    return finished(session, losses)


def saved_and_loaded(context: RankContext, plan: str, other: str, folder: Path) -> Trained:
    """Two steps under one plan, saved; the third under another."""
    session = opened(context, net(), plan, numbers(0), loss=both)
    optimizer = torch.optim.Adam(session.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        optimizer.step()
    session.save(folder)
    session.close()
    context = replace(context, generation=context.generation + 1000)  # as the next call of phalanx.open has it
    session = opened(context, net(), other, numbers(0), loss=both)
    session.optimizer = optimizer = torch.optim.Adam(session.parameters(), lr=0.5)  # the checkpoint's rate comes back
    session.load(folder)
    assert session.samples == 2 * SAMPLES and session.steps == 2
    losses.append(session.forward_backward(numbers(2)))
    optimizer.step()
    return finished(session, losses)


def adafactor(context: RankContext, plan: str, steps: int = 3) -> Trained:
    """An optimizer that looks at matrices as a whole."""
    session = opened(context, net(), plan, numbers(0), loss=both)
    optimizer = torch.optim.Adafactor(session.parameters(), lr=LR)
    losses: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(session.forward_backward(numbers(step)))
        optimizer.step()
    return finished(session, losses)


def two_forwards(context: RankContext, plan: str) -> None:
    session = opened(context, net(), plan, numbers(0)[0], loss="outer")
    session(numbers(0)[0])
    session(numbers(1)[0])


def lora(context: RankContext, plan: str, kind: str, folder: Path | None = None, steps: int = 3) -> list[Trained]:
    """Adapters alone, from large gradients; how it began and how it ended."""
    model = llama() if kind == "llama" else net()
    example, loss = (words(0), None) if kind == "llama" else (numbers(0), both)
    session = opened(context, model, plan, example, loss=loss, lora="r=2,alpha=8")
    begun = Trained([], session.state_dict())
    optimizer = torch.optim.SGD(session.parameters(), lr=1.0)
    losses: list[Any] = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(session.forward_backward(words(step) if kind == "llama" else numbers(step)))
        optimizer.step()
    if folder is not None:
        session.export(folder)
    return [begun, finished(session, losses)]


def changing(
    context: RankContext, plans: Sequence[str], steps: int = 2, kind: str = "adamw", prepares: bool = False
) -> Trained:
    """The session's own optimizer under a scheduler, a few steps under each plan. prepares: for each of them before."""
    session = opened(context, net(), plans[0], numbers(0), loss=both, has_optimizer=True, optimizer=kind, lr=LR)
    assert session.optimizer is not None
    optimizer, losses = session.optimizer, []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number, plan in enumerate(plans):
        if number:
            assert session.change(plan).ready is prepares
            assert session.optimizer is optimizer
        if prepares and number + 1 < len(plans):
            session.prepare("mb=1")  # which is then given up for another
            session.prepare(plans[number + 1])
        for step in range(steps):
            losses.append(session.forward_backward(numbers(number * steps + step)))
            session.step()
            scheduler.step()
        while prepares and number + 1 < len(plans) and not session.is_prepared:
            session._under.go_on()
    return finished(session, losses)


def frozen_before_changes(context: RankContext, plans: Sequence[str], steps: int = 2) -> Trained:
    """A layer that the loop freezes before the first step, the head before the second; all goes on in the last. An
    empty plan changes nothing."""
    session = opened(context, net(), plans[0], numbers(0), loss=both, has_optimizer=True, optimizer="adamw", lr=LR)
    losses: list[Any] = []
    for step in range(steps * len(plans)):
        if step and step % steps == 0 and plans[step // steps]:
            session.change(plans[step // steps])
        for name, value in session.named_parameters():
            if name.startswith(("layers.1.", "head.")[step : step + 1]):
                value.requires_grad_(False)
            elif step == steps * len(plans) - 1:
                value.requires_grad_(True)
        losses.append(session.forward_backward(numbers(step)))
        losses.append(session.clip_grad_norm_(0.5))
        session.step()
    return finished(session, losses)


def refused_midway(context: RankContext, steps: int) -> Trained:
    """So many steps before a change of plan that rank 1 has no room for when some state has moved, and twice as many
    after it, half of them under the schedule of before."""
    session = opened(context, net(), "pp=2,mb=2", numbers(0), loss=both, has_optimizer=True, optimizer="adamw", lr=LR)
    optimizer, losses = session.optimizer, []
    assert optimizer is not None
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def train() -> None:
        for _ in range(steps):
            losses.append(session.forward_backward(numbers(len(losses))))
            session.step()
            scheduler.step()
        state = session._session.state
        assert state.optimizer.inner is session.optimizer is optimizer
        weights = {name: weight.exact for name, weight in state.parameters.trained.items()}
        assert all(own is weights[name] for name, own in session.named_parameters())

    session.use_schedule("gpipe")
    train()
    with _broken("room", 2, context.rank == 1), pytest.raises(ChangeRefused, match="rank 1: no room for "):
        session.change("dp=2")
    assert session.plan.schedule == "gpipe"
    train()
    session.use_schedule("1f1b")
    train()
    return finished(session, losses)


def looked_at(context: RankContext, plan: str) -> Trained:
    """A step of a language model that computes its loss itself, then its outputs."""
    session = opened(context, llama(), plan, words(0))
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    losses: list[Any] = [session.forward_backward(words(0))]
    optimizer.step()
    logits = session.outputs({"input_ids": words(1)["input_ids"][:, :-2]})["logits"]
    assert not logits.requires_grad
    losses += [logits[row].square().sum() for row in range(SAMPLES)]
    losses.append(session.forward_backward(words(2)))  # training goes on as if nothing had been asked
    return finished(session, losses)


def of_sections(output: Tensor, target: Tensor) -> Tensor:
    """A loss that takes an output apart, so that each part of it is split by itself."""
    first, second, third = output.chunk(3, -1)
    return F.mse_loss((first * second * third).sum(-1), target.double())


def looked_at_fused(context: RankContext, plan: str) -> None:
    session = opened(context, nn.Linear(6, 12).double(), plan, numbers(0), loss=of_sections)
    session.outputs({"input": numbers(1)[0]})


def by_matrix(context: RankContext, plan: str, kind: str, folder: Path | None = None, other: str = "") -> Trained:
    """Muon for the matrices of layers and AdamW for all else, or Adafactor, as the session's own optimizer; where there
    is a folder saved before the last step, and taken up again under another plan."""
    chosen: dict[str, Any] = {"optimizer": kind} if kind == "muon" else {"optimizer_class": torch.optim.Adafactor}
    chosen |= {"loss": both, "has_optimizer": True, "lr": LR}
    session = opened(context, net(), plan, numbers(0), **chosen)
    losses: list[Any] = []
    for step in range(3):
        if folder is not None and step == 2:
            session.save(folder)
            session.close()
            context = replace(context, generation=context.generation + 1000)
            session = opened(context, net(), other, numbers(0), **chosen)
            session.load(folder)
        losses.append(session.forward_backward(numbers(step)))
        session.step()
    return finished(session, losses)


def kept_by_muon(context: RankContext, plan: str) -> tuple[int, int]:
    """Bytes of the optimizer's state on this rank: foreseen, and after a step."""
    session = opened(context, net(), plan, numbers(0), loss=both, has_optimizer=True, optimizer="muon", lr=LR)
    session.forward_backward(numbers(0))
    session.step()
    own, optimizer = session._session.compiled, session._session.state.optimizer
    kept = [tensor for _, _, tensor in optimizer.tensors()] + [tensor for _, tensor in optimizer.owned()]
    session.close()
    return state_memory(own).device["moments"], sum(tensor.nbytes for tensor in kept)


def hosted(context: RankContext, plan: str, steps: int = 3) -> Trained:
    """The session's own optimizer, whose state lies on the host; clipped, with a schedule."""
    session = opened(context, net(), plan, numbers(0), loss=both, has_optimizer=True, optimizer="adamw", lr=LR)
    assert session.optimizer is not None
    scheduler = torch.optim.lr_scheduler.LambdaLR(session.optimizer, lambda step: 1 / (1 + step))
    losses: list[Any] = []
    for step in range(steps):
        losses.append(session.forward_backward(numbers(step)))
        losses.append(session.clip_grad_norm_(0.3))
        session.step()
        scheduler.step()
    losses.append(session.evaluate(numbers(100)))
    return finished(session, losses)


def verified(context: RankContext, plan: str, kind: str) -> Report:
    """A session that trains, asked in the middle of its loop, between a backward and a step: what it answers; that
    its loop goes on as it would have is compared, too."""
    session, make = _trains(context, plan, kind)
    optimizer = torch.optim.SGD(session.parameters(), lr=LR)
    make(0)
    optimizer.step()
    optimizer.zero_grad()
    make(1)
    before = (session.samples, session.steps, [_gradient(tensor) for tensor in session.parameters()])
    batches = [words(2), words(3)] if kind == "language" else [numbers(2), numbers(3)]
    report = phalanx.verify(session, data=batches, **{"loss": contrastive} if kind == "outer" else {})
    after = (session.samples, session.steps, [_gradient(tensor) for tensor in session.parameters()])
    assert before[:2] == after[:2] and all(map(torch.equal, before[2], after[2]))
    optimizer.step()
    session.close()
    return report


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros(()) if tensor.grad is None else tensor.grad.clone()


def _trains(context: RankContext, plan: str, kind: str) -> tuple[OwnSession, Callable[[int], None]]:
    """A session and how the gradients of its batch number so and so are made."""
    if kind == "outer":
        session = opened(context, net(), plan, numbers(0)[0], loss="outer")
        return session, lambda step: contrastive(session(numbers(step)[0]), numbers(step)[1]).backward()
    language = kind == "language"
    example, model = (words(0), llama()) if language else (numbers(0), net())
    session = opened(context, model, plan, example, loss=None if language else both)
    batch = words if language else numbers
    return session, lambda step: session.forward_backward(batch(step)) and None

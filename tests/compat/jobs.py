"""The original documents' own loops, on ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from phalanx.compat.oases import BenchmarkLM
from phalanx.compat.optimus_prime import Optimus_p
from phalanx.launch.context import RankContext

SAMPLES, TOKENS, VOCABULARY, LR, STEPS = 8, 12, 97, 1e-2, 3


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


def texts() -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(i)) for i in range(32)]


def optimus_prime(
    context: RankContext, sizes: dict[str, int], mode: str, folder: Path | None = None
) -> tuple[list[float], dict[str, Tensor], list[bool]]:
    """As in its examples: the batch is prepared where the first stage is, the loss is read where the last one is."""
    swaps: dict[str, Any] = {"optimizer": torch.optim.Adam, "lr": LR} if "swap_opt_in_fwdbwd" in sizes else {}
    optimus_p = Optimus_p(gpt2(), 2, use_gpu=False, dtype="float64", context=context, **sizes, **swaps)
    optimus_p.train()
    inputs = torch.stack(texts()[:SAMPLES]) if optimus_p.is_first_stage() else None
    assert (report := optimus_p.verify(inputs, inputs)).ok, report
    if not swaps:
        optimus_p.optimizer = torch.optim.Adam(optimus_p.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimus_p.optimizer, 1, gamma=0.9)
    total: list[float] = []
    for i, batch in enumerate(optimus_p.prepare_dataloader(texts(), SAMPLES, shuffle=False)):
        data, labels = None, None
        if optimus_p.is_first_stage():
            data, labels = batch, batch
        labels = optimus_p.move_labels2last_stage(labels)
        optimus_p.optimizer.zero_grad()
        optimus_p.run(data, labels, mode=mode)  # pyright: ignore[reportArgumentType]
        optimus_p.clip_grad_norm_(0.5)
        optimus_p.optimizer.step()
        scheduler.step()
        if optimus_p.is_last_stage():
            total.append(float(sum(optimus_p.get_loss()) / optimus_p.num_mb))
        if i == STEPS - 1:
            break
    if folder is not None:
        optimus_p.save_ckpt(folder)
    places = [optimus_p.is_first_stage(), optimus_p.is_last_stage()]
    values = optimus_p.session.state_dict()
    if folder is not None:
        optimus_p.session.close()
        fresh = replace(context, generation=context.generation + 1000)
        again = Optimus_p(gpt2(), 2, dtype="float64", context=fresh, **sizes)
        again.load_ckpt(folder)
        loaded = again.session.state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in values.items())
    return total, values, places


def oases(context: RankContext, schedule: str, tp: int, dp: int) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Its sample usage."""
    model = BenchmarkLM(
        schedule=schedule, num_l=2, h=32, n=4, tp=tp, dp=dp, vocabulary=VOCABULARY, tokens=32, dtype="float64",
        device="cpu", context=context,
    )  # fmt: skip
    begun = model.session.state_dict()
    assert (report := model.verify(*labelled()[0])).ok, report
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses: list[float] = []
    for inputs, label in labelled():
        optimizer.zero_grad()
        x = model(inputs)
        loss = F.cross_entropy(x, label)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [begun, model.session.state_dict()]


def labelled() -> list[tuple[Tensor, Tensor]]:
    rows = torch.stack(texts()[:SAMPLES])
    return [(rows.roll(step, 1), rows.roll(step - 1, 1)) for step in range(STEPS)]


def plain_oases(begun: dict[str, Any]) -> tuple[list[float], nn.Module]:
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=32, vocab_size=VOCABULARY, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    model.load_state_dict(begun)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses: list[float] = []
    for inputs, label in labelled():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).logits.transpose(1, 2), label)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model

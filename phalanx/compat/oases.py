"""Oases' interface: a language model of a given size that is split over tensor-parallel ranks, used as any module is.

The loss is computed outside, from outputs that every rank has for the whole batch. The training schedules have their
original names, which are those of a plan's `overlap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config

from phalanx.config import RunConfig
from phalanx.errors import ConfigError, nearest
from phalanx.launch.context import RankContext
from phalanx.own_loop.open import OUTER, open_on
from phalanx.own_loop.open import open as open_session
from phalanx.own_loop.session import OwnSession
from phalanx.plan.rules import OVERLAPS
from phalanx.verification.report import Report
from phalanx.verification.verify_session import verify_session

SCHEDULES = ("default_checkpoint", "optim_comm_checkpoint", "overlap_checkpoint", "oases")
Loss = Callable[[Tensor, Tensor], Tensor]
_TOKENS = 8  # of the example; batches may have any number up to `tokens`


class BenchmarkLM(nn.Module):
    """num_l layers of width h with n heads, over tp × dp ranks. `model(ids)` gives [samples, vocabulary, tokens], as
    torch's cross entropy takes it beside labels of [samples, tokens]. tokens: the most in a sample."""

    session: OwnSession

    def __init__(
        self,
        schedule: str = "oases",
        num_l: int = 24,
        h: int = 3072,
        n: int = 48,
        tp: int = 1,
        dp: int = 1,
        *,
        vocabulary: int = 50304,
        tokens: int = 1024,
        num_mb: int = 1,
        dtype: str = "float32",
        device: str = "auto",
        seed: int = 0,
        context: RankContext | None = None,
    ) -> None:
        super().__init__()
        require_schedule(schedule)
        config = language_model(num_l, h, n, vocabulary, tokens)
        halves = OVERLAPS[schedule].halves if tp > 1 else 1
        example = {"input_ids": torch.zeros(dp * num_mb * tp * halves, _TOKENS, dtype=torch.int64)}
        options: dict[str, Any] = {"plan": plan_of(schedule, tp, dp, num_mb), "dtype": dtype, "device": device}
        dims = {"input_ids": ("batch", "tokens")}
        if context is None:
            session = open_session(config, example=example, loss=OUTER, dims=dims, seed=seed, **options)
        else:
            run = RunConfig.create(clip=None, seed=seed, **options)
            session = open_on(context, config, run, example, OUTER, dims=dims)
        vars(self)["session"] = session

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: token ids of the global batch, the same on every rank."""
        return _as_given(self.session(inputs))

    def verify(self, inputs: Tensor, label: Tensor, loss: Loss = F.cross_entropy) -> Report:
        """Whether a loss of `self(inputs)` has the gradients of the plain model; nothing is kept of it."""

        def outside(outputs: Mapping[str, Tensor], target: Tensor) -> Tensor:
            return loss(_as_given(outputs), target)

        return verify_session(self.session, [{"input_ids": inputs, "target": label}], outside)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """What this rank updates."""
        return self.session.parameters()

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[Any]:
        return self.session.named_parameters()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.session.zero_grad()


def _as_given(outputs: Mapping[str, Tensor]) -> Tensor:
    return outputs["logits"].transpose(1, 2)


def require_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ConfigError(f"BenchmarkLM: schedule = {schedule!r} is unknown", nearest(schedule, SCHEDULES))


def language_model(num_l: int, h: int, n: int, vocabulary: int, tokens: int) -> GPT2Config:
    if min(num_l, h, n, vocabulary, tokens) < 1:
        sizes = f"num_l = {num_l}, h = {h}, n = {n}, vocabulary = {vocabulary}, tokens = {tokens}"
        raise ConfigError(f"BenchmarkLM: one of {sizes} is below 1", "give numbers of 1 or more")
    if h % n:
        raise ConfigError(f"BenchmarkLM: h = {h} is not a multiple of n = {n} heads", "choose another n")
    return GPT2Config(
        n_layer=num_l, n_embd=h, n_head=n, n_positions=tokens, vocab_size=vocabulary, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def plan_of(schedule: str, tp: int, dp: int, num_mb: int) -> str:
    """Without tensor parallelism there is nothing to overlap, and a schedule is what it computes again."""
    require_schedule(schedule)
    again = f"overlap={schedule}" if tp > 1 else f"recompute={OVERLAPS[schedule].recompute}"
    return f"tp={tp},dp={dp},mb={num_mb},{again}"

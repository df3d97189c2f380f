"""Samples of what the model says while it is trained: prompts continued greedily, always the same ones.

Rank 0 puts the whole model together on the CPU, one tensor after the other as for an export, so any plan will do and
the device's memory is left alone; it is meant for models that fit in the memory of a host.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.config import RunConfig
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import ConfigError, PhalanxError
from phalanx.launch.context import RankContext
from phalanx.model.zoo.zoo import build
from phalanx.prepare.prepare import Prepared
from phalanx.session.exporting import whole_parameters
from phalanx.session.spare import Member

TASKS = ("causal-lm", "text-to-text")


class Generator:
    """Continues the prompts of a run. Every rank makes and calls it, one without a place too; rank 0 has the texts."""

    def __init__(self, run: Prepared, config: RunConfig, context: RankContext) -> None:
        if run.task.name not in TASKS or run.spec.config is None:
            raise ConfigError(
                f"option generate_every = {config.generate_every}: task {run.task.name} does not write text",
                f"leave it out, or choose a model for {' or '.join(TASKS)}",
            )
        if run.tokenizer is None:
            raise ConfigError(
                "option generate_prompts needs a tokenizer, and the data is tokens already",
                "name the tokenizer's folder (--tokenizer), or 'bytes'",
            )
        self._run, self._config, self._context = run, config, context
        self._tokenizer: Tokenizer = run.tokenizer
        self._reads = run.task.name == "text-to-text"
        self._prompts = [(prompt, self._encoded(prompt)) for prompt in config.generate_prompts]
        self._module: Any = None

    def __call__(self, session: Member, step: int) -> list[tuple[str, str]]:
        """Each prompt with what the model makes of it."""
        tensors = whole_parameters(session, self._context, f"generate-{step}", self._config.timeout)
        if self._context.rank > 0:
            for _ in tensors:
                raise AssertionError("only rank 0 gets tensors")
            return []
        module = self._filled(dict(tensors))
        return [(prompt, self._continued(module, prompt, ids)) for prompt, ids in self._prompts]

    def _encoded(self, prompt: str) -> torch.Tensor:
        (encoded,) = self._tokenizer.encode([prompt], special=self._reads)
        if not len(encoded):
            raise ConfigError(f"option generate_prompts = {prompt!r} has no tokens", "give it at least one character")
        return torch.from_numpy(encoded.astype("int64"))[None]

    @torch.no_grad()
    def _filled(self, tensors: dict[str, torch.Tensor]) -> Any:
        if self._module is None:
            self._module = build(self._run.spec, dtype=self._run.dtype, dropout=self._config.dropout).eval()
            self._module.config.use_cache = getattr(self._run.spec.config, "use_cache", False)
        for name, parameter in self._module.named_parameters():
            parameter.copy_(tensors[name])
        return self._module

    @torch.no_grad()
    def _continued(self, module: Any, prompt: str, ids: torch.Tensor) -> str:
        pad = self._tokenizer.pad_id if self._tokenizer.pad_id is not None else self._tokenizer.eos_id
        try:
            written = module.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=self._config.generate_tokens,
                do_sample=False, pad_token_id=pad, eos_token_id=self._tokenizer.eos_id,
            )  # fmt: skip
        except Exception as error:  # transformers raises many kinds
            raise PhalanxError(
                f"the model could not continue the prompt {prompt!r}: {type(error).__name__}: {error}",
                "a prompt and what follows must fit in the model's positions: shorten the prompt or generate_tokens",
            ) from error
        return self._tokenizer.decode(written[0].tolist() if self._reads else written[0, ids.shape[1] :].tolist())

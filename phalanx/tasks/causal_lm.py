"""Causal language modelling: predict every token from those before it.

Learns from plain text in windows, or from conversations of which only the assistant's turns count: those are written
with the tokenizer's own chat template where it has one, else with a plain one, `role: content` per line.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from phalanx.tasks.base import (
    IGNORE,
    Batch,
    BrokenRecord,
    Input,
    RecordRemark,
    RecordTask,
    Sample,
    Windows,
    WindowTask,
    count_tokens,
    document_layout,
    mask_of_lengths,
    pad_labelled,
    random_lengths,
    random_starts,
)
from phalanx.tasks.vocabulary import pad_id, random_ids

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer

Message = Mapping[str, str]


def encode_conversation(messages: Any, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids and labels of one conversation."""
    turns = _checked(messages)
    pieces = _templated(turns, tokenizer) if tokenizer.has_chat_template else list(_plain(turns))
    ids: list[int] = []
    labels: list[int] = []
    # Encoded piece by piece: where a turn begins is where generation begins, so no token may span it.
    for (_, learned), piece in zip(pieces, tokenizer.encode([text for text, _ in pieces]), strict=True):
        tokens = piece.tolist()
        if learned and not tokenizer.has_chat_template and tokenizer.eos_id is not None:
            tokens.append(tokenizer.eos_id)
        ids += tokens
        labels += tokens if learned else [IGNORE] * len(tokens)
    return ids, labels


def _checked(messages: Any) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BrokenRecord("messages is not a list of turns")
    for number, message in enumerate(messages):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise BrokenRecord(f"turn {number} of messages has no role and content")
    return messages


def _plain(turns: Sequence[Message]) -> Iterator[tuple[str, bool]]:
    for turn in turns:
        if turn["role"] == "assistant":
            yield "assistant: ", False
            yield turn["content"], True
            yield "\n", False
        else:
            yield f"{turn['role']}: {turn['content']}\n", False


def _templated(turns: Sequence[Message], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Each turn of the assistant as the template writes it when it is the last; a template that later writes it
    otherwise (leaves its thoughts out, say) leaves only the last turn to learn."""
    pieces: list[tuple[str, bool]] = []
    done, last, rewritten = "", [], False
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        prompt = _write(turns[:number], tokenizer, generate=True)
        spoken = _write(turns[: number + 1], tokenizer, generate=False)
        if not spoken.startswith(prompt):
            raise BrokenRecord(f"the tokenizer's chat template does not begin turn {number} as it asks for one")
        rewritten = rewritten or not prompt.startswith(done)
        last = [(prompt, False), (spoken[len(prompt) :], True)]
        pieces += [(prompt[len(done) :], False), last[1]]
        done = spoken
    if rewritten:
        remark = "have earlier turns that the tokenizer's chat template rewrites: only their last is learned"
        warnings.warn(remark, RecordRemark, stacklevel=2)
    return last if rewritten else pieces


def _write(turns: Sequence[Message], tokenizer: Tokenizer, *, generate: bool) -> str:
    try:
        return tokenizer.apply_chat_template(turns, generate=generate)
    except Exception as error:  # templates are programs, and refuse in ways of their own
        roles = ", ".join(turn["role"] for turn in turns)
        raise BrokenRecord(
            f"the tokenizer's chat template refuses these turns ({roles}): {str(error).strip() or type(error).__name__}"
        ) from error


class CausalLM(WindowTask, RecordTask):
    """Labels are the inputs themselves, unshifted: the model shifts them."""

    name: ClassVar[str] = "causal-lm"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    modality: ClassVar[Literal["text", "image", "speech"]] = "text"
    fields: ClassVar[tuple[str, ...]] = ("messages",)

    def inputs(self, config: Any, *, padding: bool = False, documents: bool = False) -> tuple[Input, ...]:
        self._check(padding, documents)
        names = ["input_ids", "labels"]
        names += ["attention_mask"] if padding else []
        names += ["position_ids", "document_ids"] if documents else []
        return tuple(Input(name, "int64", ("batch", "tokens")) for name in names)

    def synthetic(
        self, config: Any, *, batch: int, tokens: int, seed: int, padding: bool = False, documents: bool = False
    ) -> Batch:
        self._check(padding, documents)
        generator = torch.Generator().manual_seed(seed)
        ids = random_ids(config, (batch, tokens), generator)
        if not padding:
            starts = random_starts(batch, tokens, generator) if documents else None
            return self.from_windows(Windows(ids, range(batch), starts), config, mask_id=None)
        mask = mask_of_lengths(random_lengths(batch, tokens, generator), tokens)
        return {
            "input_ids": torch.where(mask == 1, ids, pad_id(config)),
            "labels": torch.where(mask == 1, ids, IGNORE),
            "attention_mask": mask,
        }

    def from_windows(self, windows: Windows, config: Any, mask_id: int | None) -> Batch:
        batch = {"input_ids": windows.ids, "labels": windows.ids.clone()}
        if windows.starts is not None:
            # Nothing before a document's first token belongs to it, so there is nothing to predict that token from.
            batch["labels"][:, 1:][windows.starts[:, 1:]] = IGNORE
            batch["position_ids"], batch["document_ids"] = document_layout(windows.starts)
        return batch

    def encode(self, record: Mapping[str, Any], tokenizer: Tokenizer, config: Any, tokens: int) -> Sample:
        ids, labels = encode_conversation(record.get("messages"), tokenizer)
        if len(ids) > tokens:
            warnings.warn(f"are longer than {tokens} tokens and cut off there (seq_len)", RecordRemark, stacklevel=2)
        ids, labels = ids[:tokens], labels[:tokens]
        if all(label == IGNORE for label in labels[1:]):
            raise BrokenRecord(f"no assistant turn begins within {tokens} tokens, so there is nothing to learn")
        return {"input_ids": ids, "labels": labels}

    def collate(self, samples: Sequence[Sample], config: Any, tokens: int) -> Batch:
        return pad_labelled(samples, tokens, pad_id(config))

    def num_tokens(self, batch: Mapping[str, Tensor]) -> int:
        return count_tokens(batch)

    def tokens_per_sample(self, tokens: int) -> int:
        return tokens

    def _check(self, padding: bool, documents: bool) -> None:
        if padding and documents:
            raise self.refuse("padding together with documents", "packed documents fill their rows to the end")

"""Conversations as tokens and labels: only what the assistant says is learned.

Uses the tokenizer's own chat template where it has one, else a plain one: `role: content` per line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phalanx.tasks.base import IGNORE, BrokenRecord

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer

Message = Mapping[str, str]


def encode_conversation(messages: Any, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids and labels of one conversation."""
    turns = _checked(messages)
    pieces = list(_templated(turns, tokenizer) if tokenizer.has_chat_template else _plain(turns))
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


def _templated(turns: Sequence[Message], tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    done = ""
    for number, turn in enumerate(turns):
        if turn["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(turns[:number], generate=True)
            spoken = tokenizer.apply_chat_template(turns[: number + 1], generate=False)
            if not (prompt.startswith(done) and spoken.startswith(prompt)):
                raise BrokenRecord(f"the tokenizer's chat template rewrites earlier turns at turn {number}")
            yield prompt[len(done) :], False
            yield spoken[len(prompt) :], True
            done = spoken

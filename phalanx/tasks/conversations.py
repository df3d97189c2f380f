"""Records that people fine-tune on, as conversations; and conversations as tokens of which some are to be learned.

Recognised by their fields: `messages` (role and content per turn), ShareGPT's `conversations` (from and value),
Alpaca's `instruction`, `input` and `output`, and `prompt` with `completion`, both texts or both lists of turns. Written
with the tokenizer's own chat template where it has one, else plainly, `role: content` per line.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phalanx.records import read_json
from phalanx.tasks.base import IGNORE, BrokenRecord, RecordRemark

if TYPE_CHECKING:
    from phalanx.data.tokenizer import Tokenizer

Turn = Mapping[str, Any]
Span = tuple[int, int]
Pieces = list[tuple[str, bool]]  # text, and whether it is learned

# Fields by which a kind of record is known; the first kind whose fields are all there counts.
KINDS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"))

_SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "assistant": "assistant",
    "function_call": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """turns: of which those of the assistant are learned, from the turn `first_learned` on."""

    turns: Sequence[Turn]
    tools: Sequence[Any] | None = None
    first_learned: int = 0

    @property
    def learned(self) -> list[int]:
        return [n for n, turn in enumerate(self.turns) if turn["role"] == "assistant" and n >= self.first_learned]


def encode_record(record: Mapping[str, Any], tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of every sample that a record gives: one, or one per turn of the assistant where the chat
    template writes turns otherwise once others follow."""
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str) and "messages" not in record:
        return [_encoded([(prompt, False), (completion, True)], tokenizer, ends=True)]
    conversation = conversation_of(record)
    if not tokenizer.has_chat_template:
        return [_encoded(list(_plain(conversation)), tokenizer, ends=True)]
    return [_encoded(pieces, tokenizer, ends=False) for pieces in _templated(conversation, tokenizer)]


def _encoded(pieces: Pieces, tokenizer: Tokenizer, ends: bool) -> tuple[list[int], list[int]]:
    """ends: what is learned ends with the tokenizer's end, which a chat template writes itself."""
    ids: list[int] = []
    labels: list[int] = []
    # Encoded piece by piece: where a turn begins is where generation begins, so no token may span it.
    for (_, learned), piece in zip(pieces, tokenizer.encode([text for text, _ in pieces]), strict=True):
        tokens = piece.tolist()
        if learned and ends and tokenizer.eos_id is not None:
            tokens.append(tokenizer.eos_id)
        ids += tokens
        labels += tokens if learned else [IGNORE] * len(tokens)
    return ids, labels


def conversation_of(record: Mapping[str, Any]) -> Conversation:
    """The conversation that a record of any kind holds, checked."""
    tools = _tools(record.get("tools"))
    if "messages" in record:
        return Conversation(_checked(record["messages"], "messages"), tools)
    if "conversations" in record:
        return Conversation(_with_system(record, _from_sharegpt(record["conversations"])), tools)
    if "instruction" in record:
        return Conversation(_with_system(record, _from_alpaca(record)), tools)
    asked, answered = _checked(record["prompt"], "prompt"), _checked(record["completion"], "completion")
    return Conversation([*asked, *answered], tools, first_learned=len(asked))


def _checked(messages: Any, field: str) -> Sequence[Turn]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BrokenRecord(f"{field} is not a list of turns")
    return [_turn(message, f"turn {number} of {field}") for number, message in enumerate(messages)]


def _turn(message: Any, place: str) -> Turn:
    """A turn as templates expect it: calls of tools with arguments as values, not as text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BrokenRecord(f"{place} has no role and content")
    calls = message.get("tool_calls")
    if not isinstance(message.get("content"), str | list) and not calls:
        raise BrokenRecord(f"{place} has no role and content")
    if not calls:  # a dataset's row names every field that some row has
        return {name: value for name, value in message.items() if name != "tool_calls" and value is not None}
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise BrokenRecord(f"the tool_calls of {place} are not a list of calls")
    return {**message, "content": message.get("content") or "", "tool_calls": [_call(call, place) for call in calls]}


def _call(call: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BrokenRecord(f"a call in the tool_calls of {place} names no function")
    given = function.get("arguments", {})
    arguments = _from_json(given, f"the arguments of {function['name']!r} in {place}") if given != "" else {}
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _tools(tools: Any) -> Sequence[Any] | None:
    found = _from_json(tools, "tools")
    if not found:
        return None
    if not isinstance(found, Sequence) or not all(isinstance(tool, Mapping) for tool in found):
        raise BrokenRecord("tools is not a list of JSON schemas")
    return found


def _from_json(value: Any, what: str) -> Any:
    """Datasets often hold values of free form as text."""
    try:
        return read_json(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BrokenRecord(f"{what} is not JSON ({error})") from None


def _with_system(record: Mapping[str, Any], turns: Sequence[Turn]) -> Sequence[Turn]:
    system = record.get("system")
    return [{"role": "system", "content": system}, *turns] if isinstance(system, str) and system else turns


def _from_sharegpt(turns: Any) -> Sequence[Turn]:
    if isinstance(turns, Sequence) and turns and isinstance(turns[0], Mapping) and "role" in turns[0]:
        return _checked(turns, "conversations")  # of this name, but written as messages
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise BrokenRecord("conversations is not a list of turns")
    return [_from_sharegpt_turn(turn, number) for number, turn in enumerate(turns)]


def _from_sharegpt_turn(turn: Any, number: int) -> Turn:
    place = f"turn {number} of conversations"
    if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
        raise BrokenRecord(f"{place} has no from and value")
    if turn["from"] not in _SPEAKERS:
        raise BrokenRecord(f"{place} is from {turn['from']!r}, who is none of {', '.join(_SPEAKERS)}")
    if turn["from"] != "function_call":
        return {"role": _SPEAKERS[turn["from"]], "content": turn["value"]}
    call = _from_json(turn["value"], place)
    return _turn({"role": "assistant", "content": "", "tool_calls": [call]}, place)


def _from_alpaca(record: Mapping[str, Any]) -> Sequence[Turn]:
    texts = [record["instruction"], record.get("input") or "", record["output"]]
    if not all(isinstance(text, str) for text in texts) or not (texts[0] and texts[2]):
        raise BrokenRecord("instruction, input and output are not texts, or there is no instruction or output")
    asked = "\n\n".join(text for text in texts[:2] if text)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": texts[2]}]


def _plain(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    if conversation.tools:
        yield f"tools: {json.dumps(conversation.tools, ensure_ascii=False)}\n", False
    for number, turn in enumerate(conversation.turns):
        if number in conversation.learned:
            yield "assistant: ", False
            yield _said(turn), True
            yield "\n", False
        else:
            yield f"{turn['role']}: {_said(turn)}\n", False


def _said(turn: Turn) -> str:
    """The words of a turn, and its calls as JSON, one per line."""
    content = turn.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    return "\n".join([*filter(None, parts), *(json.dumps(call, ensure_ascii=False) for call in calls)])


def _templated(conversation: Conversation, tokenizer: Tokenizer) -> list[Pieces]:
    """One sample, if the template leaves earlier turns as they were when they were the last; else one per turn."""
    cuts = [_cut(conversation, number, tokenizer) for number in conversation.learned]
    wholes = ["".join(text for text, _ in pieces) for pieces in cuts]
    if not cuts:
        return [[(_write(conversation.turns, conversation, tokenizer), False)]]
    if not all(later.startswith(before) for before, later in itertools.pairwise(wholes)):
        remark = "have earlier turns that the tokenizer's chat template rewrites: each turn became a sample of its own"
        warnings.warn(remark, RecordRemark, stacklevel=2)
        return cuts
    joined: Pieces = []
    done = 0
    for pieces in cuts:
        joined += _after(pieces, done)
        done = sum(len(text) for text, _ in pieces)
    return [joined]


def _after(pieces: Pieces, done: int) -> Pieces:
    """Pieces without their first `done` characters."""
    left: Pieces = []
    for text, learned in pieces:
        left += [(text[done:], learned)] if len(text) > done else []
        done = max(0, done - len(text))
    return left


def _cut(conversation: Conversation, number: int, tokenizer: Tokenizer) -> Pieces:
    """The conversation up to a turn of the assistant, which alone is learned: what the template's own marks say
    (`{% generation %}`), else all that follows where it asks for the turn."""
    turns = conversation.turns[: number + 1]
    if tokenizer.marks_generation:
        return _last_marked(turns, conversation, tokenizer)
    prompt = _write(turns[:-1], conversation, tokenizer, generate=True)
    spoken = _write(turns, conversation, tokenizer)
    if not spoken.startswith(prompt):
        raise BrokenRecord(f"the tokenizer's chat template does not begin turn {number} as it asks for one")
    return [(prompt, False), (spoken[len(prompt) :], True)]


def _last_marked(turns: Sequence[Turn], conversation: Conversation, tokenizer: Tokenizer) -> Pieces:
    text, spans = _marked(turns, conversation, tokenizer)
    earlier = len(_marked(turns[:-1], conversation, tokenizer)[1]) if len(turns) > 1 else 0
    if len(spans) <= earlier:
        raise BrokenRecord(f"the tokenizer's chat template marks nothing of turn {len(turns) - 1} as generated")
    pieces, done = [], 0
    for begin, end in spans[earlier:]:
        pieces += [(text[done:begin], False), (text[begin:end], True)]
        done = end
    return [*pieces, (text[done:], False)] if text[done:] else pieces


def _marked(
    turns: Sequence[Turn], conversation: Conversation, tokenizer: Tokenizer
) -> tuple[str, list[tuple[int, int]]]:
    with _refusals(turns):
        return tokenizer.marked_chat(turns, tools=conversation.tools)


def _write(turns: Sequence[Turn], conversation: Conversation, tokenizer: Tokenizer, *, generate: bool = False) -> str:
    with _refusals(turns):
        return tokenizer.apply_chat_template(turns, generate=generate, tools=conversation.tools)


@contextmanager
def _refusals(turns: Sequence[Turn]) -> Iterator[None]:
    """Templates are programs, and refuse in ways of their own."""
    try:
        yield
    except Exception as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise BrokenRecord(
            f"the tokenizer's chat template refuses these turns ({roles}): {str(error).strip() or type(error).__name__}"
        ) from error

"""What a plan keeps in the memory of the host: the field `offload`, how it is written and what may stand there.

Words joined by '+', each with how much after ':', as in `activations:12+optimizer:0.6`; a word alone is for all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from phalanx.errors import PlanError, nearest

Amount = int | float
Offload = tuple[tuple[str, Amount], ...]  # words with how much; 0 layers and a share of 1 stand for all

WORDS = {
    "activations": "layers per stage",
    "parameters": "layers per rank",
    "optimizer": "share of the elements",
    "optimizer-step": "share of the elements",
}
EXAMPLE = "activations:12+optimizer:0.6"
_ALL: dict[str, Amount] = {"activations": 0, "parameters": 0, "optimizer": 1.0, "optimizer-step": 1.0}
_EVERY = {"activations": "layers", "parameters": "blocks"}
ROUNDING = 1e-9
PARTS_BESIDE = 3  # of buckets' state on the device at most, of what it updates beside its other work
_COUNT = re.compile(r"[1-9]\d{0,5}", re.ASCII)
_SHARE = re.compile(r"0?\.\d{1,6}|0|1|1\.0{1,6}", re.ASCII)


def read_offload(name: str, text: str) -> Offload:
    """Reads what `write_offload` wrote; the error names the word and what may stand there."""
    found: dict[str, Amount] = {}
    for part in text.split("+"):
        word, separator, amount = part.partition(":")
        if word not in WORDS:
            place = f"plan: {name}='{text}': " if part != text else f"plan: {name}="
            raise PlanError(f"{place}'{word}' is nothing that can lie on the host", nearest(word, WORDS))
        if word in found:
            raise PlanError(f"plan: {name}='{text}' has '{word}' twice", "write each word once")
        found[word] = _read_amount(name, word, amount) if separator else _ALL[word]
    return _ordered(found)


def write_offload(offload: Offload) -> str:
    """The shortest text that `read_offload` reads back."""
    return "+".join(word if amount == _ALL[word] else f"{word}:{amount:g}" for word, amount in offload)


def take_offload(value: object) -> Offload:
    """The same from a text, or from pairs, as a JSON file has them; raises a TypeError."""
    if isinstance(value, str):
        return read_offload("offload", value)
    if not isinstance(value, list | tuple):
        raise TypeError
    found: dict[str, Amount] = {}
    for pair in cast(Sequence[object], value):
        word, amount = _pair(pair)
        if word not in WORDS or word in found:
            raise TypeError
        found[word] = amount
    return read_offload("offload", write_offload(_ordered(found))) if found else ()


def _read_amount(name: str, word: str, text: str) -> Amount:
    if isinstance(_ALL[word], int):
        if _COUNT.fullmatch(text) is None:
            message = f"plan: {name}={word}:{text} is not a number of {WORDS[word]}"
            raise PlanError(message, f"use {word}:1 or more, or {word} for all {_EVERY[word]}")
        return int(text)
    if _SHARE.fullmatch(text) is None or float(text) == 0:
        message = f"plan: {name}={word}:{text} is not a share of the elements"
        raise PlanError(message, f"use a share above 0 and up to 1 such as {word}:0.6, or {word} for all of them")
    return float(text)


def _pair(value: object) -> tuple[str, Amount]:
    if not isinstance(value, list | tuple):
        raise TypeError
    if len(pair := cast(Sequence[object], value)) != 2:
        raise TypeError
    word, amount = pair
    if not isinstance(word, str) or isinstance(amount, bool) or not isinstance(amount, int | float):
        raise TypeError
    return word, amount


def _ordered(found: dict[str, Amount]) -> Offload:
    return tuple((word, found[word]) for word in WORDS if word in found)


def check_offload(offload: Offload) -> None:
    """Raises a PlanError for words that do not go together."""
    shares = [(word, amount) for word, amount in offload if word.startswith("optimizer")]
    total = sum(amount for _, amount in shares)
    if total > 1 + ROUNDING:
        message = f"plan: offload={write_offload(offload)} keeps the optimizer's state on the host twice"
        hint = (
            "use optimizer, which updates on the device, or optimizer-step, which updates on the host, or a share of "
        )
        raise PlanError(message, f"{hint}each such as optimizer:0.4+optimizer-step:0.6")
    if shares and total < 1 - ROUNDING and ("parameters", 0) in offload:
        word, amount = shares[0]
        reason = "with all parameters on the host, all of the optimizer's state lies there"
        message = f"plan: offload={write_offload(offload)}: {word}:{amount:g} does nothing: {reason}"
        hint = f"use {word}, shares of optimizer and optimizer-step that are 1 together, or parameters:1 or more"
        raise PlanError(message, f"{hint} for some layers only")


def spread(items: Sequence[int], count: int) -> tuple[int, ...]:
    """So many of them, the first one and then evenly spread; 0: all."""
    count = min(count or len(items), len(items))
    return tuple(items[i * len(items) // count] for i in range(count)) if count else ()

"""Tokenizers: text to token ids and back, either a model folder's own or plain bytes.

Both are local: nothing is looked up on the hub. Loading refuses a vocabulary that the model cannot hold.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.errors import DataError

Ids = NDArray[np.uint32]

BYTE_NAMES = ("bytes", "byte")
_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_ALL_FILES = (*_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class Tokenizer(ABC):
    """Text ↔ ids. `identity` changes whenever the ids of some text would."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    mask_id: int | None
    separator_id: int | None  # written after every document of a token stream
    has_chat_template: bool
    marks_generation: bool  # whether the chat template says what the assistant generates
    identity: str

    @abstractmethod
    def encode(self, texts: Sequence[str], *, special: bool = False, limit: int | None = None) -> list[Ids]:
        """Ids of each text; `special` adds what the model expects around a whole text, `limit` cuts to a length."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    @abstractmethod
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool, tools: Sequence[Any] | None = None
    ) -> str:
        """A conversation as text; `generate` ends it where the assistant is to speak. Needs `has_chat_template`."""

    @abstractmethod
    def marked_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as text, and from where to where the assistant generates it. Needs `marks_generation`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write files that HuggingFace's AutoTokenizer, and so `load_tokenizer`, reads back to the same ids."""


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, then begin, end and padding."""

    vocab_size = 259
    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id: int | None = 258
    # Streams end documents with `eos` and never begin them with `bos`, which is therefore free to hide tokens behind.
    mask_id: int | None = 256
    separator_id: int | None = 257
    has_chat_template = marks_generation = False
    identity = "bytes"

    def encode(self, texts: Sequence[str], *, special: bool = False, limit: int | None = None) -> list[Ids]:
        encoded = [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint32) for text in texts]
        if special:
            room = None if limit is None else limit - 1
            return [np.append(ids[:room], np.uint32(257)) for ids in encoded]
        return [ids[:limit] for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool, tools: Sequence[Any] | None = None
    ) -> str:
        raise AssertionError("bytes have no chat template")

    def marked_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        raise AssertionError("bytes have no chat template")

    def save(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        fast = FastTokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(
            tokenizer_object=fast,
            bos_token="<|bos|>",
            eos_token="<|eos|>",
            pad_token="<|pad|>",
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)


class HuggingFaceTokenizer(Tokenizer):
    """The tokenizer in a HuggingFace folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises many kinds, all meaning the same to the user
            raise DataError(
                f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {_first_line(error)}",
                "save it again with save_pretrained, or choose tokenizer=bytes",
            ) from error
        self.vocab_size = max(self._inner.get_vocab().values()) + 1
        self.bos_id, self.eos_id = self._inner.bos_token_id, self._inner.eos_token_id
        self.pad_id, self.mask_id = self._inner.pad_token_id, self._inner.mask_token_id
        separators = (self.eos_id, self._inner.sep_token_id, self.bos_id)
        self.separator_id = next((i for i in separators if i is not None), None)
        self.has_chat_template = bool(self._inner.chat_template)
        self.marks_generation = bool(re.search(r"\{%-?\s*generation\s*-?%\}", str(self._inner.chat_template)))
        self.identity = _digest(folder)

    def encode(self, texts: Sequence[str], *, special: bool = False, limit: int | None = None) -> list[Ids]:
        if not texts:
            return []
        # Not verbose: a long text is cut into samples afterwards, so its length needs no warning.
        options = {"add_special_tokens": special, "return_attention_mask": False, "verbose": False}
        cut = {"truncation": True, "max_length": limit} if limit is not None else {}
        encoded = self._inner(list(texts), **options, **cut)
        return [np.asarray(ids, np.uint32) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, generate: bool, tools: Sequence[Any] | None = None
    ) -> str:
        given = list(tools) if tools else None
        return self._inner.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generate, tools=given
        )

    def marked_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        given = list(tools) if tools else None
        render: Any = render_jinja_template  # whose types say less than it gives
        (text,), (spans,) = render(
            conversations=[list(messages)], tools=given, chat_template=self._inner.get_chat_template(tools=given),
            return_assistant_tokens_mask=True, **self._inner.special_tokens_map,
        )  # fmt: skip
        return text, [(begin, end) for begin, end in spans]

    def save(self, folder: Path) -> None:
        self._inner.save_pretrained(folder)


def load_tokenizer(choice: str | None, folder: Path | None, vocab_size: int) -> Tokenizer:
    """The tokenizer the user chose ('bytes' or a folder), else the model folder's, else bytes."""
    tokenizer = _load(choice, folder)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the {_name(tokenizer)} tokenizer has {tokenizer.vocab_size} tokens, but the model only {vocab_size}",
            f"choose a tokenizer that fits, or a model with vocab_size >= {tokenizer.vocab_size}",
        )
    return tokenizer


def identity_of(choice: str | None, folder: Path | None) -> str:
    """The identity of what `load_tokenizer` would load, without loading it."""
    if choice in BYTE_NAMES or (choice is None and (folder is None or not has_tokenizer(folder))):
        return ByteTokenizer.identity
    chosen = Path(choice) if choice is not None else folder
    assert chosen is not None
    return _digest(chosen)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _load(choice: str | None, folder: Path | None) -> Tokenizer:
    if choice is None:
        return HuggingFaceTokenizer(folder) if folder is not None and has_tokenizer(folder) else ByteTokenizer()
    if choice in BYTE_NAMES:
        return ByteTokenizer()
    if not has_tokenizer(Path(choice)):
        raise DataError(
            f"tokenizer {choice!r} is neither 'bytes' nor a folder with a tokenizer",
            f"give a folder that holds one of {', '.join(_FILES)}, or 'bytes'",
        )
    return HuggingFaceTokenizer(Path(choice))


def _name(tokenizer: Tokenizer) -> str:
    return "byte" if isinstance(tokenizer, ByteTokenizer) else "chosen"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _ALL_FILES:
        if (folder / name).is_file():
            digest.update(name.encode())
            digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level tokenizers write bytes, in the order of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + place): b for place, b in enumerate(others)}

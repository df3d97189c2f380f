"""Tokenizers: bytes and HuggingFace folders, saved and loaded again to the same ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, has_tokenizer, load_tokenizer
from phalanx.errors import DataError

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save(path)
    return path


@given(TEXT)
def test_bytes_decode_to_the_text_they_encode(text):
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_saved_byte_tokenizer_is_read_by_huggingface_to_the_same_ids(folder):
    loaded = load_tokenizer(str(folder), None, 259)
    ours = ByteTokenizer()
    assert isinstance(loaded, HuggingFaceTokenizer)
    for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "separator_id", "has_chat_template"):
        assert getattr(loaded, name) == getattr(ours, name), name
    texts = ["", "plain", "  two  spaces \n\t", "naïve 你好 🙂", "\x00\x7f it 's", "".join(map(chr, range(300)))]
    for left, right in zip(loaded.encode(texts), ours.encode(texts), strict=True):
        assert left.tolist() == right.tolist()
    for text in texts:
        assert loaded.decode(loaded.encode([text])[0]) == text


def test_a_loaded_tokenizer_can_be_saved_and_loaded_once_more(folder, tmp_path):
    loaded = load_tokenizer(str(folder), None, 259)
    loaded.save(tmp_path)
    again = load_tokenizer(None, tmp_path, 259)
    assert again.encode(["abc"])[0].tolist() == [97, 98, 99]


def test_identity_tells_tokenizers_apart(folder, tmp_path):
    loaded = load_tokenizer(str(folder), None, 259)
    assert loaded.identity == HuggingFaceTokenizer(folder).identity != ByteTokenizer().identity
    loaded.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|bos|>", "<|begin|>"))
    assert HuggingFaceTokenizer(tmp_path).identity != loaded.identity


def test_special_tokens_and_limits():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(["abcdef"], limit=3)[0].tolist() == [97, 98, 99]
    assert tokenizer.encode(["abcdef"], special=True, limit=3)[0].tolist() == [97, 98, 257]
    assert tokenizer.encode(["ab"], special=True)[0].tolist() == [97, 98, 257]


def test_a_huggingface_tokenizer_obeys_limits(folder):
    assert HuggingFaceTokenizer(folder).encode(["abcdef", "x"], limit=3)[0].tolist() == [97, 98, 99]
    assert HuggingFaceTokenizer(folder).encode([]) == []


def test_the_model_folders_tokenizer_is_the_default_and_bytes_the_fallback(folder, tmp_path):
    assert isinstance(load_tokenizer(None, folder, 300), HuggingFaceTokenizer)
    assert not has_tokenizer(tmp_path)
    assert isinstance(load_tokenizer(None, tmp_path, 300), ByteTokenizer)
    assert isinstance(load_tokenizer(None, None, 300), ByteTokenizer)
    assert isinstance(load_tokenizer("byte", folder, 300), ByteTokenizer)


def test_a_vocabulary_larger_than_the_models_is_refused(folder):
    with pytest.raises(
        DataError, match=r"byte tokenizer has 259 tokens, but the model only 258(.|\n)*vocab_size >= 259"
    ):
        load_tokenizer("byte", None, 258)
    with pytest.raises(DataError, match="tokenizer has 259 tokens, but the model only 100"):
        load_tokenizer(None, folder, 100)


def test_a_tokenizer_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"neither 'bytes' nor a folder with a tokenizer(.|\n)*tokenizer.json"):
        load_tokenizer(str(tmp_path / "nowhere"), None, 300)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"cannot be loaded(.|\n)*save it again with save_pretrained"):
        load_tokenizer(str(tmp_path), None, 300)


def test_a_chat_template_in_the_folder_is_applied(folder, tmp_path):
    loaded = HuggingFaceTokenizer(folder)
    loaded._inner.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    loaded.save(tmp_path)
    again = HuggingFaceTokenizer(tmp_path)
    assert again.has_chat_template
    assert again.apply_chat_template([{"role": "user", "content": "hi"}], generate=True) == "[user]hi>"

"""Text and records from files, folders, the standard library; and what happens when they are broken."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest

from phalanx.data import sources
from phalanx.data.sources import stdlib_files
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.errors import ConfigError, DataError
from phalanx.tasks.base import IGNORE

END = 257


def write_lines(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return path


def stream_of(batches):
    """All samples in their own order, as one list of ids."""
    return batches.batch(0, batches.num_samples)["input_ids"].flatten().tolist()


def test_a_folder_is_read_recursively_in_the_order_of_names(tmp_path, opened):
    root = tmp_path / "corpus"
    (root / "b").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "a.txt").write_text("abc")
    (root / "b" / "x.md").write_text("def")
    (root / "c.png").write_text("no text")
    (root / ".git" / "x.txt").write_text("hidden")
    write_lines(root / "d.jsonl", {"text": "ghi"}, {"text": "j"})
    (root / "e.json").write_text(json.dumps([{"text": "k"}, {"text": "l"}]))
    ids = stream_of(opened(root, tokens=2, shuffle=False))
    assert ids == [*b"abc", END, *b"def", END, *b"ghi", END, *b"j", END, *b"k", END, *b"l", END]


def test_several_paths_are_read_one_after_the_other(tmp_path, opened):
    (tmp_path / "one.log").write_text("xy")
    (tmp_path / "two.txt").write_text("z")
    batches = opened([tmp_path / "two.txt", str(tmp_path / "one.log")], tokens=5, shuffle=False)
    assert stream_of(batches) == [*b"z", END, *b"xy", END]
    assert "(2 files): 5 tokens" in batches.describe()


def test_a_text_key_for_data_that_has_no_text_is_refused(opened):
    with pytest.raises(DataError, match="option text_key = 'body' does nothing with synthetic data"):
        opened("synthetic", text_key="body")


def test_the_text_key_chooses_the_field(tmp_path, opened):
    path = write_lines(tmp_path / "a.jsonl", {"text": "no", "body": "yes"})
    assert stream_of(opened(path, tokens=4, text_key="body")) == [*b"yes", END]


def test_a_long_file_is_one_document_however_many_pieces_it_is_read_in(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(sources, "_PIECE", 5)
    text = "line one\nline two\r\nline three"
    (tmp_path / "a.txt").write_bytes(text.encode())
    batches = opened(tmp_path / "a.txt", tokens=len(text) + 1, documents=True)
    assert stream_of(batches) == [*text.encode(), END]
    assert batches.batch(0, 1)["document_ids"].unique().tolist() == [1]


def test_empty_texts_leave_no_trace(tmp_path, opened):
    path = write_lines(tmp_path / "a.jsonl", {"text": ""}, "", {"text": "ab"}, {"text": ""})
    assert stream_of(opened(path, tokens=3)) == [*b"ab", END]


def test_the_standard_library_is_a_corpus_on_any_machine(opened):
    chosen = stdlib_files()
    size = sum(file.stat().st_size for file in chosen)
    assert chosen == stdlib_files() == sorted(chosen)
    assert 1 << 20 < size < 10 << 20
    assert all(file.suffix == ".py" and "site-packages" not in file.parts for file in chosen)
    batches = opened("stdlib", tokens=512)
    assert batches.num_samples * 512 > 0.9 * size
    assert opened("stdlib", tokens=512).num_samples == batches.num_samples


def test_a_missing_path_is_refused_with_the_next_step(opened):
    with pytest.raises(
        DataError, match=r"data '/no/such/place' does not exist(.|\n)*Give a file or folder that exists"
    ):
        opened("/no/such/place")
    with pytest.raises(DataError, match="did you mean 'stdlib'"):
        opened("stdlb")


def test_a_folder_without_text_is_refused(tmp_path, opened):
    (tmp_path / "a.png").write_text("")
    with pytest.raises(DataError, match=r"holds no text(.|\n)*end in .txt, .md"):
        opened(tmp_path)


def test_an_empty_corpus_is_refused(tmp_path, opened):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"a.txt .*holds no text(.|\n)*not empty"):
        opened(tmp_path / "a.txt")


def test_too_few_tokens_for_one_sample_are_refused(tmp_path, opened):
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(
        DataError, match=r"holds 4 tokens, too few for one sample of 8(.|\n)*lower the sample length to 4"
    ):
        opened(tmp_path / "a.txt")


BROKEN = {
    "latin.txt": (b"one\ntwo \xe9\n", "latin.txt:2: is not valid UTF-8 .byte 0xe9."),
    "bad.jsonl": (b'{"text": "ok"}\n{"text": \n', "bad.jsonl:2: is not JSON"),
    "utf.jsonl": (b'{"text": "ok"}\n{"text": "\xff"}\n', "utf.jsonl:2: is not valid UTF-8"),
    "list.jsonl": (b"[1]\n", "list.jsonl:1: is not a JSON object"),
    "half.jsonl": (b'{"text": "\\ud800"}\n', "half.jsonl:1: holds half of a surrogate pair"),
    "nokey.jsonl": (b'{"body": "x"}\n', "nokey.jsonl:1: has no text in the field 'text' .fields: body."),
    "number.jsonl": (b'{"text": 3}\n', "number.jsonl:1: has no text in the field 'text'"),
    "bad.json": (b"{", "bad.json: is not JSON"),
    "utf.json": (b'"\xff"', "utf.json: is not valid UTF-8"),
    "items.json": (b'[{"text": "ok"}, 3]', "items.json, record 2: is not a JSON object"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_and_refused(tmp_path, opened, name):
    content, message = BROKEN[name]
    (tmp_path / "good.txt").write_text("a good file")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{message}(.|\n)*on_broken=skip"):
        opened(tmp_path)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_skipped_and_counted_when_asked(tmp_path, opened, name):
    content, message = BROKEN[name]
    (tmp_path / "good.txt").write_text("a good file")
    (tmp_path / name).write_bytes(content)
    with pytest.warns(UserWarning, match=f"skipped 1 broken part of .*{message}"):
        kept = opened(tmp_path, on_broken="skip", tokens=2, shuffle=False)
    assert b"a good fil" in bytes(i for i in stream_of(kept) if i < 256)
    assert b"two" not in bytes(i for i in stream_of(kept) if i < 256)


def test_a_cached_corpus_still_tells_what_was_skipped(tmp_path, opened):
    write_lines(tmp_path / "a.jsonl", {"text": "some text"}, "{")
    for _ in range(2):
        with pytest.warns(UserWarning, match="skipped 1 broken part"):
            opened(tmp_path / "a.jsonl", on_broken="skip")


def test_a_dangling_link_is_broken_not_overlooked(tmp_path, opened):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(DataError, match=r"a.txt: cannot be read .No such file"):
        opened(tmp_path / "corpus")


def test_an_unknown_policy_is_refused(tmp_path, opened):
    with pytest.raises(ConfigError, match=r"on_broken is 'skp'(.|\n)*did you mean 'skip'"):
        opened("synthetic", on_broken="skp")


def test_a_changed_file_is_not_read_from_the_cache(tmp_path, opened):
    path = tmp_path / "a.txt"
    path.write_text("aaaaaaa")
    assert stream_of(opened(path)) == [*b"aaaaaaa", END]
    path.write_text("bbbbbbbb")
    assert stream_of(opened(path)) == [*b"bbbbbbbb"]


def test_classified_texts_come_padded_with_their_labels(tmp_path, opened):
    path = write_lines(tmp_path / "a.jsonl", {"text": "ab", "label": 1}, {"text": "abcdefghijk", "label": "bad"})
    batches = opened(path, "text-classification", tokens=4, shuffle=False)
    batch = batches.batch(0, 2)
    assert batch["input_ids"].tolist() == [[97, 98, END, 258], [97, 98, 99, END]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [1, 0]
    assert batches.padding and not batches.documents


def test_pairs_become_source_and_target(tmp_path, opened):
    path = write_lines(tmp_path / "a.jsonl", {"source": "ab", "target": "c"})
    batch = opened(path, "text-to-text", tokens=8).batch(0, 1)
    assert batch["input_ids"].tolist() == [[97, 98, END, *[258] * 5]]
    assert batch["labels"].tolist() == [[99, END, *[IGNORE] * 4]]
    assert batch["decoder_input_ids"].tolist() == [[256, 99, END, *[258] * 3]]


def test_conversations_are_recognised_by_their_messages(tmp_path, opened):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write_lines(tmp_path / "a.jsonl", {"messages": turns})
    batches = opened(path, tokens=40)
    batch = batches.batch(0, 1)
    assert batches.padding
    assert batch["labels"][batch["labels"] != IGNORE].tolist() == [97, END]
    assert opened(path, tokens=40, documents=True).documents, "then they are packed"


@pytest.mark.parametrize(
    "task, record, message",
    [
        ("text-classification", {"text": "x"}, "a.jsonl:1: has no 'label'; task text-classification learns from"),
        ("text-classification", {"text": "x", "label": 2}, "label 2 is neither a number in 0 … 1 nor one of bad, good"),
        ("text-classification", {"text": "", "label": 1}, "the text is empty or not a string"),
        ("text-to-text", {"text": "x"}, "has no 'source', 'target'; task text-to-text learns from"),
        ("text-to-text", {"source": "x", "target": 3}, "the target is empty or not a string"),
        ("causal-lm", {"messages": []}, "messages is not a list of turns"),
    ],
)
def test_a_record_the_task_cannot_learn_from_is_named(tmp_path, opened, task, record, message):
    path = write_lines(tmp_path / "a.jsonl", record)
    with pytest.raises(DataError, match=message):
        opened(path, task)
    with pytest.warns(UserWarning, match="skipped 1"), pytest.raises(DataError, match="holds no samples"):
        opened(path, task, on_broken="skip")


def test_nothing_is_warned_about_when_nothing_is_skipped(tmp_path, opened):
    (tmp_path / "a.txt").write_text("a good file")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(tmp_path / "a.txt", on_broken="skip")


def test_a_tokenizer_without_separator_writes_none(tmp_path, opened):
    class Bare(ByteTokenizer):
        separator_id = None
        identity = "bare"

    (tmp_path / "a.txt").write_text("ab")
    assert stream_of(
        opened(tmp_path / "a.txt", tokens=2, tokenizer=Bare(), config=SimpleNamespace(vocab_size=300))
    ) == [*b"ab"]


def test_the_standard_library_leaves_out_what_is_not_utf8(tmp_path, monkeypatch):
    (tmp_path / "a.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "b.py").write_text("x = 1\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert stdlib_files() == [tmp_path / "b.py"]
    (tmp_path / "b.py").unlink()
    with pytest.raises(DataError, match=r"has no source files(.|\n)*give a file or a folder of text"):
        stdlib_files()

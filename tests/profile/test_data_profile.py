"""What data is like: lengths and padding, how that is kept, when it is of no use any more, and who uses it."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx.cli.main import main
from phalanx.data.fingerprint import fingerprint, place
from phalanx.data.tokenizer import ByteTokenizer, identity_of, load_tokenizer
from phalanx.errors import DataError
from phalanx.profile import data, hardware, kept_data
from phalanx.profile.data import DataProfile, by_profile, from_rows, is_profile, profile_data, to_rows
from phalanx.profile.store import Row, Store, profiles_path, read_profile
from tests.data.test_datasets import from_datasets


def test_lengths_and_what_padding_wastes() -> None:
    mask = torch.zeros(4, 32, dtype=torch.int64)
    for row, length in enumerate((8, 8, 8, 32)):
        mask[row, :length] = 1
    batches: Any = SimpleNamespace(
        num_samples=4, batch=lambda first, count: {"input_ids": mask, "attention_mask": mask}
    )
    found = profile_data(batches)
    assert found.lengths == (8, 8, 8, 32) and found.mean == 14 and found.share(0.5) == 8 and found.share(1.0) == 32
    assert found.now.padding == pytest.approx(1 - 56 / 128) and found.now.cut == 0
    assert [own.tokens for own in found.tried()] == [8, 16, 24, 32]
    assert found.best.tokens == 8 and found.best.padding == 0 and found.best.cut == pytest.approx(24 / 56)


def test_packed_data_has_no_padding() -> None:
    ids = torch.zeros(2, 16, dtype=torch.int64)
    batches: Any = SimpleNamespace(num_samples=None, batch=lambda first, count: {"input_ids": ids.repeat(count, 1)})
    found = profile_data(batches, most=2)
    assert found == DataProfile(None, (16, 16), 16, has_padding=False)


def test_lengths_are_written_as_a_profile_and_read_back(tmp_path: Path) -> None:
    found = DataProfile(None, (3, 3, 9), 16, has_padding=True)
    path = tmp_path / "data.json"
    Store(tmp_path / "store").export(path, to_rows(found, "chat"))
    assert is_profile(path) and from_rows(read_profile(path)) == found
    assert from_rows([]) is None and not is_profile(tmp_path / "nowhere")
    wrong = [Row("samples of a length", {"size": "3", "samples": 1, "tokens": 4, "padded": 1}, 1.0, "")]
    assert from_rows(wrong) is None


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PHALANX_CACHE", str(folder))
    return folder


def records(words: int) -> list[dict[str, str]]:
    """Twelve, of three lengths."""
    return [{"prompt": "a" * (10 * words), "completion": "b" * (number % 3)} for number in range(12)]


def chat(path: Path, words: int = 1) -> str:
    rows = records(words)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main(list(arguments)) == 0
    said = capsys.readouterr()
    return " ".join(said.out.split()), " ".join(said.err.split())


def looked(capsys: pytest.CaptureFixture[str], path: str, *more: str) -> tuple[str, str]:
    return told(capsys, "profile", "--data", path, "--seq-len", "32", *more)


def must_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "profile_data", lambda *arguments: pytest.fail("the data was looked at again"))


def test_the_command_looks_at_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("some words\n" * 100)
    text = str(tmp_path / "text.txt")
    said, _ = told(capsys, "profile", "--data", text, "--seq-len", "16")
    assert said.startswith(f"{text}, 16 tokens per sample, 68 samples per epoch no padding: every sample has 16 tokens")
    out = tmp_path / "data.json"
    said, _ = told(capsys, "profile", "--data", text, "--seq-len", "16", "--out", str(out))
    assert f"written to {out}: plan with --data {out}" in said


def test_data_is_looked_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chat(tmp_path / "chat.jsonl")
    first, _ = looked(capsys, path)
    assert "lengths of 12 samples: mean" in first and "as looked at" not in first
    again, _ = looked(capsys, path, "--fresh")
    assert again == first
    must_not_look(monkeypatch)
    kept, _ = looked(capsys, path)
    assert "as looked at 20" in kept and "; --fresh looks again lengths of 12 samples" in kept
    assert len(by_profile(Store(profiles_path()).rows())) == 1


def test_plans_and_estimates_take_the_profile_that_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chat(tmp_path / "chat.jsonl")
    given = ("--model", "gpt2", "--cluster", "4 A100", "--data", path, "--seq-len", "32", "--batch-size", "4")
    _, said = told(capsys, "plan", *given)  # looks, and keeps it
    assert "as looked at" not in said
    must_not_look(monkeypatch)
    for verb in (("plan",), ("estimate", "--plan", "dp=4")):
        shown, said = told(capsys, *verb, *given)
        assert "12 samples; 62.5% of the tokens of a batch are padding" in shown
        assert f"{path} as looked at 20" in said and "`phalanx profile --data … --fresh` looks again" in said


def test_verbs_that_plan_read_data_as_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps({"body": "one two three " * 40}) + "\n" for _ in range(8)) + "no record\n")
    reading = ("--data", str(path), "--seq-len", "32")
    verbs = [
        ("profile",), ("plan", "--model", "gpt2", "--cluster", "4 A100", "--batch-size", "4"),
        ("estimate", "--model", "gpt2", "--cluster", "4 A100", "--batch-size", "4", "--plan", "dp=4"),
    ]  # fmt: skip
    for verb in verbs:
        assert main([*verb, *reading]) == 2
        assert "has no text in the field 'text'" in capsys.readouterr().err
        told(capsys, *verb, *reading, "--text-key", "body", "--on-broken", "skip")
    out = tmp_path / "data.json"
    told(capsys, "profile", *reading, "--text-key", "body", "--on-broken", "skip", "--out", str(out))
    for verb in verbs[1:]:
        assert main([*verb, "--data", str(out), "--text-key", "body"]) == 2
        said = capsys.readouterr().err
        assert "is a profile of data that was read" in said and "→ leave out --text-key" in said
        assert main([*verb, "--text-key", "body"]) == 2
        assert "it says how data is read, and none is given\n  → give --data" in capsys.readouterr().err


def test_another_length_is_another_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = chat(tmp_path / "chat.jsonl")
    looked(capsys, path)
    said, warned = told(capsys, "profile", "--data", path, "--seq-len", "16")
    assert "as looked at" not in said and not warned
    assert len(by_profile(Store(profiles_path()).rows())) == 2


def test_data_that_changed_is_looked_at_anew_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = chat(tmp_path / "chat.jsonl")
    looked(capsys, path)
    chat(Path(path), words=2)
    said, warned = looked(capsys, path)
    assert f"the profile of {path}, made 20" in warned
    assert "is stale (its files changed): the data is looked at anew" in warned
    assert "as looked at" not in said and "mean 22" in said
    assert len(by_profile(Store(profiles_path()).rows())) == 1  # the stale one is gone
    assert looked(capsys, path)[1] == ""


def test_a_profile_of_another_version_is_made_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chat(tmp_path / "chat.jsonl")
    looked(capsys, path)
    monkeypatch.setattr(kept_data, "VERSION", 2)
    assert "is stale (it is of another version): the data is looked at anew" in looked(capsys, path)[1]


def test_another_tokenizer_makes_a_profile_stale(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = chat(tmp_path / "chat.jsonl")
    looked(capsys, path)
    monkeypatch.setattr(kept_data, "identity_of", lambda choice, folder: "other")
    assert "is stale (the tokenizer changed)" in looked(capsys, path)[1]


def test_a_profile_of_which_rows_are_missing_is_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = chat(tmp_path / "chat.jsonl")
    first, _ = looked(capsys, path)
    with sqlite3.connect(profiles_path()) as database:
        database.execute("DELETE FROM measurements WHERE rowid = (SELECT rowid FROM measurements LIMIT 1)")
    said, warned = looked(capsys, path)
    assert "is damaged: the data is looked at anew" in warned and said == first
    with sqlite3.connect(profiles_path()) as database:
        database.execute("UPDATE measurements SET value = 1e15")
    assert "is damaged: the data is looked at anew" in looked(capsys, path)[1]
    profiles_path().write_text("no database at all, but long enough to be looked at as one" * 20)
    said, warned = looked(capsys, path)
    assert "put aside as profiles.broken, what it held is measured anew" in warned and said == first


def test_profiles_of_data_travel_with_the_others_in_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "answer", lambda *arguments: 3e9)
    path, file = chat(tmp_path / "here" / "chat.jsonl"), tmp_path / "all.json"
    looked(capsys, path)
    said, _ = told(capsys, "profile", "--device", "cpu", "--out", str(file))
    assert f"5 measurements and 1 profile of data written to {file}" in said
    copied = shutil.copytree(tmp_path / "here", tmp_path / "there", copy_function=shutil.copy2)  # with its times
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "other cache"))
    said, _ = told(capsys, "profile", "--device", "cpu", "--import", str(file))
    assert f"5 measurements and 1 profile of data taken over from {file}" in said and "of other devices" not in said
    must_not_look(monkeypatch)
    assert "as looked at" in looked(capsys, str(copied / "chat.jsonl"))[0]


def test_a_file_of_one_profile_is_data_and_one_of_several_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "answer", lambda *arguments: 3e9)
    one, other, file = chat(tmp_path / "a.jsonl"), chat(tmp_path / "b.jsonl"), tmp_path / "all.json"
    plan = ("estimate", "--model", "gpt2", "--cluster", "4 A100", "--plan", "dp=4", "--data", str(file))
    looked(capsys, one)
    told(capsys, "profile", "--device", "cpu", "--out", str(file))
    assert "12 samples; 62.5% of the tokens" in told(capsys, *plan)[0]
    looked(capsys, other)
    told(capsys, "profile", "--device", "cpu", "--out", str(file))
    assert main(list(plan)) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"option data = '{file}' holds 2 profiles of data: {one}, {other} → name the data itself" in error


def test_a_file_of_which_rows_are_missing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = chat(tmp_path / "chat.jsonl"), tmp_path / "data.json"
    looked(capsys, path, "--out", str(file))
    Store(tmp_path / "unused").export(file, read_profile(file)[1:])
    assert main(["plan", "--model", "gpt2", "--cluster", "4 A100", "--data", str(file)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"option data = '{file}' is damaged: what it says of lengths is not all there → write one with" in error


def test_data_is_known_by_its_files_without_reading_them(tmp_path: Path) -> None:
    path = chat(tmp_path / "a" / "chat.jsonl")
    known = fingerprint([path])
    assert known is not None and fingerprint([path]) == known
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copy2)
    assert fingerprint([str(tmp_path / "b" / "chat.jsonl")]) == known  # moved with its times
    folder = fingerprint([str(tmp_path / "a")])
    (tmp_path / "a" / "more.txt").write_text("more")
    assert fingerprint([str(tmp_path / "a")]) != folder
    assert fingerprint([f"{path}:0.5", "stdlib:0.5"]) != fingerprint([f"{path}:0.7", "stdlib:0.3"])
    os.utime(path, ns=(0, 0))
    assert fingerprint([path]) != known
    assert fingerprint(["synthetic:8"]) != fingerprint(["synthetic:9"])
    (tmp_path / "a" / "dangling.txt").symlink_to(tmp_path / "nowhere")
    assert fingerprint([str(tmp_path / "a")]) is not None
    with pytest.raises(DataError, match="does not exist"):
        fingerprint([str(tmp_path / "nowhere.txt")])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for the package `datasets`: conversations of so many `words`, with a fingerprint `mark`."""
    now = SimpleNamespace(words=1, mark="f00d", loaded=list[str]())

    def load(name: str, config: str | None, *, split: str | None, streaming: bool) -> Any:
        now.loaded.append(name)
        dataset = from_datasets("Dataset", records(now.words), length=not streaming)()
        dataset._fingerprint = now.mark
        return dataset

    package: Any = ModuleType("datasets")
    package.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", package)
    return now


def test_a_dataset_by_name_is_looked_at_once_and_again_when_it_is_another(
    hub: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = looked(capsys, "hf:me/chat#train")
    assert "as looked at" not in first and "12 samples per epoch" in first
    said, warned = looked(capsys, "hf:me/chat#train")
    assert "as looked at 20" in said and not warned
    assert fingerprint(["hf:me/chat#train"]) == fingerprint(["hf:elsewhere/copy"])  # it is the same data
    hub.words, hub.mark = 2, "beef"
    said, warned = looked(capsys, "hf:me/chat#train")
    assert "the profile of hf:me/chat#train, made 20" in warned and "is stale (its files changed)" in warned
    assert "as looked at" not in said and said != first
    assert len(by_profile(Store(profiles_path()).rows())) == 1


def test_a_stream_and_a_dataset_that_does_not_say_what_it_is_are_looked_at_each_time(
    hub: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fingerprint(["hf-stream:me/chat#train"]) is None and hub.loaded == []
    hub.mark = None
    assert fingerprint(["hf:me/chat#train"]) is None
    for _ in range(2):
        assert "as looked at" not in looked(capsys, "hf:me/chat#train")[0]
    assert not Store(profiles_path()).rows()


def test_a_profile_of_a_dataset_that_cannot_be_had_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(["profile", "--data", "hf:me/chat"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "data 'hf:me/chat' is a HuggingFace dataset, and the package 'datasets' that reads it is not" in error


def test_where_data_lies_does_not_depend_on_the_folder_it_is_named_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert place(["chat.jsonl"]) == place([str(tmp_path / "chat.jsonl")])
    assert place(["stdlib", "hf:name"]) == "stdlib + hf:name"


def test_a_tokenizer_is_known_without_loading_it(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    assert identity_of(None, tmp_path) == load_tokenizer(None, tmp_path, 300).identity
    assert identity_of(str(tmp_path), None) == identity_of(None, tmp_path)
    for choice, folder in (("bytes", tmp_path), (None, None), (None, tmp_path / "nowhere")):
        assert identity_of(choice, folder) == "bytes"

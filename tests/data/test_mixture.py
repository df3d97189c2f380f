"""Several sources in fixed shares: an exact function of the position, and what is refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data import named
from phalanx.data.mixture import Mixture, weighted_sources
from phalanx.errors import DataError
from tests.data.test_datasets import from_datasets


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.integers(0, 10**9))
def test_every_round_has_exactly_the_shares_and_every_source_advances_by_one(weights, first):
    mixture = Mixture([Fraction(weight, sum(weights)) for weight in weights])
    first = first // mixture.round * mixture.round
    sources, own = mixture.at(np.arange(first, first + 2 * mixture.round))
    counted = Counter(sources[: mixture.round].tolist())
    assert [Fraction(counted[n], mixture.round) for n in range(len(weights))] == [
        Fraction(weight, sum(weights)) for weight in weights
    ]
    for number in range(len(weights)):
        visited = own[sources == number]
        assert visited.tolist() == list(range(int(visited[0]), int(visited[0]) + len(visited)))


@pytest.fixture
def sources(tmp_path):
    """Texts of a's and b's, and a conversation."""
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text(letter * 400)
    record = {"prompt": "p", "completion": "cc"}
    (tmp_path / "c.jsonl").write_text(json.dumps(record) + "\n")
    return tmp_path


def test_a_mixture_of_texts_has_their_shares(sources, opened):
    batches = opened([f"{sources}/a.txt:0.7", f"{sources}/b.txt:0.3"])
    first = batches.batch(0, 30)["input_ids"][:, 0].tolist()
    assert Counter(first) == {97: 21, 98: 9}
    assert batches.num_samples == 100 and batches.describe().startswith("mixed: 0.7 of ")


def test_any_part_of_a_mixture_is_what_it_is_in_the_whole(sources, opened):
    batches = opened({str(sources / "a.txt"): 2, str(sources / "b.txt"): 1}, seed=3)
    whole = batches.batch(0, 200)
    for first, count in ((0, 7), (7, 50), (123, 77)):
        part = batches.batch(first, count)
        assert all(torch.equal(part[name], whole[name][first : first + count]) for name in whole)


def test_each_source_keeps_its_own_order_from_epoch_to_epoch(sources, opened):
    alone = opened(sources / "a.txt", seed=3)
    mixed = opened([f"{sources}/a.txt:1", f"{sources}/b.txt:1"], seed=3).batch(0, 300)["input_ids"]
    assert torch.equal(mixed[(mixed[:, :-1] == 97).all(1) | (mixed[:, 0] == 97)], alone.batch(0, 150)["input_ids"])


def test_sources_of_different_kinds_are_mixed(sources, opened):
    mixed = [f"{sources}/a.txt:1", f"{sources}/c.jsonl:1"]
    batches = opened(mixed)
    batch = batches.batch(0, 4)
    assert batches.padding and batch["attention_mask"].sum(1).tolist() == [8, 4, 8, 4]
    packed = opened(mixed, documents=True).batch(0, 2)
    assert packed["document_ids"].tolist() == [[1] * 8, [1] * 4 + [0] * 4]


def test_full_rows_have_a_mask_where_other_data_is_padded(sources, opened):
    text, chats = opened(sources / "a.txt"), opened(sources / "c.jsonl")
    text.mask_like(chats)
    assert text.padding and text.batch(0, 2)["attention_mask"].tolist() == [[1] * 8] * 2
    chats.mask_like(text)
    assert chats.batch(0, 1)["attention_mask"].tolist() == [[1] * 4 + [0] * 4]


def test_own_datasets_are_mixed_with_text(sources, opened):
    class Own:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            ids = torch.full((self.size,), index)
            return {"input_ids": ids, "labels": ids}

        size = 8

    batches = opened({Own(): 1, str(sources / "a.txt"): 1}, shuffle=False)
    assert batches.batch(0, 6)["input_ids"][:, 0].tolist() == [0, 97, 1, 97, 2, 97]
    Own.size = 5
    with pytest.raises(DataError, match=r"are \{'input_ids': \[8\](.|\n)*mix sources whose samples have the same"):
        opened({Own(): 1, str(sources / "a.txt"): 1}).batch(0, 2)
    with pytest.raises(DataError, match="collate was given, but none of the sources"):
        opened([f"{sources}/a.txt:1"], collate=lambda items: {})


def test_a_file_whose_name_looks_weighted_is_a_file(sources):
    (sources / "a.txt:2").write_text("x")
    assert weighted_sources([f"{sources}/a.txt:2"]) is None
    assert weighted_sources("synthetic:1000") is None
    assert weighted_sources("synthetic:1000:0.5") == [("synthetic:1000", Fraction(1))]


@pytest.mark.parametrize(
    "data, message",
    [
        (["a.txt:0.7", "b.txt"], r"'a.txt:0.7' has a weight, but 'b.txt' has none(.|\n)*e.g. b.txt:0.5; or none"),
        (["a.txt:0", "b.txt:1"], r"the weight of data 'a.txt' is 0(.|\n)*a number above 0"),
        ({"a.txt": "much"}, r"the weight of data 'a.txt' is much"),
    ],
)
def test_a_weight_that_says_nothing_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        weighted_sources(data)


def test_weights_that_hardly_repeat_are_refused():
    with pytest.raises(DataError, match=r"repeat only after 1,000,001 samples(.|\n)*fewer digits"):
        Mixture([Fraction(1, 1_000_001), Fraction(1_000_000, 1_000_001)])


@pytest.fixture
def hub(monkeypatch):
    """The package `datasets`, with one dataset in it; what it was asked for is remembered."""
    asked = []

    def load(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        if name == "gone":
            raise FileNotFoundError("Couldn't find 'gone'\non the hub")
        rows = from_datasets("Dataset", [{"text": "abcdefg"}], length=not streaming)()
        return rows if split else {"train": rows} if name == "one" else {"train": rows, "test": rows}

    package = ModuleType("datasets")
    package.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", package)
    return asked


def test_a_dataset_is_loaded_by_its_name(opened, hub):
    assert bytes(opened("hf:me/many,small#test").batch(0, 1)["input_ids"][0, :7].tolist()) == b"abcdefg"
    opened("hf:one")
    assert opened("hf-stream:one#train").num_samples is None
    mixed = opened(["hf:one:0.5", "synthetic:4:0.5"])
    assert mixed.num_samples == 5
    assert hub == [
        ("me/many", "small", "test", False), ("one", None, None, False), ("one", None, "train", True),
        ("one", None, None, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "data, message",
    [
        ("hf:many", r"has the splits 'train', 'test', and one must be chosen(.|\n)*e.g. hf:many#train"),
        ("hf:gone", r"cannot be loaded: FileNotFoundError: Couldn't find 'gone'\n(.|\n)*save_to_disk"),
        ("hf:", r"'hf:' names no dataset(.|\n)*write e.g. hf:"),
        (["hf:one", "stdlib"], r"a named dataset cannot be joined with other data(.|\n)*e.g. hf:one:0.5"),
    ],
)
def test_a_named_dataset_that_cannot_be_had_is_explained(opened, hub, data, message):
    with pytest.raises(DataError, match=message):
        opened(data)


def test_a_path_that_no_dataset_is_loaded_from_is_explained(opened, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rows.parquet").write_text("")
    for data, message in (
        ("hf:./nowhere#train", r"'./nowhere' does not exist \(seen from"),
        ("hf:~/nowhere", "'~/nowhere' does not exist"),
        ("hf:one/rows.parquet", r"is a file(.|\n)*its folder, e.g. hf:one"),
        ("hf-stream:saved#train", r"was written by save_to_disk(.|\n)*without hf:, e.g. saved$"),
    ):
        with pytest.raises(DataError, match=message):
            opened(data)
    opened("hf:~/one#train")
    assert hub == [(f"{tmp_path}/one", None, "train", False)]


def test_what_is_no_text_has_no_named_dataset(opened, hub):
    with pytest.raises(DataError, match="of which only text is read, and task image-classification learns from image"):
        opened("hf:one", "image-classification")
    assert hub == []


def test_a_named_dataset_without_the_package_names_it(opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"'hf:one' is a HuggingFace dataset, and(.|\n)*pip install datasets"):
        opened("hf:one")


def test_a_path_is_given_on_whole_and_a_name_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package has builders of its own called json and text, and a file here is no dataset of the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json").mkdir()
    (tmp_path / "squad").write_text("")
    assert named._found("./json", "", "hf:./json") == str(tmp_path / "json")
    assert named._found("squad", "", "hf:squad") == "squad"
    with pytest.raises(DataError, match="is a file"):
        named._found("./squad", "", "hf:./squad")

"""HuggingFace datasets, in memory, saved and streamed; stood in for by objects that look like theirs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from phalanx.errors import DataError

END = 257


def stream_of(batches):
    """All samples in their own order, as one list of ids."""
    return batches.batch(0, batches.num_samples)["input_ids"].flatten().tolist()


def from_datasets(name, rows, length=True, mapping=False):
    """An object that looks as if it came from the package `datasets`."""
    members = {"__iter__": lambda self: iter(rows), "__module__": "datasets.fake", "_fingerprint": "f00d"}
    if length:
        members["__len__"] = lambda self: len(rows)
    return type(name, (dict,) if mapping else (), {} if mapping else members)


def test_a_huggingface_dataset_is_read_by_its_rows(opened):
    dataset = from_datasets("Dataset", [{"text": "abc"}, {"text": "de"}])()
    assert stream_of(opened(dataset, tokens=7)) == [*b"abc", END, *b"de", END]


def test_a_streamed_dataset_is_random_access_for_what_was_read(tmp_path, opened):
    read = []

    def rows():
        for i in range(40):
            read.append(i)
            yield {"text": f"{i:07d}"}

    dataset = from_datasets("IterableDataset", rows(), length=False)()
    cache = tmp_path / "spools"
    batches = opened(dataset, tokens=8, cache=cache)
    assert batches.num_samples is None
    assert "in the order it arrives" in batches.describe()
    later = batches.batch(10, 2)["input_ids"]
    assert bytes(later[0, :7].tolist()) == b"0000010"
    assert batches.batch(0, 1)["input_ids"][0, :7].tolist() == [*b"0000000"]
    assert batches.batch(41, 1)["input_ids"][0, :7].tolist() == [*b"0000001"], "it begins again at its end"
    assert batches.num_samples == 40


def test_a_stream_reports_broken_rows_as_they_come(opened):
    dataset = from_datasets("IterableDataset", [{"text": "abcdefg"}, {"body": 3}], length=False)()
    with pytest.raises(DataError, match="IterableDataset object, row 1: has no text in the field 'text'"):
        opened(dataset)
    with pytest.warns(UserWarning, match="skipped broken part 1: .*row 1"):
        assert opened(dataset, on_broken="skip").batch(0, 1)["input_ids"].tolist() == [[*b"abcdefg", END]]


def test_a_stream_with_too_little_text_is_refused(opened):
    dataset = from_datasets("IterableDataset", [{"text": "ab"}], length=False)()
    with pytest.raises(DataError, match="holds 3 tokens, too few"):
        opened(dataset)


def test_a_dataset_of_several_splits_must_be_told_which(opened):
    splits = from_datasets("DatasetDict", None, mapping=True)(train=[], test=[])
    splits.__class__.__module__ = "datasets.fake"
    with pytest.raises(DataError, match=r"holds the splits 'train', 'test'(.|\n)*dataset\['train'\]"):
        opened(splits)


def test_a_saved_dataset_is_loaded_by_the_package_that_wrote_it(tmp_path, opened, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    package = ModuleType("datasets")
    package.load_from_disk = lambda path: from_datasets("Dataset", [{"text": path[-3:]}])()
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert stream_of(opened(tmp_path, tokens=4)) == [*str(tmp_path)[-3:].encode(), END]


def test_a_saved_dataset_without_the_package_names_it(tmp_path, opened, monkeypatch):
    (tmp_path / "state.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"package 'datasets' .*not installed(.|\n)*pip install datasets"):
        opened(tmp_path)


def test_a_package_that_lacks_something_itself_is_not_told_as_missing(tmp_path, opened, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "state.json").write_text("{}")
    (tmp_path / "datasets.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"cannot be imported: No module named 'a_module_that(.|\n)*--force-reinstall"):
        opened(tmp_path / "data")

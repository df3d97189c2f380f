"""HuggingFace datasets, in memory, saved and streamed; stood in for by objects that look like theirs, and
theirs where the package is installed."""

from __future__ import annotations

import json
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


def test_a_row_holds_what_is_not_null(opened):
    alpaca = {"instruction": "a", "input": None, "output": "b", "messages": None}
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": None}]}
    dataset = from_datasets("Dataset", [alpaca, {**dict.fromkeys(alpaca), **chat}])()
    first, second = opened(dataset, tokens=32).batch(0, 2)["input_ids"].tolist()
    assert first == second, "both are the conversation of a and b"


def test_fields_that_only_other_calls_have_are_not_arguments(opened):
    def calling(**arguments):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        turns = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return from_datasets("Dataset", [{"messages": turns}])()

    found = opened(calling(a=1, x=None), tokens=96).batch(0, 1)["input_ids"]
    assert found.tolist() == opened(calling(a=1), tokens=96).batch(0, 1)["input_ids"].tolist()


def test_rows_that_cannot_be_read_are_an_error_of_the_data(opened):
    def rows():
        yield {"text": "abcdefghijkl"}
        raise RuntimeError("while generating\nmore") from ValueError("JSON parse error")

    dataset = from_datasets("IterableDataset", rows(), length=False)()
    message = r"object cannot be read after 1 rows: RuntimeError: while generating \(ValueError: JSON parse error\)\n"
    with pytest.raises(DataError, match=message):
        opened(dataset)


def test_a_saved_dataset_that_is_broken_is_explained(tmp_path, opened, monkeypatch):
    def load(path):
        raise FileNotFoundError("neither a Dataset nor a DatasetDict")

    (tmp_path / "state.json").write_text("{}")
    package = ModuleType("datasets")
    package.load_from_disk = load
    monkeypatch.setitem(sys.modules, "datasets", package)
    with pytest.raises(DataError, match=r"cannot be loaded: FileNotFoundError: neither(.|\n)*save it anew"):
        opened(tmp_path)


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


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The package `datasets` itself, where it is installed; what it caches goes with the test."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


def write(folder, **splits):
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_package_itself_loads_a_folder_by_its_name(package, tmp_path, opened):
    write(tmp_path / "rows", train=[{"text": "abc"}, {"text": "de"}], validation=[{"text": "vwxyz!"}])
    train = [*b"abc", END, *b"de", END]
    assert stream_of(opened(f"hf:{tmp_path}/rows#train", tokens=7)) == train
    assert stream_of(opened(f"hf:{tmp_path}/rows#validation", tokens=7)) == [*b"vwxyz!", END]
    stream = opened(f"hf-stream:{tmp_path}/rows#train", tokens=7)
    assert stream.num_samples is None and stream.batch(0, 1)["input_ids"].tolist() == [train]
    with pytest.raises(DataError, match="has the splits 'train', 'validation'"):
        opened(f"hf-stream:{tmp_path}/rows")
    with pytest.raises(DataError, match=r"cannot be loaded: ValueError: .*'train', 'validation'"):
        opened(f"hf:{tmp_path}/rows#test")


def test_the_package_itself_names_what_is_broken_in_a_file(package, tmp_path, opened):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"text": ')
    for kind, place in ("hf", "cannot be loaded"), ("hf-stream", "cannot be read after 0 rows"):
        with pytest.raises(DataError, match=rf"{place}: .*JSON parse error"):
            opened(f"{kind}:{tmp_path}/rows")


def test_a_folder_that_the_package_itself_saved_is_read(package, tmp_path, opened):
    kinds = {"prompt": ["a", None], "completion": ["b", None], "instruction": [None, "a"], "output": [None, "b"]}
    rows = package.Dataset.from_dict(kinds)
    package.DatasetDict(one=rows, two=rows).save_to_disk(tmp_path / "saved")
    assert opened(tmp_path / "saved" / "one", tokens=32).num_samples == 2
    with pytest.raises(DataError, match=r"holds the splits 'one', 'two'(.|\n)*/saved/one"):
        opened(tmp_path / "saved")
    with pytest.raises(DataError, match=r"was written by save_to_disk(.|\n)*without hf:, e.g. .*/saved/one"):
        opened(f"hf:{tmp_path}/saved#one")

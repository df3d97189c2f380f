"""Records of conversations: packed into rows, streamed, and refused with their place."""

from __future__ import annotations

import json

import pytest

from phalanx.data.records import pack
from phalanx.errors import DataError
from tests.data.test_datasets import from_datasets


def record(size):
    return {"prompt": "p", "completion": "c" * size}


def written(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def test_packing_keeps_every_sample_whole_and_fills_rows():
    samples = [{"input_ids": [size] * size} for size in (5, 3, 7, 2, 8, 1, 4)]
    rows = list(pack(samples, 8))
    assert all(sum(len(sample["input_ids"]) for sample in row) <= 8 for row in rows)
    assert sorted(id(sample) for row in rows for sample in row) == sorted(map(id, samples))
    assert len(rows) == 4, "30 tokens in rows of 8"
    assert rows == list(pack(iter(samples), 8)), "a function of the samples alone"


def test_conversations_are_packed_where_documents_are_respected(tmp_path, opened):
    file = written(tmp_path / "a.jsonl", [record(2), record(4), record(1)])  # 4, 6 and 3 tokens
    batches = opened(file, tokens=10, documents=True, shuffle=False)
    assert "3 records packed into 2 rows, 65% full" in batches.describe()
    batch = batches.batch(0, 2)
    assert batches.documents and not batches.padding
    assert batch["document_ids"].tolist()[0] == [1] * 4 + [2] * 6
    assert batch["document_ids"].tolist()[1] == [1] * 3 + [0] * 7
    assert batch["position_ids"].tolist()[0] == [*range(4), *range(6)]


def test_a_streamed_dataset_of_records_is_random_access_for_what_was_read(opened):
    read = []

    def rows():
        for number in range(6):
            read.append(number)
            yield record(number + 1)

    batches = opened(from_datasets("IterableDataset", rows(), length=False)(), tokens=16)
    assert batches.num_samples is None and len(read) == 1
    lengths = [int(batches.batch(n, 1)["attention_mask"].sum()) for n in (3, 0, 7)]
    assert lengths == [6, 3, 4], "it begins again at its end"
    assert batches.num_samples == 6


def test_a_streamed_dataset_is_packed_as_it_arrives(opened):
    rows = [record(2), record(4), record(1)]
    batches = opened(from_datasets("IterableDataset", rows, length=False)(), tokens=10, documents=True)
    assert batches.batch(0, 1)["document_ids"].tolist() == [[1] * 4 + [2] * 6]


def test_a_streamed_dataset_feeds_tasks_that_need_records(opened):
    rows = [{"text": "a", "label": 1}, {"text": "bc", "label": 0}]
    batches = opened(from_datasets("IterableDataset", rows, length=False)(), "text-classification")
    assert batches.batch(0, 3)["labels"].tolist() == [1, 0, 1]


def test_remarks_on_a_stream_are_made_once(opened):
    rows = from_datasets("IterableDataset", [record(20), record(30)], length=False)()
    with pytest.warns(UserWarning, match="some records of IterableDataset object are longer than 8 tokens") as said:
        opened(rows, tokens=8).batch(0, 2)
    assert len(said) == 1, [str(each.message) for each in said]


def test_a_stream_without_records_is_refused(opened):
    with pytest.raises(DataError, match="holds no samples"):
        opened(from_datasets("IterableDataset", [], length=False)(), "text-classification")


def test_a_record_of_no_kind_is_told_which_there_are(tmp_path, opened):
    file = written(tmp_path / "a.jsonl", [record(2), {"prompt": "p"}])
    with pytest.raises(DataError, match=r"a.jsonl:2: has no 'completion'; .* 'messages'; or 'conversations'; or"):
        opened(file, tokens=16)

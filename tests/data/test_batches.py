"""Batches: a function of (seed, position) alone, for every kind of data; and data that does not fit is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from phalanx import tasks
from phalanx.data.batches import needs_tokenizer, open_data, sample_length
from phalanx.errors import ConfigError, DataError
from phalanx.tasks.base import IGNORE
from phalanx.tasks.vocabulary import num_token_ids


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(f'{{"text": "document {i} {"x" * (i % 7)}"}}\n' for i in range(60)))
    return path


def same(left, right):
    return set(left) == set(right) and all(torch.equal(left[key], right[key]) for key in left)


def joined(*parts):
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm"])
@pytest.mark.parametrize("data", ["corpus", "synthetic:23"])
def test_a_batch_does_not_depend_on_how_it_is_asked_for(corpus, opened, task, data):
    batches = opened(corpus if data == "corpus" else data, task, tokens=16)
    whole = batches.batch(5, 60)
    parts = {first: batches.batch(first, 12) for first in (41, 5, 17, 53, 29)}
    assert same(whole, joined(*(parts[first] for first in sorted(parts))))
    assert same(whole, opened(corpus if data == "corpus" else data, task, tokens=16).batch(5, 60))


def test_every_sample_is_visited_once_per_epoch(corpus, opened):
    batches = opened(corpus, tokens=16)
    count = batches.num_samples
    in_order = opened(corpus, tokens=16, shuffle=False).batch(0, count)["input_ids"].tolist()
    for epoch in range(2):
        visited = batches.batch(epoch * count, count)["input_ids"].tolist()
        assert visited != in_order
        assert sorted(visited) == sorted(in_order)


def test_the_seed_decides_the_order(corpus, opened):
    assert not same(opened(corpus, seed=1).batch(0, 8), opened(corpus, seed=2).batch(0, 8))


def test_masks_are_drawn_anew_in_every_epoch(corpus, opened):
    batches = opened(corpus, "masked-lm", tokens=64, shuffle=False)
    first, second = batches.batch(0, 4), batches.batch(batches.num_samples, 4)
    assert not torch.equal(first["labels"], second["labels"])


def test_packed_documents_restart_positions_and_lose_their_first_label(corpus, opened):
    batches = opened(corpus, tokens=64, documents=True, shuffle=False)
    batch = batches.batch(0, batches.num_samples)
    assert batches.documents and not batches.padding
    ids, starts = batch["input_ids"], batch["position_ids"] == 0
    ends_before = torch.zeros_like(starts)
    ends_before[:, 1:] = ids[:, :-1] == 257
    ends_before[:, 0] = True
    assert torch.equal(starts, ends_before)
    assert torch.equal(batch["document_ids"], starts.cumsum(1))
    assert torch.equal(batch["labels"] == IGNORE, starts & (torch.arange(64) > 0))


@pytest.mark.parametrize("name", tasks.TASKS)
def test_synthetic_data_feeds_every_task(opened, config, name):
    batches = opened("synthetic:5", name, tokens=16)
    assert batches.num_samples == 5
    batch = batches.batch(3, 4)
    task = tasks.get(name)
    assert set(batch) == {i.name for i in task.inputs(config)}
    assert {t.shape[0] for t in batch.values()} == {4}
    assert {t.dtype for t in batch.values()} <= {torch.int64, torch.float32}
    assert task.num_tokens(batch) == 4 * batches.tokens_per_sample
    assert "synthetic, " in batches.describe() and "\n" not in batches.describe()


def test_synthetic_documents_are_packed(opened):
    assert "document_ids" in opened("synthetic", tokens=16, documents=True).batch(0, 2)


@pytest.mark.parametrize("data", ["synthetic:", "synthetic:0", "synthetic:many"])
def test_a_malformed_number_of_synthetic_samples_is_refused(opened, data):
    with pytest.raises(DataError, match=r"does not say how many samples(.|\n)*synthetic:1000"):
        opened(data)


def test_pre_tokenised_arrays_are_cut_into_samples(tmp_path, opened):
    np.save(tmp_path / "a.npy", np.arange(200))
    batches = opened(tmp_path / "a.npy", tokens=8, shuffle=False)
    assert batches.num_samples == 25
    assert batches.batch(24, 1)["input_ids"].tolist() == [list(range(192, 200))]


def test_ids_outside_the_vocabulary_are_refused(tmp_path, opened):
    np.save(tmp_path / "a.npy", np.full(100, 300))
    with pytest.raises(DataError, match=r"token id 300, but the model's vocabulary is 0 … 299(.|\n)*tokenise"):
        opened(tmp_path / "a.npy").batch(0, 1)


def test_arrays_have_no_documents_and_feed_no_classifier(tmp_path, opened):
    np.save(tmp_path / "a.npy", np.zeros(100, np.int64))
    with pytest.raises(DataError, match="does not say where documents end"):
        opened(tmp_path / "a.npy", documents=True)
    with pytest.raises(DataError, match=r"cannot learn from the token array(.|\n)*JSONL records with 'text', 'label'"):
        opened(tmp_path / "a.npy", "text-classification")


@pytest.mark.parametrize(
    "task, fields", [("text-classification", "'text', 'label'"), ("text-to-text", "'source', 'target'")]
)
def test_the_standard_library_is_no_place_for_records(opened, task: str, fields: str):
    with pytest.raises(
        DataError, match=f"data 'stdlib' is text alone, and task {task} learns from .*{fields}(.|\n)*JSONL"
    ):
        opened("stdlib", task)


def test_data_that_cannot_be_joined_is_refused(tmp_path, opened):
    np.save(tmp_path / "a.npy", np.zeros(100, np.int64))
    for other in ("synthetic", str(tmp_path / "a.npy")):
        with pytest.raises(DataError, match=r"cannot be joined with other data(.|\n)*give it alone"):
            opened(["stdlib", other])


@pytest.mark.parametrize("data", [3, [], {}, ["a.txt", 3], iter([])])
def test_data_of_an_unknown_kind_is_refused(opened, data):
    with pytest.raises(
        DataError, match=r"which cannot be read(.|\n)*give a path, a list of paths, 'stdlib', 'synthetic'"
    ):
        opened(data)


def test_samples_longer_than_the_model_takes_are_refused(opened):
    with pytest.raises(
        DataError, match=r"5000 tokens is longer than the model takes .max_position_embeddings allows 4096"
    ):
        opened("synthetic", tokens=5000)
    with pytest.raises(DataError, match=r"max_target_positions allows 64(.|\n)*set seq_len to 64"):
        opened("synthetic", "speech-to-text", tokens=65)


def test_a_sample_of_one_token_is_refused(opened):
    with pytest.raises(DataError, match=r"nothing to predict(.|\n)*at least 2"):
        opened("synthetic", tokens=1)


def test_text_without_a_tokenizer_is_refused(corpus, tmp_path, config):
    with pytest.raises(DataError, match="is text, and no tokenizer was given"):
        open_data(
            corpus, task=tasks.get("causal-lm"), config=config, tokenizer=None, tokens=8, seed=0, cache=tmp_path / "c"
        )


def test_documents_are_refused_for_tasks_that_cannot_take_them(corpus, opened):
    with pytest.raises(ConfigError, match="masked-lm cannot take documents"):
        opened(corpus, "masked-lm", documents=True)


@pytest.mark.parametrize(
    "data, task, needed",
    [
        ("stdlib", "causal-lm", True),
        (["a.txt"], "causal-lm", True),
        ("synthetic:3", "causal-lm", False),
        ("a.npy", "causal-lm", False),
        ("folder", "image-classification", False),
        ("folder", "speech-to-text", True),
        ([{"input_ids": 1}], "causal-lm", False),
    ],
)
def test_it_is_known_beforehand_whether_text_will_be_tokenised(data, task, needed):
    assert needs_tokenizer(data, tasks.get(task)) is needed


class Own(Dataset):
    def __init__(self, **changes):
        self.changes = changes

    def __len__(self):
        return 10

    def __getitem__(self, index):
        ids = torch.full((6,), index)
        sample = {"input_ids": ids, "labels": ids, **self.changes}
        return {key: value for key, value in sample.items() if value is not None}


def test_an_own_dataset_is_stacked_in_the_order_of_the_seed(opened):
    batches = opened(Own(), tokens=6)
    visited = batches.batch(0, 10)["input_ids"][:, 0].tolist()
    assert sorted(visited) == list(range(10)) and visited != list(range(10))
    assert batches.describe() == "Own, 6 tokens per sample, 10 samples per epoch"
    assert not batches.padding


def test_a_list_of_samples_is_a_dataset_and_arrays_become_tensors(opened):
    samples = [{"input_ids": np.full(6, i, np.int32), "labels": [i] * 6} for i in range(3)]
    batch = opened(samples, tokens=6, shuffle=False).batch(0, 3)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["labels"][:, 0].tolist() == [0, 1, 2]


def test_the_users_collate_function_is_used(opened):
    def collate(samples):
        ids = torch.stack([sample["input_ids"] for sample in samples])
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}

    batches = opened(Own(labels=None), tokens=6, collate=collate)
    assert batches.padding
    assert batches.batch(0, 2)["attention_mask"].dtype == torch.int64


def test_decoder_inputs_are_derived_from_an_own_datasets_labels(opened):
    batch = opened(Own(), "text-to-text", tokens=6, shuffle=False).batch(3, 1)
    assert batch["decoder_input_ids"].tolist() == [[256, 3, 3, 3, 3, 3]]


@pytest.mark.parametrize(
    "dataset, message",
    [
        (Own(labels=None), "Own yields input_ids; task causal-lm takes input_ids, labels"),
        (Own(extra=torch.zeros(1)), "Own yields extra, input_ids, labels; task causal-lm takes"),
        (Own(labels=torch.zeros(6)), r"labels of Own is float of shape \[1, 6\]; task causal-lm takes int64 of shape"),
        (Own(labels=torch.tensor(1)), r"labels of Own is int64 of shape \[1\]; .* of shape \[batch, tokens\]"),
        (Own(labels="text"), "cannot be stacked"),
        ([3, 4], "a sample of the dataset is a int, not a dict(.|\n)*collate function"),
        (torch.zeros(3, 4), "a sample of the dataset is a Tensor, not a dict(.|\n)*collate function"),
    ],
)
def test_an_own_dataset_that_does_not_fit_the_task_is_refused(opened, dataset, message):
    with pytest.raises(DataError, match=message):
        opened(dataset, tokens=6)


def test_a_list_of_any_items_is_a_dataset_where_a_collate_function_is_given(opened):
    def collate(samples):
        ids = torch.stack([ids for ids, _ in samples])
        return {"input_ids": ids, "labels": ids}

    batches = opened([(torch.full((6,), n), n) for n in range(4)], tokens=6, shuffle=False, collate=collate)
    assert batches.batch(0, 4)["input_ids"][:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "task, changes, message",
    [
        ("causal-lm", {"input_ids": [5, 5000]}, r"Own holds the token id 5000, but the model's vocabulary is 0 … 299"),
        ("causal-lm", {"input_ids": [-1, 5]}, "Own holds the token id -1, but the model's vocabulary is 0 … 299"),
        (
            "causal-lm",
            {"labels": [IGNORE, 99999]},
            "holds the label 99999, but the model's vocabulary is(.|\n)*-100 marks",
        ),
        ("text-to-text", {"labels": [1, 300]}, "Own holds the label 300, but the model's vocabulary is 0 … 299"),
        (
            "text-classification",
            {"labels": 2},
            "Own holds the label 2, but the model's labels are 0 … 1(.|\n)*num_labels",
        ),
        (
            "causal-lm",
            {"input_ids": [1] * 4097, "labels": [1] * 4097},
            "has 4097 tokens.*max_position_embeddings allows 4096",
        ),
        ("text-to-text", {"input_ids": [1] * 4097}, r"a sample of Own has 4097 tokens(.|\n)*cut samples to 4096"),
    ],
)
def test_what_the_model_has_no_row_for_is_refused(opened, task, changes, message):
    with pytest.raises(DataError, match=message):
        opened(Own(**changes), task, tokens=6)


def test_every_batch_is_checked_not_only_the_first(opened):
    samples = [{"input_ids": [n], "labels": [IGNORE]} for n in (5, 299, 300)]
    batches = opened(samples, tokens=6, shuffle=False)
    assert batches.batch(0, 2)["input_ids"].tolist() == [[5], [299]]
    with pytest.raises(DataError, match="list holds the token id 300"):
        batches.batch(1, 2)


def test_two_vocabularies_of_one_model_are_told_apart():
    config = SimpleNamespace(vocab_size=10, decoder_vocab_size=20)
    assert [num_token_ids(config, name) for name in ("input_ids", "decoder_input_ids", "labels")] == [10, 20, 20]


def test_an_own_dataset_without_boundaries_cannot_be_packed(opened):
    with pytest.raises(DataError, match=r"yields no document_ids(.|\n)*leave documents out"):
        opened(Own(), tokens=6, documents=True)


def test_an_empty_own_dataset_is_refused(opened):
    with pytest.raises(DataError, match="holds no samples"):
        opened(torch.zeros(0, 4))


def test_samples_of_unequal_length_need_a_collate_function(opened):
    samples = [{"input_ids": [1] * n, "labels": [1] * n} for n in (4, 5)]
    with pytest.raises(DataError, match=r"cannot be stacked(.|\n)*collate function"):
        opened(samples, tokens=6).batch(0, 2)


def test_a_collate_function_must_return_a_dict(opened):
    with pytest.raises(DataError, match=r"collate returned a list(.|\n)*dict of tensors"):
        opened(Own(), collate=lambda samples: samples)


def test_collate_is_refused_where_it_would_not_act(opened):
    with pytest.raises(DataError, match="collate was given, but data is not your own dataset: 'synthetic'"):
        opened("synthetic", collate=lambda samples: {})


def test_data_is_named_by_its_kind_in_messages_because_it_may_be_large(opened):
    with pytest.raises(DataError, match="not your own dataset: a list\n"):
        opened(["stdlib"] * 1000, collate=lambda samples: {})


def test_a_nested_text_configuration_is_understood(opened):
    text = SimpleNamespace(vocab_size=50, pad_token_id=0, max_position_embeddings=99)
    config = SimpleNamespace(get_text_config=lambda: text)
    assert opened("synthetic", config=config).batch(0, 9)["input_ids"].max() < 50
    with pytest.raises(DataError, match="max_position_embeddings allows 99"):
        opened("synthetic", config=config, tokens=100)


def test_a_sample_is_as_long_as_asked_for_else_as_the_model_takes_at_most_1024(config):
    causal, speech = tasks.get("causal-lm"), tasks.get("speech-to-text")
    assert config.max_position_embeddings == 4096
    assert [sample_length(asked, causal, config) for asked in (None, 32, 5000)] == [1024, 32, 5000]
    assert sample_length(None, causal, SimpleNamespace(max_position_embeddings=128)) == 128
    assert sample_length(None, causal, SimpleNamespace()) == 1024
    roberta = SimpleNamespace(model_type="roberta", max_position_embeddings=514, pad_token_id=1, vocab_size=9)
    assert sample_length(None, causal, roberta) == 512  # it counts positions from 2 on
    assert sample_length(None, speech, SimpleNamespace(max_target_positions=64, max_position_embeddings=9)) == 64

"""What holds for every task: names, inputs and synthetic batches agree, and options it cannot take are refused."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from phalanx import tasks
from phalanx.errors import ConfigError, ModelError
from phalanx.tasks.base import IGNORE

CONFIG = SimpleNamespace(
    vocab_size=61,
    pad_token_id=3,
    decoder_start_token_id=5,
    num_labels=4,
    label2id={"a": 0, "b": 1, "c": 2, "d": 3},
    image_size=8,
    num_channels=3,
    num_mel_bins=6,
    max_source_positions=10,
)
TAKES_PADDING = [name for name in tasks.TASKS if name != "image-classification"]
TEXT_INPUT = ["causal-lm", "masked-lm", "text-classification", "text-to-text"]


def matches(batch, inputs, sizes):
    assert set(batch) == {i.name for i in inputs}
    for i in inputs:
        tensor = batch[i.name]
        assert tensor.dtype == (torch.int64 if i.dtype == "int64" else torch.float32)
        assert tensor.device.type == "cpu"
        assert list(tensor.shape) == [sizes[d] if isinstance(d, str) else d for d in i.dims], i.name


def sizes(name, batch, tokens):
    return {"batch": batch, "source": tokens, "tokens": tokens * 3 // 4 if name == "text-to-text" else tokens}


@pytest.mark.parametrize("name", tasks.TASKS)
@pytest.mark.parametrize("batch, tokens", [(1, 8), (3, 16)])
def test_a_synthetic_batch_matches_the_declared_inputs(name, batch, tokens):
    task = tasks.get(name)
    assert task.name == name
    made = task.synthetic(CONFIG, batch=batch, tokens=tokens, seed=1)
    matches(made, task.inputs(CONFIG), sizes(name, batch, tokens))


@pytest.mark.parametrize("name", TAKES_PADDING)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_padded_synthetic_batch_matches_the_declared_inputs(name, batch):
    task = tasks.get(name)
    made = task.synthetic(CONFIG, batch=batch, tokens=16, seed=1, padding=True)
    matches(made, task.inputs(CONFIG, padding=True), sizes(name, batch, 16))


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_synthetic_batch_is_a_function_of_the_seed(name):
    task = tasks.get(name)
    first, again, other = (task.synthetic(CONFIG, batch=3, tokens=16, seed=s) for s in (7, 7, 8))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", TEXT_INPUT)
@pytest.mark.parametrize("seed", range(5))
def test_padding_leaves_one_row_full_and_one_strongly_padded(name, seed):
    made = tasks.get(name).synthetic(CONFIG, batch=4, tokens=16, seed=seed, padding=True)
    mask = made["attention_mask"]
    lengths = mask.sum(dim=1)
    assert lengths.max() == 16 and 2 <= lengths.min() <= 4
    assert (mask.diff(dim=1) <= 0).all(), "padding is on the right"
    assert (made["input_ids"][mask == 0] == CONFIG.pad_token_id).all()


@pytest.mark.parametrize("name", ["causal-lm", "masked-lm", "speech-to-text", "text-to-text"])
@pytest.mark.parametrize("seed", range(5))
def test_every_padded_row_keeps_two_labels_and_none_on_padding(name, seed):
    made = tasks.get(name).synthetic(CONFIG, batch=4, tokens=16, seed=seed, padding=True)
    learned = made["labels"] != IGNORE
    assert (learned.sum(dim=1) >= 2).all()
    assert not learned.all()
    if name in ("causal-lm", "masked-lm"):
        assert not learned[made["attention_mask"] == 0].any()


@pytest.mark.parametrize("name", ["speech-to-text", "text-to-text"])
def test_the_decoder_reads_the_labels_shifted_right(name):
    made = tasks.get(name).synthetic(CONFIG, batch=4, tokens=16, seed=0, padding=True)
    read, labels = made["decoder_input_ids"], made["labels"]
    assert (read[:, 0] == CONFIG.decoder_start_token_id).all()
    assert torch.equal(read[:, 1:], labels[:, :-1].masked_fill(labels[:, :-1] == IGNORE, CONFIG.pad_token_id))


@pytest.mark.parametrize("name", tasks.TASKS)
def test_the_reference_is_given_only_what_huggingface_takes(name):
    task = tasks.get(name)
    made = task.synthetic(CONFIG, batch=2, tokens=16, seed=0)
    assert set(made) - set(task.reference_inputs(made)) <= {"decoder_input_ids"}
    assert torch.equal(task.reference_inputs(made)["labels"], made["labels"])


@pytest.mark.parametrize(
    "name, padded, whole",
    [("causal-lm", 24, 32), ("masked-lm", 24, 32), ("text-classification", 24, 32), ("image-classification", 2, 2)],
)
def test_tokens_are_counted_without_padding(name, padded, whole):
    task = tasks.get(name)
    made = task.synthetic(CONFIG, batch=2, tokens=16, seed=0)
    assert task.num_tokens(made) == whole == 2 * task.tokens_per_sample(16)
    if name != "image-classification":
        half = torch.ones(2, 16, dtype=torch.int64)
        half[0, 8:] = 0
        assert task.num_tokens({**made, "attention_mask": half}) == padded


def test_tokens_of_encoder_decoders_are_counted_by_their_labels():
    for name, whole in (("text-to-text", 2 * (16 + 12)), ("speech-to-text", 32)):
        task = tasks.get(name)
        made = task.synthetic(CONFIG, batch=2, tokens=16, seed=0)
        assert task.num_tokens(made) == whole == 2 * task.tokens_per_sample(16)
        made["labels"][0, 4:] = IGNORE
        assert task.num_tokens(made) == whole - (made["labels"].shape[1] - 4)


@pytest.mark.parametrize("name", [name for name in tasks.TASKS if name != "causal-lm"])
def test_documents_are_refused_with_the_reason_by_all_but_causal_lm(name):
    task = tasks.get(name)
    with pytest.raises(ConfigError, match=f"task {name} cannot take documents: .+"):
        task.inputs(CONFIG, documents=True)
    with pytest.raises(ConfigError, match="leave documents out"):
        task.synthetic(CONFIG, batch=2, tokens=16, seed=0, documents=True)


def test_images_refuse_padding_because_their_size_is_fixed():
    with pytest.raises(ConfigError, match="image-classification cannot take padding: all images have the size"):
        tasks.get("image-classification").inputs(CONFIG, padding=True)


def test_an_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no task named 'casual-lm'(.|\n)*did you mean 'causal-lm'"):
        tasks.get("casual-lm")


def test_a_model_without_decoder_start_is_refused():
    config = SimpleNamespace(**{**vars(CONFIG), "decoder_start_token_id": None})
    with pytest.raises(ModelError, match=r"decoder_start_token_id is None(.|\n)*set decoder_start_token_id"):
        tasks.get("text-to-text").synthetic(config, batch=1, tokens=8, seed=0)


def test_a_classifier_of_one_label_is_refused():
    config = SimpleNamespace(**{**vars(CONFIG), "num_labels": 1})
    with pytest.raises(ModelError, match=r"at least two labels(.|\n)*model_options num_labels"):
        tasks.get("text-classification").synthetic(config, batch=1, tokens=8, seed=0)


def test_a_model_without_vocabulary_is_refused_for_text():
    with pytest.raises(ModelError, match=r"has no vocab_size(.|\n)*choose a task that fits"):
        tasks.get("causal-lm").synthetic(SimpleNamespace(), batch=1, tokens=8, seed=0)


def test_task_names_are_known_without_importing_torch():
    code = "import sys, phalanx.tasks; assert 'causal-lm' in phalanx.tasks.TASKS; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

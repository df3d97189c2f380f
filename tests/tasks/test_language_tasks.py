"""Causal and masked language modelling: documents, conversations, masking; checked against HuggingFace models."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import tasks
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.errors import ConfigError, DataError
from phalanx.tasks.base import IGNORE, BrokenRecord, RecordRemark, Windows, random_starts
from phalanx.tasks.masked_lm import hide
from phalanx.tasks.vocabulary import shift_right

CONFIG = SimpleNamespace(vocab_size=300, pad_token_id=None)


@given(seed=st.integers(0, 2**32), tokens=st.integers(4, 40))
def test_rows_hold_two_to_four_documents_of_at_least_two_tokens(seed, tokens):
    made = tasks.get("causal-lm").synthetic(CONFIG, batch=3, tokens=tokens, seed=seed, documents=True)
    for positions, documents, labels in zip(made["position_ids"], made["document_ids"], made["labels"], strict=True):
        counts = torch.bincount(documents)[1:]
        assert 2 <= len(counts) <= 4 and (counts >= 2).all() and counts.sum() == tokens
        assert torch.equal(positions, torch.cat([torch.arange(count) for count in counts]))
        firsts = torch.nonzero(positions == 0).flatten()[1:]
        assert (labels[firsts] == IGNORE).all()
        assert (labels == IGNORE).sum() == len(firsts)


def test_documents_differ_in_length_where_there_is_room():
    starts = random_starts(8, 64, torch.Generator().manual_seed(0))
    for row in starts:
        ends = torch.cat([torch.nonzero(row).flatten(), torch.tensor([64])])
        assert len(set(ends.diff().tolist())) == len(ends) - 1


def test_documents_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"two documents of two tokens do not fit in 3(.|\n)*at least 4 tokens"):
        tasks.get("causal-lm").synthetic(CONFIG, batch=1, tokens=3, seed=0, documents=True)


def test_padding_together_with_documents_is_refused():
    with pytest.raises(ConfigError, match="padding together with documents: packed documents fill their rows"):
        tasks.get("causal-lm").inputs(CONFIG, padding=True, documents=True)


def test_huggingface_gives_packed_documents_the_loss_of_separate_ones():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    model = LlamaForCausalLM(config).double().eval()
    task = tasks.get("causal-lm")
    batch = task.synthetic(config, batch=2, tokens=20, seed=3, documents=True)
    packed = model(**task.reference_inputs(batch)).loss
    total, count = 0.0, 0
    for ids, documents in zip(batch["input_ids"], batch["document_ids"], strict=True):
        for number in documents.unique():
            document = ids[documents == number][None]
            predicted = document.shape[1] - 1
            total, count = total + model(input_ids=document, labels=document).loss * predicted, count + predicted
    torch.testing.assert_close(packed, total / count, rtol=1e-6, atol=0)


@pytest.mark.parametrize("padding", [False, True])
def test_huggingface_derives_the_decoder_inputs_that_we_give(padding):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    model = T5ForConditionalGeneration(config).eval()
    task = tasks.get("text-to-text")
    batch = task.synthetic(config, batch=3, tokens=12, seed=0, padding=padding)
    assert "decoder_input_ids" not in task.reference_inputs(batch)
    assert torch.equal(model(**batch).loss, model(**task.reference_inputs(batch)).loss)


@given(length=st.integers(2, 200), key=st.integers(0, 2**63 - 1))
def test_masking_hides_fifteen_percent_and_labels_exactly_what_it_may_have_changed(length, key):
    ids = torch.arange(length)[None] % 100
    hidden, labels = hide(ids, torch.ones_like(ids), [key], mask_id=299, size=300)
    chosen = labels != IGNORE
    assert chosen.sum() == max(2, round(0.15 * length))
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(hidden[~chosen], ids[~chosen])


def test_masked_tokens_are_replaced_in_the_proportions_of_bert():
    ids = torch.full((100, 1000), 7)
    hidden, labels = hide(ids, torch.ones_like(ids), range(100), mask_id=299, size=300)
    fates = hidden[labels != IGNORE]
    assert len(fates) == 15_000
    assert (fates == 299).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (fates == 7).float().mean() == pytest.approx(0.1, abs=0.02)


def test_masking_of_a_row_depends_on_its_key_alone():
    ids = torch.randint(0, 200, (3, 64))
    task = tasks.get("masked-lm")
    together = task.from_windows(Windows(ids, [5, 6, 7]), CONFIG, mask_id=256)
    alone = task.from_windows(Windows(ids[1:2], [6]), CONFIG, mask_id=256)
    other = task.from_windows(Windows(ids[1:2], [8]), CONFIG, mask_id=256)
    assert torch.equal(together["labels"][1:2], alone["labels"])
    assert torch.equal(together["input_ids"][1:2], alone["input_ids"])
    assert not torch.equal(other["labels"], alone["labels"])


def test_masked_lm_refuses_a_tokenizer_without_a_mask_token():
    with pytest.raises(DataError, match=r"mask token, but the tokenizer has none(.|\n)*choose a tokenizer"):
        tasks.get("masked-lm").from_windows(Windows(torch.zeros(1, 8, dtype=torch.int64), [0]), CONFIG, mask_id=None)


def test_only_the_assistants_words_and_their_end_are_learned():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "so long"},
    ]
    tokenizer = ByteTokenizer()
    (sample,) = tasks.get("causal-lm").encode({"messages": messages}, tokenizer, CONFIG, 100)
    learned = [label for label in sample["labels"] if label != IGNORE]
    assert learned == [*b"yo", tokenizer.eos_id, *b"so long", tokenizer.eos_id]
    assert tokenizer.decode(sample["input_ids"]) == "user: hi\nassistant: yo\nuser: bye\nassistant: so long\n"
    kept = [i for i, label in zip(sample["input_ids"], sample["labels"], strict=True) if label != IGNORE]
    assert kept == learned


class Templated(ByteTokenizer):
    """Bytes with a chat template, as a model folder may have."""

    has_chat_template = True

    def apply_chat_template(self, messages, *, generate, tools=None):
        text = "".join(f"[{m['role']}]{m['content']}[/]" for m in messages)
        return text + "[assistant]" if generate else text


class Forgetful(Templated):
    def apply_chat_template(self, messages, *, generate, tools=None):
        return super().apply_chat_template(messages[-1:], generate=generate)


def test_the_tokenizers_own_chat_template_is_used():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (sample,) = tasks.get("causal-lm").encode({"messages": messages}, Templated(), CONFIG, 100)
    assert bytes(sample["input_ids"]) == b"[user]hi[/][assistant]yo[/]"
    assert bytes(label for label in sample["labels"] if label != IGNORE) == b"yo[/]"


class Thoughtful(Templated):
    """Leaves the thoughts of all turns but the last out, as Qwen3's does."""

    def apply_chat_template(self, messages, *, generate, tools=None):
        kept = [{**m, "content": re.sub("<think>.*</think>", "", m["content"])} for m in messages[:-1]]
        return super().apply_chat_template([*kept, messages[-1]], generate=generate)


class Strict(Templated):
    """Knows two roles, as Gemma's does."""

    def apply_chat_template(self, messages, *, generate, tools=None):
        if any(m["role"] == "system" for m in messages):
            raise ValueError("System role not supported")
        return super().apply_chat_template(messages, generate=generate)


def test_turns_that_the_template_rewrites_later_become_samples_of_their_own_and_that_is_said():
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>x</think>b"}]
    with pytest.warns(RecordRemark, match="chat template rewrites: each turn became a sample") as said:
        samples = tasks.get("causal-lm").encode({"messages": turn * 3}, Thoughtful(), CONFIG, 200)
    assert len(said) == 1 and len(samples) == 3
    for number, sample in enumerate(samples):
        before = "[user]a[/][assistant]b[/]" * number + "[user]a[/][assistant]"
        assert bytes(sample["input_ids"]).decode() == before + "<think>x</think>b[/]"
        assert bytes(label for label in sample["labels"] if label != IGNORE) == b"<think>x</think>b[/]"


def test_a_template_that_refuses_a_role_is_quoted():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    messages.append({"role": "assistant", "content": "b"})
    with pytest.raises(BrokenRecord, match=r"refuses these turns \(system, user\): System role not supported"):
        tasks.get("causal-lm").encode({"messages": messages}, Strict(), CONFIG, 100)


def test_a_template_that_does_not_begin_as_it_asks_is_refused():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
    with pytest.raises(BrokenRecord, match="chat template does not begin turn 1 as it asks for one"):
        tasks.get("causal-lm").encode({"messages": messages}, Forgetful(), CONFIG, 100)


def test_a_conversation_that_is_cut_is_remarked_on():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "long" * 20}]
    with pytest.warns(RecordRemark, match=r"are longer than 40 tokens and cut off there \(seq_len\)"):
        (sample,) = tasks.get("causal-lm").encode({"messages": messages}, ByteTokenizer(), CONFIG, 40)
    assert len(sample["input_ids"]) == 40


@pytest.mark.parametrize(
    "messages, reason",
    [
        ("hello", "not a list of turns"),
        ([], "not a list of turns"),
        ([{"role": "user"}], "turn 0 of messages has no role and content"),
        (["hello"], "turn 0 of messages has no role and content"),
        (
            [{"role": "user", "content": "only me"}],
            "it has no assistant turn and no completion, so there is nothing to learn",
        ),
        (
            [{"role": "user", "content": "x" * 90}, {"role": "assistant", "content": "y"}],
            r"what is learned of it begins at token \d+, and samples have 50 tokens: set seq_len to \d+ or more",
        ),
    ],
)
def test_a_malformed_conversation_is_broken_for_a_reason(messages, reason):
    with pytest.raises(BrokenRecord, match=reason):
        tasks.get("causal-lm").encode({"messages": messages}, ByteTokenizer(), CONFIG, 50)


def test_conversations_are_padded_to_the_sample_length():
    batch = tasks.get("causal-lm").collate(
        [{"input_ids": [1, 2, 3], "labels": [IGNORE, 2, 3]}, {"input_ids": [4] * 9, "labels": [4] * 9}], CONFIG, 6
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0], [4] * 6]
    assert batch["labels"].tolist() == [[IGNORE, 2, 3] + [IGNORE] * 3, [4] * 6]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]


@pytest.mark.parametrize("family", ["mbart", "plbart"])
def test_a_decoder_that_begins_with_the_last_token_reads_what_its_own_model_would_give_it(family: str):
    import importlib

    from transformers import AutoConfig

    labels = torch.tensor([[5, 6, 7, 9], [5, 9, -100, -100]])
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = AutoConfig.for_model(family)
    expected = module.shift_tokens_right(labels.clone(), config.pad_token_id)
    assert shift_right(labels, config).tolist() == expected.tolist() == [[9, 5, 6, 7], [9, 5, 9, 1]]

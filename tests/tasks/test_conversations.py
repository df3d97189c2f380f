"""Kinds of records that people fine-tune on, tool calls, and what a chat template marks as generated."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from phalanx import tasks
from phalanx.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from phalanx.tasks.base import IGNORE, BrokenRecord
from phalanx.tasks.conversations import conversation_of

CONFIG = SimpleNamespace(vocab_size=300, pad_token_id=258)
END = "<|im_end|>"
TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3+3?"},
    {"role": "assistant", "content": "6"},
]


def encoded(record, tokenizer=None, tokens=400):
    return tasks.get("causal-lm").encode(record, tokenizer or ByteTokenizer(), CONFIG, tokens)


def texts(sample):
    """What a sample reads, and what of it is learned; ends are left out."""
    learned = bytes(label for label in sample["labels"] if 0 <= label < 256).decode()
    return bytes(i for i in sample["input_ids"] if i < 256).decode(), learned


@pytest.mark.parametrize(
    "record",
    [
        {"messages": TURNS[:2]},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": TURNS[:2]},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"prompt": TURNS[:1], "completion": TURNS[1:2]},
    ],
)
def test_every_kind_of_record_is_the_same_conversation(record):
    (sample,) = encoded(record)
    assert texts(sample) == ("user: 2+2?\nassistant: 4\n", "4")
    assert ByteTokenizer.eos_id in sample["labels"]


def test_alpacas_input_follows_its_instruction_and_its_system_stands_first():
    record = {"instruction": "Add.", "input": "2 and 2", "output": "4", "system": "Be brief."}
    (sample,) = encoded(record)
    assert texts(sample)[0] == "system: Be brief.\nuser: Add.\n\n2 and 2\nassistant: 4\n"


def test_a_completion_of_text_is_learned_and_ends():
    (sample,) = encoded({"prompt": "one two ", "completion": "three"})
    assert texts(sample) == ("one two three", "three")
    assert sample["labels"][-1] == ByteTokenizer.eos_id


def test_of_a_prompt_of_turns_nothing_is_learned():
    (sample,) = encoded({"prompt": TURNS[:3], "completion": TURNS[3:]})
    assert texts(sample)[1] == "6"


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}


def test_calls_of_tools_are_learned_with_their_arguments_as_values():
    tools = [{"type": "function", "function": {"name": "add"}}]
    record = {"messages": [TURNS[0], CALL, {"role": "tool", "content": "4"}, TURNS[1]], "tools": json.dumps(tools)}
    found = conversation_of(record)
    assert found.tools == tools
    assert found.turns[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    (sample,) = encoded(record)
    assert texts(sample)[1] == '{"name": "add", "arguments": {"a": 1}}4'
    assert texts(sample)[0].startswith('tools: [{"type": "function"')


def test_sharegpts_function_calls_are_calls():
    turns = [{"from": "human", "value": "2+2?"}, {"from": "function_call", "value": '{"name": "add"}'}]
    found = conversation_of({"conversations": turns}).turns[1]
    assert found["role"] == "assistant" and found["tool_calls"][0]["function"]["name"] == "add"


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"conversations": "x"}, "conversations is not a list of turns"),
        ({"conversations": [{"from": "human"}]}, "turn 0 of conversations has no from and value"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "is from 'martian', who is none of system, human"),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "turn 0 of conversations is not JSON"),
        ({"instruction": 3, "output": "x"}, "instruction, input and output are not texts"),
        ({"prompt": "x", "completion": 3}, "prompt is not a list of turns"),
        ({"messages": [{**CALL, "tool_calls": ["x"]}]}, "the tool_calls of turn 0 of messages are not a list of calls"),
        ({"messages": [{**CALL, "tool_calls": [{"function": {}}]}]}, "names no function"),
        ({"messages": TURNS, "tools": "{"}, "tools is not JSON"),
        ({"messages": TURNS, "tools": [3]}, "tools is not a list of JSON schemas"),
        (
            {"messages": [{**CALL, "tool_calls": [{"function": {"name": "add", "arguments": "("}}]}]},
            "the arguments of 'add' in turn 0 of messages is not JSON",
        ),
    ],
)
def test_a_malformed_record_is_broken_for_a_reason(record, reason):
    with pytest.raises(BrokenRecord, match=reason):
        encoded(record)


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REWRITING = MARKED.replace(
    "{{ m.content }}<|im_end|>{% endgen", "{% if loop.last %}hm {% endif %}{{ m.content }}{% endgen"
)


def with_template(tmp_path, template):
    ByteTokenizer().save(tmp_path)
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(tmp_path)
    inner.chat_template = template
    inner.save_pretrained(tmp_path)
    return HuggingFaceTokenizer(tmp_path), inner


def test_what_a_template_marks_as_generated_is_learned_as_transformers_masks_it(tmp_path):
    tokenizer, inner = with_template(tmp_path, MARKED)
    assert tokenizer.marks_generation
    (sample,) = encoded({"messages": TURNS}, tokenizer)
    expected = inner.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    masks, ids = expected["assistant_masks"], expected["input_ids"]
    kept = next(n for n in range(len(ids), 0, -1) if masks[n - 1])  # nothing is learned from the line's end behind it
    assert sample["input_ids"][:kept] == ids[:kept]
    assert [label != IGNORE for label in sample["labels"]][:kept] == [bool(m) for m in masks][:kept]
    assert texts(sample)[1] == f"4{END}6{END}"


def test_a_marked_template_that_rewrites_gives_a_sample_per_turn(tmp_path):
    tokenizer, _ = with_template(tmp_path, REWRITING)
    with pytest.warns(UserWarning, match="rewrites"):
        samples = encoded({"messages": TURNS}, tokenizer)
    assert [texts(sample)[1] for sample in samples] == ["hm 4", "hm 6"]
    assert "<|im_start|>assistant\n4<|im_start|>" in texts(samples[1])[0], (
        "earlier turns as the template writes them later"
    )


def test_a_template_that_marks_nothing_of_a_turn_is_named(tmp_path):
    tokenizer, _ = with_template(tmp_path, MARKED.replace("m.role == 'assistant'", "m.role == 'never'"))
    with pytest.raises(BrokenRecord, match="marks nothing of turn 1 as generated"):
        encoded({"messages": TURNS}, tokenizer)


def test_packed_conversations_have_the_loss_of_separate_ones():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
    )
    torch.manual_seed(0)
    model, task = LlamaForCausalLM(config).double().eval(), tasks.get("causal-lm")
    samples = [encoded({"prompt": "ab" * n, "completion": "cd" * n})[0] for n in (1, 3, 2)]
    batch = task.collate_packed([samples[:2], samples[2:]], config, 20)
    assert task.num_tokens(batch) == sum(len(sample["input_ids"]) for sample in samples)
    packed = model(**task.reference_inputs(batch), use_cache=False).loss
    total, count = 0.0, 0
    for sample in samples:
        ids, labels = (torch.tensor(sample[key])[None] for key in ("input_ids", "labels"))
        learned = int((labels[:, 1:] != IGNORE).sum())
        total, count = total + model(input_ids=ids, labels=labels).loss * learned, count + learned
    torch.testing.assert_close(packed, total / count, rtol=1e-9, atol=0)

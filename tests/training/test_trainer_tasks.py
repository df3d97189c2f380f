"""Every task trains from small files of its own kind, as the command line is given them."""

from __future__ import annotations

import json
import math
import wave
from pathlib import Path

import numpy as np
import pytest
import transformers

from tests.run_helpers import short_run


def write_lines(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def images(folder: Path) -> Path:
    for number, name in enumerate(("cats", "dogs")):
        (folder / name).mkdir(parents=True)
        for index in range(3):
            np.save(folder / name / f"{index}.npy", np.full((9, 9, 3), 100 * number + index, np.uint8))
    return folder


def speech(folder: Path) -> Path:
    folder.mkdir()
    for index in range(3):
        with wave.open(str(folder / f"{index}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16_000)
            file.writeframes(np.full(4_000, 1_000 * index, "<i2").tobytes())
    write_lines(folder / "transcripts.jsonl", *({"file": f"{i}.wav", "text": "word " * (i + 1)} for i in range(3)))
    return folder


def pairs(path: Path) -> Path:
    return write_lines(path, *({"source": "a" * (i + 2), "target": "b" * (i + 1)} for i in range(5)))


def labelled(path: Path) -> Path:
    return write_lines(path, *({"text": "good bad"[: i + 2], "label": i % 2} for i in range(5)))


def chats(path: Path) -> Path:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    return write_lines(path, *({"messages": turns * (i + 1)} for i in range(4)))


def text(path: Path) -> Path:
    path.write_text("some words to hide and to find again " * 20)
    return path


@pytest.mark.parametrize(
    ("model", "task", "make"),
    [
        ("google/vit-base-patch16-224-in21k", None, images),
        ("openai/whisper-small", None, speech),
        pytest.param("google-t5/t5-small", None, pairs, marks=pytest.mark.long),
        ("google/electra-base-generator", None, text),
        ("bert-base-cased", "text-classification", labelled),
    ],
    ids=["images", "speech", "text-to-text", "masked", "classification"],
)
def test_every_task_trains_evaluates_and_exports(model: str, task: str | None, make, tmp_path: Path):
    suffix = {pairs: ".jsonl", labelled: ".jsonl", text: ".txt"}.get(make, "")
    data = make(tmp_path / f"data{suffix}")
    result = short_run(model, data, tmp_path / "run", task=task, steps=2, eval_data=str(data), plan="mb=2", lr=1e-3)
    assert len(result.losses) == 2 and all(map(math.isfinite, (*result.losses, result.eval_loss)))
    assert type(transformers.AutoModel.from_pretrained(result.export).config) is type(result.module().config)


def test_conversations_train_on_what_the_assistant_says(tmp_path: Path):
    data = chats(tmp_path / "chat.jsonl")
    result = short_run("phalanx-demo", data, tmp_path / "run", seq_len=64, steps=1)
    assert math.isfinite(result.loss)

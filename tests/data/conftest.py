"""`opened(data, task, …)`: data opened with a small configuration, a byte tokenizer and a fresh cache."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx import tasks
from phalanx.data.batches import open_data
from phalanx.data.tokenizer import ByteTokenizer

CONFIG = SimpleNamespace(
    vocab_size=300,
    pad_token_id=258,
    decoder_start_token_id=256,
    max_position_embeddings=4096,
    max_target_positions=64,
    num_labels=2,
    label2id={"bad": 0, "good": 1},
    image_size=8,
    num_channels=3,
    num_mel_bins=80,
    max_source_positions=50,
)


@pytest.fixture
def opened(tmp_path):
    def opened(data, task="causal-lm", *, tokens=8, seed=0, config=CONFIG, tokenizer=None, **options):
        cache = options.pop("cache", tmp_path / "cache")
        chosen = tokenizer or ByteTokenizer()
        return open_data(
            data,
            task=tasks.get(task),
            config=config,
            tokenizer=chosen,
            tokens=tokens,
            seed=seed,
            cache=cache,
            **options,
        )

    return opened


@pytest.fixture
def config():
    return CONFIG
